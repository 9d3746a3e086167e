"""A run's vitals as arrays, layer by layer, and pictures' columns on one axis of time."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from scaledot.watch.reading import PHASES, Phase
from scaledot.watch.store import RunReader, Series

# Growth of the logits, what it does to the softmax, what that does to the gradient.
VITALS = ("max_logit", "passes", "entropy_ratio")
OTHERS = ("passes", "entropy_ratio", "row_std", "logit_std", "sink", "off", "nonfinite")
LARGER_IS_WORSE = {"max_logit": True, "passes": False, "entropy_ratio": False}
# Numbers of one vital that are read; a longer run is read at evenly chosen steps. Peaks are sharp,
# so of the largest logit every reading counts, up to a size that is no run of today's.
MOST_PEAKS = 2**25
MOST_OTHERS = 2**18
BYTES_A_PEAK = 8  # of the file: a head's reading takes a hundred, packed well some twenty
FEWEST, LEAST = 64, 16  # readings, however many heads there are; of very many heads
MOST_OF_FEWEST = 2**19
COLUMNS = 240  # of a picture: more than a page shows apart


@dataclass(frozen=True, eq=False)
class Layer:
    """series[vital].values is [readings, heads]; NaN: the head counted no row."""

    name: str
    heads: int
    series: dict[str, Series]


@dataclass(frozen=True, eq=False)
class History:
    phase: Phase
    layers: list[Layer]  # in the order of the model
    readings: int  # steps that were read by the watch
    looked_at: int  # of these, for the vitals other than max_logit
    _spread: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def heads(self) -> int:
        return sum(layer.heads for layer in self.layers)

    @cached_property
    def steps(self) -> np.ndarray:
        """Every step of which any layer has a reading."""
        return _all_steps(layer.series["max_logit"] for layer in self.layers)

    @cached_property
    def columns(self) -> np.ndarray:
        """The first step of each column of a picture, when all steps are spread over COLUMNS."""
        steps = self.steps
        if len(steps) <= COLUMNS:
            return steps
        return steps[(np.arange(COLUMNS) * len(steps)) // COLUMNS]

    def spread(self, vital: str) -> np.ndarray:
        """[columns, heads of all layers]: the worst number of each column; NaN: no reading."""
        if vital not in self._spread:
            parts = [_worst(layer, vital, self.columns) for layer in self.layers]
            self._spread[vital] = np.concatenate(parts, axis=1)
        return self._spread[vital]

    @property
    def looked_at_steps(self) -> np.ndarray:
        """Every step at which any layer's vitals other than max_logit are known."""
        return _all_steps(layer.series["passes"] for layer in self.layers)

    def held(self, vital: str, steps: np.ndarray) -> np.ndarray:
        """[steps, heads of all layers]: the last reading at or before each; NaN before it."""
        parts = []
        for layer in self.layers:
            series = layer.series[vital]
            place = np.searchsorted(series.steps, steps, side="right") - 1
            values = series.values[np.maximum(place, 0)].astype(np.float64)
            parts.append(np.where((place >= 0)[:, None], values, np.nan))
        return np.concatenate(parts, axis=1)

    def last(self, vital: str) -> np.ndarray:
        """The last reading of every head, all layers side by side."""
        parts = [layer.series[vital].values[-1] for layer in self.layers]
        return np.concatenate([np.empty(0), *parts]).astype(np.float64)

    def heads_in_order(self) -> list[tuple[str, int]]:
        return [(layer.name, head) for layer in self.layers for head in range(layer.heads)]

    def layer(self, name: str) -> Layer | None:
        return next((layer for layer in self.layers if layer.name == name), None)


def read_history(
    reader: RunReader, most_peaks: int = MOST_PEAKS, most_others: int = MOST_OTHERS
) -> History:
    """Training, or evaluation where there is no training."""
    most_peaks = min(most_peaks, max(MOST_OTHERS, reader.path.stat().st_size // BYTES_A_PEAK))
    starts = reader.starts()
    for phase in PHASES:
        heads = sum(reader.layers(phase).values())
        if not heads:
            continue
        fewest = max(LEAST, min(FEWEST, MOST_OF_FEWEST // heads))
        peaks = reader.vital("max_logit", phase, most=max(fewest, most_peaks // heads))
        most = max(fewest, most_others // heads)
        others = {vital: reader.vital(vital, phase, most=most) for vital in ("rows", *OTHERS)}
        layers = [
            _layer(name, found, {v: one[name] for v, one in others.items() if name in one}, starts)
            for name, found in peaks.items()
        ]
        # A layer that the continuation does not have is of another model.
        layers = [layer for layer in layers if all(map(len, layer.series.values()))]
        if not layers:
            continue
        readings = len(_all_steps(layer.series["max_logit"] for layer in layers))
        looked_at = len(_all_steps(layer.series["passes"] for layer in layers))
        return History(phase, layers, readings, looked_at)
    return History("train", [], 0, 0)


def at_step(layer: Layer, vital: str, step: int) -> np.ndarray:
    """[heads]: the last reading at or before the step; NaN before the first."""
    series = layer.series[vital]
    place = int(np.searchsorted(series.steps, step, side="right")) - 1
    if place < 0:
        return np.full(layer.heads, np.nan)
    return series.values[place].astype(np.float64)


def _worst(layer: Layer, vital: str, columns: np.ndarray) -> np.ndarray:
    """[columns, heads]: the worst number between one column's step and the next."""
    found = np.full((len(columns), layer.heads), np.nan, np.float32)
    series = layer.series[vital]
    place = np.searchsorted(columns, series.steps, side="right") - 1
    starts = np.flatnonzero(np.diff(place, prepend=-1))
    worst = np.fmax if LARGER_IS_WORSE[vital] else np.fmin
    found[place[starts]] = worst.reduceat(series.values, starts, axis=0)
    return found


def _all_steps(series: Iterable[Series]) -> np.ndarray:
    # Layers that were read together share one array of steps.
    different = {id(one.steps): one.steps for one in series}
    return np.unique(np.concatenate([np.empty(0, np.int64), *different.values()]))


def _layer(name: str, peaks: Series, others: dict[str, Series], starts: Mapping[int, int]) -> Layer:
    # A head that counted no row has the maximum of nothing.
    values = peaks.values
    if len(values) and np.fmin.reduce(values, axis=None) == -np.inf:
        values = np.where(np.isneginf(values), np.float32(np.nan), values)
    found = {"max_logit": Series(peaks.segments, peaks.steps, values, peaks.times)}
    # Each vital was read at a moment of its own: the run may have grown in between.
    number = min(map(len, others.values()))
    counted = others["rows"].values[:number] > 0
    for vital in OTHERS:
        one = others[vital].at(np.arange(number))
        if vital != "nonfinite" and not counted.all():
            one = Series(one.segments, one.steps, np.where(counted, one.values, np.nan), one.times)
        found[vital] = one
    newest = {vital: series.newest(starts) for vital, series in found.items()}
    return Layer(name, newest["max_logit"].values.shape[1], newest)
