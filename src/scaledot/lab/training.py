"""A real training under the watch, with a learning rate that attention does not survive.

The scores grow and the softmax closes, head after head, while the loss falls and then lingers, as
losses do: only the vital signs show it.
"""

import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor
from torch.nn import functional as F

from scaledot.lab.character_model import CharacterModel
from scaledot.measure import BANDS
from scaledot.watch import Watch
from scaledot.watch.reading import Reading, RunAttributes
from scaledot.watch.store import Store, StoreError

LEARNING_RATE = 3e-2  # ten times what such a model likes
WARM_UP = 50  # steps; then a cosine down to 0 at HORIZON, of which the demo shows the beginning
HORIZON = 400
LOSS_RISES = 0.5  # a loss alarm: the mean of a few steps so far above the lowest such mean
LOSS_MEAN = 5


@dataclass(frozen=True)
class Size:
    """Of model, batch and run; tests take a smaller one."""

    steps: int = 120
    layers: int = 3
    width: int = 128
    heads: int = 4
    tokens: int = 128
    batch: int = 16


@dataclass(frozen=True)
class Moment:
    """One step: what every training shows, and what the watch adds."""

    step: int
    loss: float
    loss_mean: float  # of the last LOSS_MEAN steps: batches differ
    gradient_norm: float  # before it is clipped to 1
    max_logit: float  # of all heads
    passes: float  # mean over heads
    closed: float  # share of heads whose softmax passes less than its band


@dataclass(frozen=True)
class Training:
    characters: int
    vocabulary: int
    parameters: int
    learning_rate: float
    size: Size
    moments: tuple[Moment, ...]  # every step
    max_logit_high: float  # the bands' edges that count here
    passes_low: float
    logits_leave: int | None  # first step with a score above its band; None: never
    half_closed: int | None  # first step at which half of the heads are closed
    loss_rise: float  # what a loss alarm waits for, over steps_of_mean steps
    steps_of_mean: int
    loss_alarm: int | None  # first step at which the loss has risen so far
    seconds: float
    watch_cost: float | None  # share of the step time; None: too few steps to say
    coverage: str
    store: str | None  # the file; None: there is none, and then `no_store` says why
    no_store: str = ""


def train(
    seed: int = 0,
    size: Size | None = None,
    store: str | os.PathLike[str] | None = None,
    after_step: Callable[[], None] = lambda: None,
) -> Training:
    """The same seed gives the same numbers, and torch's own generator is left alone."""
    size = size or Size()
    text = python_topics()
    alphabet = sorted(set(text))
    tokens = _encoded(text, alphabet)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):  # torch's modules draw weights before ours do
        model = CharacterModel(len(alphabet), size.layers, size.width, size.heads, generator)
    file, no_store = _opened(store, model)
    readings: list[Reading] = []
    began = time.perf_counter()
    try:
        with Watch(model, every=1, store=file, sinks=[readings]) as watch:
            seen = _steps(model, tokens, size, generator, after_step)
    finally:
        if file is not None:
            file.close()
            no_store = file.broken or no_store
    moments = _moments(seen, readings)
    return Training(
        characters=len(text),
        vocabulary=len(alphabet),
        parameters=sum(weight.numel() for weight in model.parameters()),
        learning_rate=LEARNING_RATE,
        size=size,
        moments=moments,
        max_logit_high=_edge(BANDS["max_logit"].high),
        passes_low=_edge(BANDS["passes"].low),
        logits_leave=_first(moments, lambda m: m.max_logit > _edge(BANDS["max_logit"].high)),
        half_closed=_first(moments, lambda m: m.closed >= 0.5),
        loss_rise=LOSS_RISES,
        steps_of_mean=LOSS_MEAN,
        loss_alarm=loss_alarm([moment.loss_mean for moment in moments]),
        seconds=time.perf_counter() - began,
        watch_cost=watch.cadence.share,
        coverage=str(watch.coverage()),
        store=None if file is None or no_store else str(file.path),
        no_store=no_store,
    )


def python_topics() -> str:
    """What Python's help() knows of the language: text that every installation has."""
    from pydoc_data.topics import topics  # late: half a megabyte

    return "\n".join(topics[name] for name in sorted(topics))


def loss_alarm(means: Sequence[float]) -> int | None:
    """The first step whose mean is LOSS_RISES above the lowest so far, or is no number."""
    lowest = math.inf
    for step, mean in enumerate(means):
        lowest = min(lowest, mean)
        if not mean <= lowest + LOSS_RISES:
            return step
    return None


def _steps(
    model: CharacterModel,
    tokens: Tensor,
    size: Size,
    generator: torch.Generator,
    after_step: Callable[[], None],
) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    seen = []
    for step in range(size.steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * _schedule(step)
        here, following = _batch(tokens, size, generator)
        loss = F.cross_entropy(model(here).flatten(0, 1), following.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen.append((loss.item(), norm.item()))
        after_step()
    return seen


def _schedule(step: int) -> float:
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    done = min((step - WARM_UP) / (HORIZON - WARM_UP), 1.0)
    return (1 + math.cos(math.pi * done)) / 2


def _batch(tokens: Tensor, size: Size, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pieces from anywhere in the text, and the same one character later: [B, T] twice."""
    starts = torch.randint(len(tokens) - size.tokens, (size.batch, 1), generator=generator)
    pieces = tokens[starts + torch.arange(size.tokens + 1)]
    return pieces[:, :-1], pieces[:, 1:]


def _encoded(text: str, alphabet: list[str]) -> Tensor:
    number = {character: index for index, character in enumerate(alphabet)}
    return torch.tensor([number[character] for character in text])


def _opened(path: str | os.PathLike[str] | None, model: CharacterModel) -> tuple[Store | None, str]:
    """The store, or why there is none; the training goes on without."""
    if path is None:
        return None, ""
    folder = Path(path).absolute().parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass  # asked first: a store would try again and again
        return Store(path, RunAttributes.here(model)), ""
    except (OSError, StoreError) as error:
        return None, str(error) if isinstance(error, StoreError) else f"{folder}: {error.strerror}"


def _moments(seen: list[tuple[float, float]], readings: list[Reading]) -> tuple[Moment, ...]:
    steps: dict[int, list[Reading]] = {}
    for reading in readings:
        steps.setdefault(reading.step, []).append(reading)
    return tuple(_moment(step, seen, layers) for step, layers in sorted(steps.items()))


def _moment(step: int, seen: list[tuple[float, float]], layers: list[Reading]) -> Moment:
    loss, norm = seen[step]
    passes = [float(value) for layer in layers for value in layer.value("passes")]
    return Moment(
        step=step,
        loss=loss,
        loss_mean=fmean(loss for loss, _ in seen[max(0, step + 1 - LOSS_MEAN) : step + 1]),
        gradient_norm=norm,
        max_logit=max(float(layer.value("max_logit").max()) for layer in layers),
        passes=fmean(passes),
        closed=fmean(value < _edge(BANDS["passes"].low) for value in passes),
    )


def _first(moments: tuple[Moment, ...], holds: Callable[[Moment], bool]) -> int | None:
    return next((moment.step for moment in moments if holds(moment)), None)


def _edge(value: float | None) -> float:
    assert value is not None, "the band has lost the edge that the demo speaks of"
    return value
