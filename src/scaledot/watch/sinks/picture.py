"""`PictureSink`: what the sinks for dashboards share: pictures and aggregates of whole steps."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from scaledot.watch.reading import Reading, Scalar
from scaledot.watch.sinks.aggregate import Aggregates, prefix_of
from scaledot.watch.sinks.background import BackgroundSink
from scaledot.watch.sinks.heat_map import caption, check_vitals, heat_map
from scaledot.watch.sinks.whole import Steps, WholeStep

# Growth of the logits, what it does to the softmax, what that does to the gradient.
VITALS = ("max_logit", "entropy_ratio", "passes")


class Picture(NamedTuple):
    pixels: np.ndarray  # [height, width, 3] uint8
    caption: str


class PictureSink(BackgroundSink):
    """A heat map of layers and heads for each of `vitals`, and aggregates of layers.

    pictures: a picture every so many steps that are read, for they are the larger part of the
    disk; 0 for none.
    """

    def __init__(self, vitals: Sequence[str] = VITALS, pictures: int = 1) -> None:
        self.vitals = check_vitals(vitals)
        if pictures < 0:
            raise ValueError(f"pictures={pictures}; give 0 for none, or one every N readings")
        self._every = pictures
        self._seen = 0
        self._aggregates = Aggregates(self.vitals)
        self._steps_of = Steps()
        super().__init__()

    @abstractmethod
    def _show(self, step: WholeStep, numbers: dict[str, float]) -> None:
        """Pass on a step; `_pictures(step)` has its pictures."""

    @abstractmethod
    def _number(self, scalar: Scalar) -> None:
        """Pass on a scalar."""

    @abstractmethod
    def _push(self) -> None:
        """Make readers see what was shown."""

    def _take(self, readings: Sequence[Reading], scalars: Sequence[Scalar]) -> None:
        for reading in readings:
            for whole in self._steps_of.add(reading):
                self._show(whole, self._aggregates.of(whole))
        for scalar in scalars:
            self._number(scalar)

    def _tick(self) -> None:
        self._push()  # the last step may still be growing

    def _flush(self) -> None:
        for whole in self._steps_of.rest():
            self._show(whole, self._aggregates.of(whole))
        self._push()

    def _pictures(self, step: WholeStep) -> dict[str, Picture]:
        due = self._every > 0 and self._seen % self._every == 0
        self._seen += 1
        if not due:
            return {}
        return {
            f"{prefix_of(step.phase)}/{vital}": Picture(heat_map(step, vital), caption(step, vital))
            for vital in self.vitals
        }
