"""Figures of the page: the picture is SVG that stretches, its labels are text that does not.

A heat map's cells are one small PNG inside the SVG. So letters keep their size on a telephone, and
a thousand heads weigh no more than their numbers.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from scaledot.watch.report.markup import Markup, element, joined
from scaledot.watch.report.words import number

WIDTH, HEIGHT = 600, 160  # of a chart's own coordinates; the page stretches them
MOST_LABELS = 6
LARGEST, SMALLEST = 1e100, 1e-100  # that an axis holds: beyond, its own numbers overflow
POINTS = 400  # of a line


@dataclass(frozen=True)
class Line:
    name: str
    steps: Sequence[int] | np.ndarray
    numbers: Sequence[float] | np.ndarray
    kind: str = "a"  # of the style sheet: a, b


@dataclass(frozen=True)
class Mark:
    """A vertical line at a step."""

    step: int
    words: str
    kind: str  # act, warn, note, crash


@dataclass(frozen=True)
class Axis:
    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high end; NaN where it cannot be drawn."""
        if not math.isfinite(value) or (self.log and value <= 0):
            return math.nan
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return min(1.0, max(0.0, (value - low) / (high - low)))


def chart(
    title: str,
    lines: Sequence[Line],
    steps: Axis,
    *,
    log: bool = False,
    marks: Iterable[Mark] = (),
    edge: float | None = None,
    note: str = "",
) -> Markup | None:
    """A figure of one or two lines over the steps; None where there is nothing to draw.

    edge: of the healthy band, drawn as a dashed line.
    """
    numbers = np.concatenate([np.asarray(line.numbers, np.float64) for line in lines] or [[]])
    axis = axis_of(numbers, log, edge)
    if axis is None:
        return None
    shapes = [shape(line, steps, axis) for line in lines]
    edges = [] if edge is None else [_edge(axis.place(edge))]
    words = "; ".join(filter(None, [_in_words(title, line) for line in lines]))
    picture = element(
        "svg",
        edges,
        [_mark(mark, steps) for mark in marks],
        shapes,
        class_="chart",
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=words,
    )
    ticks = ticks_of(axis)
    labels = [(1 - axis.place(tick), number(tick)) for tick in ticks]
    return figure(title, picture, labels, step_labels(steps), note=note, names=lines)


def figure(
    title: str,
    picture: Markup,
    down: Sequence[tuple[float, str]],
    across: Sequence[tuple[float, str]],
    *,
    note: str = "",
    names: Sequence[Line] = (),
    kind: str = "",
) -> Markup:
    """down and across: labels and their places, 0 to 1, from the top and from the left."""
    key = [
        element("span", element("span", class_=f"swatch {line.kind}"), line.name, class_="key")
        for line in (names if len(names) > 1 else ())
    ]
    return element(
        "figure",
        element(
            "figcaption",
            element("strong", title),
            element("span", " ", note, class_="quiet") if note else None,
            key,
        ),
        element(
            "div",
            element(
                "div",
                [element("span", text, style=f"top:{place:.2%}") for place, text in down],
                class_="down",
                aria_hidden="true",
            ),
            picture,
            element(
                "div",
                [
                    element("span", text, style=f"left:{place:.2%}", class_=_side(place))
                    for place, text in across
                ],
                class_="across",
                aria_hidden="true",
            ),
            class_="frame",
        ),
        class_=kind or None,
    )


def axis_of(numbers: np.ndarray, log: bool, edge: float | None = None) -> Axis | None:
    drawable = np.abs(numbers) < LARGEST  # and no NaN
    known = numbers[drawable & ((numbers > SMALLEST) | (not log))]
    if not known.size:
        return None
    low, high = float(known.min()), float(known.max())
    if edge is not None:
        low, high = min(low, edge), max(high, edge)
    if log:
        return Axis(low / 1.25, high * 1.25, True)
    room = 0.06 * (high - low) or abs(high) * 0.1
    room = room if room > SMALLEST else 1.0
    bottom = low - room
    return Axis(max(0.0, bottom) if low >= 0 else bottom, high + room)


def steps_axis(*runs: tuple[int | None, int | None]) -> Axis:
    firsts = [first for first, _ in runs if first is not None]
    lasts = [last for _, last in runs if last is not None]
    low, high = min(firsts, default=0), max(lasts, default=1)
    return Axis(low, max(high, low + 1))


def ticks_of(axis: Axis, most: int = 4) -> list[float]:
    """Round numbers inside the axis."""
    if axis.log:
        return _log_ticks(axis, most)
    size = (axis.high - axis.low) / most
    power = 10.0 ** math.floor(math.log10(size))
    step = next(power * unit for unit in (1, 2, 2.5, 5, 10) if power * unit >= size)
    first = math.ceil(axis.low / step - 1e-9)
    last = math.floor(axis.high / step + 1e-9)
    return [place * step for place in range(first, last + 1)]


def step_labels(steps: Axis, most: int = 5) -> list[tuple[float, str]]:
    ticks = [tick for tick in ticks_of(steps, most) if tick == round(tick)]
    return [(steps.place(tick), f"{tick:,.0f}") for tick in ticks]


def _log_ticks(axis: Axis, most: int) -> list[float]:
    powers = range(math.floor(math.log10(axis.low)), math.ceil(math.log10(axis.high)) + 1)
    for units in ((1, 2, 5), (1, 3), (1,)):
        found = [unit * 10.0**power for power in powers for unit in units]
        inside = [tick for tick in found if axis.low <= tick <= axis.high]
        if len(inside) <= most + 1:
            return inside or [axis.low, axis.high]
    return inside[:: math.ceil(len(inside) / most)]


def shape(line: Line, steps: Axis, axis: Axis) -> list[Markup]:
    """Pieces: where a number is missing the line is interrupted."""
    found = thinned(np.asarray(line.steps), np.asarray(line.numbers, np.float64), POINTS)
    pieces: list[list[str]] = [[]]
    for step, value in zip(*found, strict=True):
        place = axis.place(float(value))
        if math.isnan(place):
            pieces.append([])
            continue
        x, y = steps.place(float(step)) * WIDTH, (1 - place) * HEIGHT
        pieces[-1].append(f"{x:.1f},{y:.1f}")
    drawn = []
    for piece in filter(None, pieces):
        if len(piece) == 1:  # a line of one point would not be seen
            piece.append(piece[0])
        drawn.append(element("polyline", points=" ".join(piece), class_=f"line {line.kind}"))
    return drawn


def thinned(steps: np.ndarray, numbers: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """The lowest and the highest of each stretch, in their order: peaks stay."""
    if len(steps) <= most:
        return steps, numbers
    bounds = np.linspace(0, len(steps), most // 2 + 1).astype(np.int64)
    kept = []
    for begin, end in pairwise(bounds.tolist()):
        part = numbers[begin:end]
        if np.isfinite(part).any():
            kept += sorted({begin + int(np.nanargmin(part)), begin + int(np.nanargmax(part))})
        else:
            kept.append(int(begin))
    places = np.array(kept)
    return steps[places], numbers[places]


def _mark(mark: Mark, steps: Axis) -> Markup:
    x = f"{steps.place(mark.step) * WIDTH:.1f}"
    return joined(
        Markup(f'<g class="mark {mark.kind}">'),
        element("title", mark.words),
        element("line", x1=x, x2=x, y1=0, y2=HEIGHT),
        Markup("</g>"),
    )


def _edge(place: float) -> Markup:
    y = f"{(1 - place) * HEIGHT:.1f}"
    return element("line", x1=0, x2=WIDTH, y1=y, y2=y, class_="edge")


def _in_words(title: str, line: Line) -> str:
    values = np.asarray(line.numbers, np.float64)
    known = np.flatnonzero(np.isfinite(values))
    if not known.size:
        return ""
    who = title if line.name == title else f"{title}, {line.name}"
    first, last = values[known[0]], values[known[-1]]
    return (
        f"{who}: from {number(first)} to {number(last)}, between {number(values[known].min())} "
        f"and {number(values[known].max())}"
    )


def _side(place: float) -> str | None:
    """Labels at the ends lean inwards."""
    if place > 0.94:
        return "end"
    return "begin" if place < 0.06 else None
