"""Say whether enough of a run was read to call it healthy: one rule for `run`, `top` and `report`.

A reading is one step that was read, of all its heads. Enough are as many as the alarms need before
they can speak of growth, with no gap between two of them in which an illness could come, last and
not be seen. The early readings leave gaps of 3 % of the steps, a third of what is allowed here.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from scaledot.watch.alarms.stretch import APART as LASTING
from scaledot.watch.alarms.trend import APART, FEWEST, FEWEST_APART

WIDEST = 0.10  # of the run's steps: the gap between two readings that is still narrow enough
WANTED = 80  # readings that a proposed --every gives


def enough_layers(seen: int, unseen: int) -> bool:
    """Whether at least half of a model's attention layers were seen."""
    return seen >= unseen


@dataclass(frozen=True)
class Evidence:
    """Count what was read of a run; of several layers, of the one that was read least."""

    steps: int  # that the run has had
    read: int  # of these
    gap: int  # most steps from one reading to the next, or to an end of the run
    span: int = 0  # steps from the first reading to the last

    @property
    def enough(self) -> bool:
        many = self.read >= FEWEST or (self.read >= FEWEST_APART and self.span >= APART)
        return many and self.gap <= max(LASTING, WIDEST * self.steps)

    @property
    def every(self) -> int | None:
        """Return the --every that would read enough; None: every step was read already."""
        return None if self.read >= self.steps else max(1, self.steps // WANTED)

    def __str__(self) -> str:
        """61 of 400 steps were read, at most 12 apart"""
        if self.read >= self.steps:
            one = self.steps == 1
            return "the only step was read" if one else f"all {self.steps:,} steps were read"
        verb = "was" if self.read == 1 else "were"
        apart = f", at most {self.gap:,} apart" if self.read > 1 else ""
        return f"{self.read:,} of {self.steps:,} steps {verb} read{apart}"

    @property
    def advice(self) -> str:
        """3 of 400 steps were read, at most 306 apart; --every 5 reads more"""
        if self.every is None:
            return f"{self}; a trend needs {FEWEST}"
        return f"{self}; --every {self.every} reads more"


class Read:
    """Follow the steps in which one layer is read."""

    def __init__(self, steps: np.ndarray | None = None) -> None:
        """steps: that are known already, in order."""
        self.number = self._gap = 0
        self._first = self._last = -1
        if steps is not None and len(steps):
            self.number, self._gap = len(steps), int(np.diff(steps).max(initial=0))
            self._first, self._last = int(steps[0]), int(steps[-1])

    def add(self, step: int) -> None:
        """Steps come in order; one that came already is no news."""
        if self.number and step <= self._last:
            return
        self._gap = max(self._gap, step - self._last) if self.number else 0
        self._first = self._first if self.number else step
        self._last = step
        self.number += 1

    def until(self, first: int, last: int) -> Evidence:
        """Hold the readings against a run from step `first` to step `last`."""
        first, last = min(first, self._first), max(last, self._last)
        gap = max(self._gap, self._first - first, last - self._last)
        return Evidence(last - first + 1, self.number, gap, self._last - self._first)


def least(every: Iterable[Evidence]) -> Evidence:
    """Return the evidence of the layer read least: a head that was not read may be ill."""
    return min(every, key=lambda one: (one.enough, -one.gap, one.read), default=Evidence(0, 0, 0))
