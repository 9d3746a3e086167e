"""What is known of every head of the run: its last numbers, its trend, and what has lasted.

All heads of all layers lie side by side in a few arrays, a layer's heads together. A step costs
some dozens of operations on those arrays, whatever the number of layers.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from scaledot.fields import COUNT_FIELDS, FLOAT_FIELDS
from scaledot.watch.alarms.stretch import Stretch
from scaledot.watch.alarms.trend import Trend
from scaledot.watch.reading import Reading

SCORE, ENTROPY, SUM_P2, SINK, OFF = map(
    FLOAT_FIELDS.index, ("max_logit", "entropy_ratio", "sum_p2", "sink", "off")
)
OPENING = ("logit_std", "row_std", "q_rms", "k_rms")  # kept of the first step alone
OPENING_FIELDS = [FLOAT_FIELDS.index(name) for name in OPENING]
ROWS, NONFINITE = map(COUNT_FIELDS.index, ("rows", "nonfinite"))
# How exactly a size shows what was done on purpose: ln of a ratio, and a share.
NEAR, NORMED = 0.1, 0.002
FEWEST_TO_DIVIDE = 9  # d_k below which sqrt(d_k) is no more than chance makes
# Random depth and routing run other layers in every step: so many sets are remembered.
MOST_SETS = 16
NUMBERS = ("score", "passes", "sink", "nonfinite", "first", "last")


class Scale(NamedTuple):
    """What a layer's calls multiply their scores by."""

    scale: float
    d_k: int

    @property
    def unit(self) -> float:
        """1 where it is 1/sqrt(d_k)."""
        return self.scale * math.sqrt(self.d_k)

    def twice(self, ratio: float) -> bool:
        """Whether q or k is smaller by sqrt(d_k) already, where the scale divides by it again.

        ratio: of q_rms to k_rms.
        """
        size = math.log(max(ratio, 1 / ratio))
        right = abs(math.log(self.unit)) < NEAR
        return right and self.d_k >= FEWEST_TO_DIVIDE and abs(size - math.log(self.d_k) / 2) < NEAR

    def normalised(self, q_rms: np.ndarray, k_rms: np.ndarray) -> bool:
        """Whether the vectors of q or of k have the length 1 or sqrt(d_k) in every head."""
        units = (1.0, 1 / math.sqrt(self.d_k))
        return any(
            bool((np.abs(rms / unit - 1) < NORMED).all())
            for rms in (q_rms, k_rms)
            for unit in units
        )


class InLayer(NamedTuple):
    """The heads of a layer of which something holds."""

    layer: str
    columns: slice
    heads: np.ndarray  # within the layer
    share: float  # of those that were counted


class Heads:
    def __init__(self, thresholds: Mapping[str, float]) -> None:
        self._limit = thresholds
        self._places: dict[str, slice] = {}
        self._made: dict[tuple[str, int], slice] = {}  # by layer and number of heads
        self._known: dict[tuple, np.ndarray | slice] = {}  # columns of the last sets
        self.score, self.passes, self.sink, self.nonfinite = (np.zeros(0) for _ in range(4))
        self.first, self.last = (np.zeros(0, np.int64) for _ in range(2))  # steps
        self.opened: int | None = None  # the first step that was read
        self.opening = np.zeros((len(OPENING), 0))  # [OPENING, heads]; 0: not read in that step
        self.scales: dict[str, Scale] = {}  # of each layer's calls, where it is known
        self.trend = Trend()
        self.away, self.growing, self.shut, self.flat, self.sunk, self.broken = self._stretches = (
            *(Stretch() for _ in range(6)),
        )

    def add(self, readings: Sequence[Reading]) -> None:
        """Layers of one step."""
        step = readings[0].step
        at = self._columns_of(readings, step)
        floats = np.concatenate([one.floats for one in readings], 1).astype(np.float64)
        counts = np.concatenate([one.counts for one in readings], 1)
        counted = counts[ROWS] > 0
        self.nonfinite[at] = counts[NONFINITE]
        self.broken.add(at, counts[NONFINITE] > self._limit["broken"], step)
        if not counted.all():  # a head without a row was not measured
            at, floats = np.arange(len(self.score))[at][counted], floats[:, counted]
        self.score[at], self.passes[at] = floats[SCORE], 1 - floats[SUM_P2]
        self.sink[at] = np.maximum(floats[SINK], floats[OFF])
        self.opened = step if self.opened is None else self.opened
        if step == self.opened:
            self.opening[:, at] = floats[OPENING_FIELDS]
        self.trend.add(at, step - self.last[at], floats[SCORE])
        self.last[at] = step
        self._look(at, floats[ENTROPY], step)

    def _look(self, at: np.ndarray | slice, entropy_ratio: np.ndarray, step: int) -> None:
        """Which conditions hold now."""
        limit, trend = self._limit, self.trend
        level, passes = trend.level[at], self.passes[at]
        power, known = self.power[at], trend.known[at]
        away = known & (level > limit["collapse.score"]) & (passes < limit["collapse.passes"])
        if np.count_nonzero(away):
            projected = level * np.exp2(np.clip(power, 0, 64))  # when the run is twice as old
            away &= projected > limit["collapse.projected"]
        self.away.add(at, away, step)
        growing = (level > limit["growth"]) & (power > limit["growth.rate"])
        self.growing.add(at, known & growing, step)
        self.shut.add(at, passes < limit["saturation.passes"], step)
        self.flat.add(at, entropy_ratio > limit["fading.entropy"], step)
        self.sunk.add(at, self.sink[at] > limit["sink"], step)

    @property
    def power(self) -> np.ndarray:
        """ln(score) grows by slope a step: at this age like step ** power; 1 is linear."""
        return self.trend.slope * (self.last - self.first)

    @property
    def counted(self) -> np.ndarray:
        """Sinks are sharp by right; they are neither sick nor healthy."""
        return ~self.sunk.lasts

    @property
    def units(self) -> np.ndarray:
        """Each head's scale x sqrt(d_k); 1 where the scale is not known."""
        found = np.ones(len(self.score))
        for layer, columns in self._places.items():
            if layer in self.scales:
                found[columns] = self.scales[layer].unit
        return found

    def age(self, step: int) -> np.ndarray:
        return step - self.first

    def columns(self, layer: str) -> slice:
        return self._places[layer]

    def layers(self) -> Iterator[tuple[str, slice]]:
        yield from self._places.items()

    def by_layer(self, holds: np.ndarray, counted: np.ndarray | None = None) -> Iterator[InLayer]:
        """The layers in which it holds of any head; counted: of how many the share is taken."""
        if not np.count_nonzero(holds):
            return
        for layer, columns in self._places.items():
            those = np.flatnonzero(holds[columns])
            if len(those):
                of = len(holds[columns]) if counted is None else int(counted[columns].sum())
                yield InLayer(layer, columns, those, len(those) / max(of, 1))

    def _columns_of(self, readings: Sequence[Reading], step: int) -> np.ndarray | slice:
        """A slice where they lie side by side, as all layers of a model do: nothing is copied."""
        make = tuple((one.layer, one.heads) for one in readings)
        if make not in self._known:
            for layer, heads in make:
                self._place(layer, heads, step)
            if len(self._known) >= MOST_SETS:
                del self._known[next(iter(self._known))]  # the oldest
            every = np.arange(len(self.score))
            columns = np.concatenate([every[self._places[layer]] for layer, _ in make])
            whole = slice(int(columns[0]), int(columns[0]) + len(columns))
            self._known[make] = whole if np.array_equal(columns, every[whole]) else columns
        return self._known[make]

    def _place(self, layer: str, heads: int, step: int) -> None:
        if (layer, heads) not in self._made:
            begin = len(self.score)
            self._made[layer, heads] = slice(begin, begin + heads)
            for name in NUMBERS:
                array = getattr(self, name)
                setattr(self, name, np.append(array, np.zeros(heads, array.dtype)))
            self.opening = np.pad(self.opening, ((0, 0), (0, heads)))
            self.first[begin:], self.last[begin:], self.passes[begin:] = step, step, 1.0
            for part in (self.trend, *self._stretches):
                part.grow(heads)
        self._places[layer] = self._made[layer, heads]
