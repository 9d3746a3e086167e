"""Steps with and without the watch, in turn, in one process and on one model.

A round is A B C .. C B A: every side comes once early and once late, so that a machine that grows
slower during the round hits all sides alike. A side's value in a round is the lower quartile of its
steps: other work on the machine only ever adds. A watch is in place only during its own steps; its
first step is not timed.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from scaledot.bench import clock
from scaledot.bench.watch.laps import Laps, laps
from scaledot.bench.watch.model import Trainer
from scaledot.watch import Watch
from scaledot.watch.cadence import WHOLE_STEPS

LOOKS = 20  # after which the interval of the long run is known
NEVER = 10**6  # steps from one look to the next, where all but the first shall be quiet

Side = Callable[[], Laps]


class Times(NamedTuple):
    """Milliseconds a step: by clock, by side, one value a round; and N."""

    by_clock: Mapping[str, Mapping[str, np.ndarray]]
    cadence: float  # N: steps from one look to the next, as the watch chooses


def race(
    trainer: Trainer,
    rounds: int,
    steps: int,
    longest: int,
    after_round: Callable[[], None] = lambda: None,
) -> Times:
    """steps: of a side, twice in each round. longest: steps within which N is counted.

    Sides: plain; quiet (the watch is there and does not look); measured (it looks at every head of
    the whole batch); sampled (of a part of it, as it does where no interval was asked for);
    on a GPU replaced (attention and vitals in one pass); attention (of all layers, alone). On a CPU
    also the host's part of plain and quiet, of a shrunken model.
    """
    device = trainer.device
    with tempfile.TemporaryDirectory() as folder, clock.collector_off():
        store = Path(folder) / "run.vitals"  # as a user's watch has one: its writer is a cost too
        cadence = chosen_cadence(trainer, store, longest)  # and everything is warm
        sides: dict[str, Side] = {
            "plain": lambda: _timed(trainer.step, steps, device),
            "quiet": lambda: _watched(trainer, steps, store, every=NEVER),
            "measured": lambda: _watched(trainer, steps, store, every=1),
            "sampled": lambda: _sampled(trainer, steps, store),
            "attention": lambda: _timed(trainer.attend, steps, device),
        }
        if device == "cuda":
            sides["replaced"] = lambda: _watched(trainer, steps, store, every=1, replace=True)
        else:
            small, many = Trainer(trainer.shape.shrunk(), device), 8 * steps
            sides["small_plain"] = lambda: _timed(small.step, many, device)
            sides["small_quiet"] = lambda: _watched(small, many, store, every=NEVER)
        found = _rounds(sides, rounds, after_round)
    return Times(found, cadence)


def chosen_cadence(trainer: Trainer, store: Path, longest: int) -> float:
    """Return the steps between two looks in the long run, which the early looks have measured."""
    looks = 0
    with Watch(trainer.model, store=store) as watch:
        while looks < LOOKS and watch.step_number < longest:
            looks += watch.cadence.due
            trainer.step()
            if trainer.device == "cuda":  # else the host would run ahead of what it measures
                torch.cuda.synchronize()
        return float(watch.cadence.steady_every)


def _rounds(
    sides: Mapping[str, Side], rounds: int, after_round: Callable[[], None]
) -> dict[str, dict[str, np.ndarray]]:
    found: dict[str, dict[str, list[float]]] = {}
    for number in range(rounds):
        order = clock.rotated(list(sides), number)
        taken: dict[str, Laps] = {name: [] for name in sides}
        for name in (*order, *reversed(order)):
            taken[name] += sides[name]()
        for name, steps in taken.items():
            for which in steps[0]:
                value = float(np.quantile([step[which] for step in steps], 0.25))
                found.setdefault(which, {}).setdefault(name, []).append(value)
        after_round()
    return {
        which: {name: np.array(values) for name, values in sides_of.items()}
        for which, sides_of in found.items()
    }


def _timed(call: Callable[[], object], calls: int, device: str) -> Laps:
    call()
    return laps(call, calls, device)


def _watched(trainer: Trainer, steps: int, store: Path, every: int, replace: bool = False) -> Laps:
    with Watch(trainer.model, every=every, store=store, replace=replace):
        return _timed(trainer.step, steps, trainer.device)


def _sampled(trainer: Trainer, steps: int, store: Path) -> Laps:
    """Time steps each of which the watch looks at as it looks at one in N."""
    with Watch(trainer.model, store=store) as watch:

        def step() -> object:
            watch.cadence.due = True
            return trainer.step()

        for _ in range(WHOLE_STEPS):
            step()
        return _timed(step, steps, trainer.device)


@contextmanager
def one_thread(device: str) -> Iterator[None]:
    """A CPU is timed with one thread: with more, the processor's time counts their waiting."""
    before = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
