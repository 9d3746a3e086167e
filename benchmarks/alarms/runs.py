"""Small trainings whose vital signs are recorded once; every rule is then replayed over them.

A run is a character model as in scaledot.lab (RoPE, pre-norm, no biases) with one thing or
another changed. Its *twins* are the same run, seed and batches and all, with a remedy from the
first step on: scores held by QK-Clip, or the right scale. How much better the best twin ends says
whether the run was sick.

Larger runs train on a GPU in bfloat16: there no step waits for the device, so losses and norms
stay on it until the end, and scores are held by scaledot's own remedy.
"""

import dataclasses
import hashlib
import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from clips import Clip
from torch import Tensor, nn
from torch.nn import functional as F

from scaledot.lab.character_model import CharacterModel, SelfAttention, rotated
from scaledot.lab.training import python_topics
from scaledot.measure import COUNT_FIELDS, FLOAT_FIELDS
from scaledot.watch import Watch
from scaledot.watch.reading import Reading

HELD_OUT = 20_000  # characters at the end of the text that no training sees
JUDGED_ON = 16  # batches of them
CLIP_NORM = 1.0
# The twin's threshold. Kimi K2 used 100 and found 30 no worse on small models (arXiv 2507.20534);
# with 30 the label does not favour "score above 100", which would be right by construction.
CLIP = 30.0
HIDDEN = 0.15  # share of characters that "masked" hides
KEPT = ("floats", "counts", "losses", "norms", "final", "seconds", "parameters")  # beside layers


@dataclass(frozen=True)
class Setup:
    """All that makes a run; the same set-up gives the same numbers on the same machine."""

    layers: int = 2
    width: int = 64
    heads: int = 4
    tokens: int = 64
    batch: int = 8
    steps: int = 240
    warm_up: int = 30
    optimizer: str = "adamw"  # "adamw", "sgd" (momentum 0.9) or "muon" (AdamW for embeddings)
    rate: float = 3e-3
    scale: str = "sqrt_dk"  # or "none", "dk"
    model: str = "rope"  # or "learned" (positions, and torch's own weights), "encoder" (torch's)
    seed: int = 0
    clip: float | None = None  # QK-Clip's threshold: the remedy of a twin
    task: str = "text"  # or "masked": hidden characters; "repeat": the second half is the first
    large: bool = False  # bfloat16 autocast, and a twin's scores held by scaledot's own remedy
    device: str = "cpu"

    @property
    def d_k(self) -> int:
        return self.width // self.heads

    @property
    def factor(self) -> float:
        """What the scores are multiplied by."""
        return {"none": 1.0, "sqrt_dk": self.d_k**-0.5, "dk": 1 / self.d_k}[self.scale]

    @property
    def name(self) -> str:
        came_later = {"task": "text", "large": False, "device": "cpu"}  # than the first recordings
        fields = {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if name not in came_later or value != came_later[name]
        }
        told = json.dumps(fields, sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Recorded:
    setup: Setup
    layers: tuple[str, ...]
    floats: np.ndarray  # float32 [steps, layers, F, heads]
    counts: np.ndarray  # int64 [steps, layers, C, heads]
    losses: np.ndarray  # [steps], of the batch
    norms: np.ndarray  # [steps], of the gradient before it is clipped
    final: float  # held-out loss after the last step
    seconds: float
    parameters: int = 0  # of the model; 0: recorded before they were counted

    def readings(self, step: int) -> list[Reading]:
        return [
            Reading.trusted(step, "train", 0.0, name, self.floats[step, at], self.counts[step, at])
            for at, name in enumerate(self.layers)
        ]

    def vital(self, name: str) -> np.ndarray:
        """[steps, heads of all layers]"""
        found = self.floats[:, :, FLOAT_FIELDS.index(name)]
        return found.reshape(len(found), -1)


def recorded(
    setup: Setup, folder: Path, stop: int | None = None, sampled: bool = False
) -> Recorded:
    """Take a run from the folder, or train it now and keep it there.

    stop: only so many of its steps. sampled: each step's readings are of a part of its batch, as
    the watch reads where no interval was asked for; the training is the same.
    """
    kind = f"{'' if stop is None else f'-{stop}'}{'-sampled' if sampled else ''}"
    path = folder / f"{setup.name}{kind}.npz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        found = train(setup, stop, sampled)
        scratch = path.with_suffix(f".{os.getpid()}.npz")  # others may make the same run
        np.savez_compressed(
            scratch,
            layers=np.array(found.layers),
            **{name: getattr(found, name) for name in KEPT},
        )
        scratch.rename(path)
    with np.load(path) as kept:
        return Recorded(
            setup,
            tuple(kept["layers"].tolist()),
            kept["floats"],
            kept["counts"],
            kept["losses"],
            kept["norms"],
            float(kept["final"]),
            float(kept["seconds"]),
            int(kept["parameters"]) if "parameters" in kept else 0,
        )


def twins(setup: Setup) -> list[Setup]:
    """The same run with a remedy."""
    clipped = dataclasses.replace(setup, clip=CLIP)
    if setup.scale == "sqrt_dk":
        return [clipped]
    return [clipped, dataclasses.replace(setup, scale="sqrt_dk")]


def train(setup: Setup, stop: int | None = None, sampled: bool = False) -> Recorded:
    began = time.perf_counter()
    torch.set_num_threads(1)
    text, vocabulary = _text()
    tokens = text.to(setup.device)
    generator = torch.Generator().manual_seed(setup.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(setup.seed)
        model = built(setup, vocabulary, generator).to(setup.device)
    optimizers = _optimizers(setup, model)
    seen: list[Reading] = []
    losses, norms = [], []
    with (
        Watch(
            model, every=None if sampled else 1, sinks=[seen], losses=False, alarms=False
        ) as watch,
        Clip(watch, model, setup.clip, by_remedy=setup.large) as clip,
    ):
        for step in range(stop or setup.steps):
            watch.cadence.due = True
            here, following = _batch(tokens[:-HELD_OUT], setup, generator)
            with _precision(setup):
                loss = F.cross_entropy(model(here).flatten(0, 1), following.flatten())
            model.zero_grad()
            loss.backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM))
            losses.append(loss.detach())
            for optimizer, rate in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate * schedule(step, setup)
                optimizer.step()
            clip.after_step()
    final = _held_out(model, tokens[-HELD_OUT:], setup)
    names = tuple(dict.fromkeys(reading.layer for reading in seen))
    shape = (len(losses), len(names))
    floats = np.stack([one.floats for one in seen]).reshape(*shape, len(FLOAT_FIELDS), -1)
    counts = np.stack([one.counts for one in seen]).reshape(*shape, len(COUNT_FIELDS), -1)
    return Recorded(
        setup,
        names,
        floats,
        counts,
        _fetched(losses),
        _fetched(norms),
        final,
        time.perf_counter() - began,
        sum(weight.numel() for weight in model.parameters()),
    )


def _precision(setup: Setup) -> torch.autocast:
    return torch.autocast(torch.device(setup.device).type, torch.bfloat16, enabled=setup.large)


def _fetched(numbers: list[Tensor]) -> np.ndarray:
    return np.array(torch.stack(numbers).tolist())


def schedule(step: int, setup: Setup) -> float:
    if step < setup.warm_up:
        return (step + 1) / setup.warm_up
    done = (step - setup.warm_up) / max(setup.steps - setup.warm_up, 1)
    return (1 + math.cos(math.pi * min(done, 1.0))) / 2


def built(setup: Setup, vocabulary: int, generator: torch.Generator) -> nn.Module:
    if setup.model == "encoder":
        return _Encoder(vocabulary, setup)
    model = CharacterModel(vocabulary, setup.layers, setup.width, setup.heads, generator)
    for block in model.blocks:
        block.attention = _Attention(block.attention, setup.factor, rope=setup.model == "rope")
    if setup.model == "learned":
        model.embed = _Learned(vocabulary, setup.tokens, setup.width)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
    return model


class _Attention(nn.Module):
    """The lab's attention with another scale, with or without RoPE."""

    def __init__(self, old: SelfAttention, scale: float, rope: bool) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = old.heads, old.qkv, old.out
        self.scale, self.rope = scale, rope

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        query, key, value = (
            part.view(batch, tokens, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        if self.rope:
            query, key = rotated(query), rotated(key)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


class _Learned(nn.Module):
    def __init__(self, vocabulary: int, tokens: int, width: int) -> None:
        super().__init__()
        self.character, self.place = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        for table in (self.character, self.place):
            nn.init.normal_(table.weight, std=0.02)  # as GPT-2 does

    def forward(self, tokens: Tensor) -> Tensor:
        return self.character(tokens) + self.place.weight[: tokens.shape[1]]


class _Encoder(nn.Module):
    """torch's own: post-norm, every token sees every other, nn.MultiheadAttention inside."""

    def __init__(self, vocabulary: int, setup: Setup) -> None:
        super().__init__()
        self.embed = _Learned(vocabulary, setup.tokens, setup.width)
        layer = nn.TransformerEncoderLayer(
            setup.width, setup.heads, 4 * setup.width, dropout=0.0, batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, setup.layers)
        self.head = nn.Linear(setup.width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(tokens)))


def _optimizers(setup: Setup, model: nn.Module) -> list[tuple[Any, float]]:
    """Each with its learning rate."""
    every = list(model.parameters())
    if setup.optimizer == "sgd":
        return [(torch.optim.SGD(every, momentum=0.9), setup.rate)]
    if setup.optimizer == "adamw":
        return [(_adamw(every), setup.rate)]
    inner = [p for name, p in model.named_parameters() if p.dim() == 2 and "blocks" in name]
    others = [p for p in every if not any(p is one for one in inner)]
    muon = torch.optim.Muon(inner, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    return [(muon, setup.rate), (_adamw(others), min(setup.rate, 1e-2))]


def _adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0.0)


def _held_out(model: nn.Module, tokens: Tensor, setup: Setup) -> float:
    """inf where the model answers with no number."""
    generator = torch.Generator().manual_seed(1_000)
    losses = []
    model.eval()
    with torch.no_grad(), _precision(setup):
        for _ in range(JUDGED_ON):
            here, following = _batch(tokens, dataclasses.replace(setup, batch=32), generator)
            losses.append(F.cross_entropy(model(here).flatten(0, 1), following.flatten()))
    total = sum(_fetched(losses).tolist())
    return total / JUDGED_ON if math.isfinite(total) else math.inf


def _batch(tokens: Tensor, setup: Setup, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Input and what is asked for; -100 where nothing is."""
    starts = torch.randint(len(tokens) - setup.tokens, (setup.batch, 1), generator=generator)
    starts = starts.to(tokens.device, non_blocking=True)
    pieces = tokens[starts + torch.arange(setup.tokens + 1, device=tokens.device)]
    if setup.task == "masked":
        pieces = pieces[:, :-1]
        hidden = torch.rand(pieces.shape, generator=generator) < HIDDEN
        return pieces.masked_fill(hidden, 0), pieces.masked_fill(~hidden, -100)
    if setup.task == "repeat":
        half = (setup.tokens + 1) // 2
        order = torch.rand(pieces.shape, generator=generator).argsort(1)
        shuffled = pieces.gather(1, order)[:, :half]  # no language in it: it must be looked up
        pieces = torch.cat([shuffled, shuffled], 1)
        asked = pieces[:, 1:].clone()
        asked[:, : half - 1] = -100
        return pieces[:, :-1], asked
    return pieces[:, :-1], pieces[:, 1:]


def _text() -> tuple[Tensor, int]:
    text = python_topics()
    alphabet = sorted(set(text))
    number = {character: index for index, character in enumerate(alphabet)}
    return torch.tensor([number[character] for character in text]), len(alphabet)
