"""Single heads: when one left its healthy band for good, how fast it grew, which are the worst."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from scaledot.fields import BANDS
from scaledot.watch.alarms.alarm import GRADES, Alarm
from scaledot.watch.report.history import VITALS, History, Layer
from scaledot.watch.store import Series

WORST = 5
POINTS = 120  # of a head's curve
FOR_GOOD = 3  # readings outside, up to the last, before it counts as left
SINK = "sink"  # the kind of alarm that is a label and no complaint


@dataclass(frozen=True)
class Curve:
    steps: list[int]
    numbers: list[float]  # NaN: not measured


@dataclass(frozen=True)
class Head:
    """One head over the run."""

    layer: str
    head: int
    first: float  # largest logit at its first reading
    peak: float  # of the largest logit
    peak_step: int
    last: dict[str, float]  # each vital at its last reading
    last_step: int
    left: int | None  # step since which it is outside a band (logits or softmax); None: it is not
    left_by: str | None  # the vital that left first
    doubling: float | None  # steps in which its largest logit doubled on the way out; None: no way
    curves: dict[str, Curve]

    @property
    def sink(self) -> bool:
        """Most of the weight on the first key: a low entropy that is no illness."""
        return self.last["sink"] > 0.5


def head_of(layer: Layer, head: int) -> Head:
    logits = layer.series["max_logit"]
    numbers = logits.values[:, head].astype(np.float64)
    known = np.flatnonzero(~np.isnan(numbers))
    peak = known[np.argmax(numbers[known])] if known.size else 0
    left = {vital: left_at(layer.series[vital], head, vital) for vital in ("max_logit", "passes")}
    gone = {vital: step for vital, step in left.items() if step is not None}
    left_by = min(gone, key=lambda vital: gone[vital]) if gone else None
    return Head(
        layer=layer.name,
        head=head,
        first=float(numbers[known[0]]) if known.size else math.nan,
        peak=float(numbers[peak]),
        peak_step=int(logits.steps[peak]),
        last={vital: float(series.values[-1, head]) for vital, series in layer.series.items()},
        last_step=int(logits.steps[-1]),
        left=None if left_by is None else gone[left_by],
        left_by=left_by,
        doubling=_doubling(logits.steps, numbers, left["max_logit"]),
        curves={vital: _curve(layer.series[vital], head) for vital in VITALS},
    )


def left_at(series: Series, head: int, vital: str) -> int | None:
    """The step at which it left its band and did not come back; None: it is inside."""
    found = _left(series.values[:, head : head + 1], vital)[0]
    return None if found < 0 else int(series.steps[found])


def first_to_leave(history: History, alarms: Iterable[Alarm]) -> Head | None:
    """Of the heads that these alarms are about, the one that left its bands first."""
    layers = {layer.name: layer for layer in history.layers}
    places = dict.fromkeys(place for alarm in alarms for place in places_of(alarm))
    heads = [
        head_of(layers[name], head)
        for name, head in places
        if name in layers and head < layers[name].heads
    ]
    gone = [head for head in heads if head.left is not None]
    return min(gone, key=lambda head: (head.left, -head.peak), default=None)


def places_of(alarm: Alarm) -> list[tuple[str, int]]:
    """Layer and number of every head that an alarm is about."""
    heads = alarm.heads or (() if alarm.head is None else (alarm.head,))
    return [(alarm.layer, head) for head in heads]


def worst_heads(history: History, alarms: Iterable[Alarm], number: int = WORST) -> list[Head]:
    """Broken heads first, then those that an alarm names, then by the largest logit now."""
    grades: dict[tuple[str, int], int] = {}
    for alarm in alarms:
        if alarm.kind == SINK:
            continue
        for place in places_of(alarm):
            grades[place] = max(grades.get(place, 0), GRADES.index(alarm.grade) + 1)
    logits = np.nan_to_num(history.last("max_logit"), nan=-math.inf)
    broken = history.last("nonfinite") > 0
    places = history.heads_in_order()
    order = sorted(
        range(len(places)),
        key=lambda at: (not broken[at], -grades.get(places[at], 0), -logits[at]),
    )
    layers = {layer.name: layer for layer in history.layers}
    return [head_of(layers[places[at][0]], places[at][1]) for at in order[:number]]


def outside(numbers: np.ndarray, vital: str) -> np.ndarray:
    """On the side of the band on which attention closes."""
    band = BANDS[vital]
    if vital == "max_logit":
        assert band.high is not None
        return numbers > band.high
    assert band.low is not None
    return numbers < band.low


def _left(values: np.ndarray, vital: str) -> np.ndarray:
    """[heads]: the place of the first reading of the stretch outside that lasts to the end, or -1.

    A head without a row in its last reading has not left.
    """
    flags = outside(values, vital)
    number = len(flags)
    if not number:
        return np.full(values.shape[1], -1)
    back = np.argmax(~flags[::-1], axis=0)  # how many at the end are outside
    stretch = np.where(flags.all(axis=0), number, back)
    enough = stretch >= min(FOR_GOOD, number)
    return np.where((stretch > 0) & enough, number - stretch, -1)


def _doubling(steps: np.ndarray, numbers: np.ndarray, left: int | None) -> float | None:
    """From the last reading at a quarter of the band's edge, two doublings before it."""
    edge = BANDS["max_logit"].high
    if left is None or edge is None:
        return None
    at = int(np.searchsorted(steps, left))
    low = np.flatnonzero(numbers[:at] <= edge / 4)
    if not low.size or numbers[low[-1]] <= 0:
        return None
    before = low[-1]
    return float(steps[at] - steps[before]) / math.log2(numbers[at] / numbers[before])


def _curve(series: Series, head: int) -> Curve:
    thinned = Series(series.segments, series.steps, series.values[:, head]).thinned(POINTS)
    return Curve(thinned.steps.tolist(), thinned.values.astype(np.float64).tolist())
