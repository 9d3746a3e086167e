"""Whole steps, for what shows all layers at once: a step may reach a sink in several parts."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from scaledot.watch.reading import Phase, Reading


@dataclass
class WholeStep:
    """All layers of one step and phase, in the order in which they first ran."""

    step: int
    phase: Phase
    layers: dict[str, Reading] = field(default_factory=dict)

    def add(self, reading: Reading) -> None:
        before = self.layers.get(reading.layer)
        self.layers[reading.layer] = reading if before is None else before.merge(reading)

    def values(self, vital: str, layers: Sequence[str] | None = None) -> np.ndarray:
        """Of all heads that counted a row and are finite; of these layers or of all."""
        readings = [self.layers[name] for name in (self.layers if layers is None else layers)]
        kept = [counted(reading, vital) for reading in readings]
        together = np.concatenate(kept) if kept else np.empty(0)
        return together[np.isfinite(together)]


def counted(reading: Reading, vital: str) -> np.ndarray:
    """[heads] float64, NaN where a head counted no row."""
    return np.where(reading.value("rows") > 0, reading.value(vital).astype(np.float64), np.nan)


class Steps:
    """Collects readings; a step is whole when the next begins, or when the run pauses."""

    def __init__(self) -> None:
        self._open: dict[Phase, WholeStep] = {}
        self._step: int | None = None

    def add(self, reading: Reading) -> list[WholeStep]:
        """The steps that this reading shows to be whole."""
        whole = self.rest() if reading.step != self._step else []
        self._step = reading.step
        self._open.setdefault(reading.phase, WholeStep(reading.step, reading.phase)).add(reading)
        return whole

    def rest(self) -> list[WholeStep]:
        whole, self._open = list(self._open.values()), {}
        return whole
