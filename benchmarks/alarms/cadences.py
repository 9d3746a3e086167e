"""Which steps of a run the watch reads by default, for steps of a given length.

The recorded runs have every step. What a reader of the defaults would have seen is replayed: the
cadence runs against a clock of its own, on which a step and a reading take what is said here.
"""

from dataclasses import dataclass

from scaledot.watch.cadence import Cadence

FIRST, SECOND = 3.0, 1.4  # what the first two readings cost, in readings of later steps


@dataclass(frozen=True)
class Pace:
    """Steps of this length, and readings that cost this share of one."""

    name: str  # of the columns step_warn_... and step_act_...
    words: str
    step: float  # seconds
    reading: float  # of a step


PACES = (
    Pace("fast", "default cadence, steps of 5 ms", 0.005, 0.5),
    Pace("slow", "default cadence, steps of 30 ms", 0.03, 0.9),
)


def read_steps(steps: int, pace: Pace) -> list[int]:
    clock = _Clock()
    cadence = Cadence(clock=clock)
    read = []
    for step in range(steps):
        clock.now += pace.step
        if cadence.due:
            cost = pace.step * pace.reading * {0: FIRST, 1: SECOND}.get(len(read), 1.0)
            clock.now += cost
            cadence.spend(cost)
            read.append(step)
        cadence.close_step()
    return read


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now
