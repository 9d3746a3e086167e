"""Steps with and without the watch, in turn, and the attention of a step by itself.

A watch that chooses its own cadence looks at one step in N and lets the others pass. Both kinds of
step are timed, N is counted in a run of its own, and a step at that cadence takes

    quiet + (measured - quiet) / N.

Timed directly, the few measured steps would drown in the noise of the many quiet ones. A watch is
in place only during its own steps: its probes would slow the others.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from scaledot.bench import clock
from scaledot.bench.clock import Samples
from scaledot.bench.watch.model import Shape, Trainer
from scaledot.watch import Watch

FIRST_SAMPLES = 2  # a watch looks at its first two steps, whatever they cost
CYCLES = 3  # from one look to the next, counted for N
LONGEST = 300  # steps after which nobody waits for the next look
NEVER = 10**6  # steps from one look to the next, where all but the first shall be quiet


class Times(NamedTuple):
    """Milliseconds a step, one sample a round; and N."""

    plain: Samples
    quiet: Samples  # the watch is there and does not look
    measured: Samples  # the watch looks at every head
    attention: Samples  # of all layers, forward and backward, alone
    forward: Samples
    cadence: float  # N: steps from one look to the next, as the watch chooses

    @property
    def default(self) -> Samples:
        pairs = zip(self.quiet.values, self.measured.values, strict=True)
        return Samples(
            tuple(quiet + (measured - quiet) / self.cadence for quiet, measured in pairs)
        )


def race(
    shape: Shape, rounds: int, steps: int, after_round: Callable[[], None] = lambda: None
) -> Times:
    """steps: of each side in a round."""
    trainer = Trainer(shape)
    with tempfile.TemporaryDirectory() as folder, clock.collector_off():
        store = Path(folder) / "run.vitals"  # as a user's watch has one: its writer is a cost too
        cadence = chosen_cadence(trainer, store)  # and everything is warm
        sides: dict[str, Callable[[], float]] = {
            "plain": lambda: fast(trainer.step, steps),
            "quiet": lambda: _watched(trainer, NEVER, store, steps),
            "measured": lambda: _watched(trainer, 1, store, steps),
            "attention": lambda: fast(trainer.attend, steps),
            "forward": lambda: fast(trainer.attend_forward, steps),
        }
        times: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(rounds):
            for name in clock.rotated(list(sides), number):
                times[name].append(1e3 * sides[name]())
            after_round()
    return Times(**{name: Samples(tuple(each)) for name, each in times.items()}, cadence=cadence)


def chosen_cadence(trainer: Trainer, store: Path) -> float:
    """Steps from one look to the next, over whole cycles, once the first two are paid for."""
    looks: list[int] = []
    with Watch(trainer.model, store=store) as watch:
        while len(looks) <= CYCLES and watch.step_number < LONGEST:
            if watch.step_number >= FIRST_SAMPLES and watch.cadence.due:
                looks.append(watch.step_number)
            trainer.step()
    return (looks[-1] - looks[0]) / (len(looks) - 1) if len(looks) > 1 else float(LONGEST)


def fast(call: Callable[[], object], calls: int) -> float:
    """Seconds a call in the fastest fifth of them, after one that is not counted.

    Other work on the machine only ever adds time, and it is larger than what is looked for here.
    """
    call()
    return Samples(tuple(clock.wall_seconds(call, 1) for _ in range(calls))).p20


def _watched(trainer: Trainer, every: int, store: Path, steps: int) -> float:
    with Watch(trainer.model, every=every, store=store):
        return fast(trainer.step, steps)  # the watch looks at the first step in any case
