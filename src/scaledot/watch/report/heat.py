"""Heat maps: every head over time, and layers x heads at some moments."""

from collections.abc import Sequence

import numpy as np

from scaledot.watch.report import scales
from scaledot.watch.report.figure import Axis, figure, step_labels
from scaledot.watch.report.history import LARGER_IS_WORSE, History, Layer, at_step
from scaledot.watch.report.markup import Markup, element
from scaledot.watch.report.scales import SCALES
from scaledot.watch.report.words import number
from scaledot.watch.top.words import short_layers

MOST_ROWS = 96  # heads that have a row each; of more, each layer has one: its worst head
MOMENTS = 6
LABELS = 8


def over_time(history: History, vital: str) -> Markup:
    """Rows are heads, or layers where there are many heads; columns are steps."""
    columns = history.columns
    values = history.spread(vital)
    broken = _broken(history, columns)
    by_layer = history.heads > MOST_ROWS
    if by_layer:
        values = _worst_of_layers(history, vital, values)
        broken = np.concatenate(
            [part.any(axis=1, keepdims=True) for part in _parts(history, broken)], axis=1
        )
    cells = scales.cells_of(_carried(values).T, SCALES[vital], broken.T)
    rows = len(cells)
    what = "the worst head of each layer" if by_layer else "every head"
    steps = Axis(float(columns[0]), max(float(columns[-1]), float(columns[0]) + 1))
    worst = np.nanmax(values) if LARGER_IS_WORSE[vital] else np.nanmin(values)
    words = (
        f"{SCALES[vital].title}, {what} over the steps {columns[0]:,} to {columns[-1]:,}; "
        f"the worst is {number(float(worst))}"
    )
    tall = max(7.0, min(22.0, rows * (0.55 if by_layer else 0.42)))
    picture = _picture(cells, words, f"height:{tall:.1f}rem")
    down = _layer_labels(history, by_layer)
    return figure(f"Over time, {what}", picture, down, step_labels(steps), kind="heat")


def moments(history: History, vital: str, steps: Sequence[int] | None = None) -> Markup:
    """Layers x heads at some steps from the first to the last."""
    steps = moments_of(history) if steps is None else steps
    maps = []
    widest = max(layer.heads for layer in history.layers)
    for step in steps:
        values = np.full((len(history.layers), widest), np.nan)
        broken = np.zeros(values.shape, bool)
        for row, ill, layer in zip(values, broken, history.layers, strict=True):
            row[: layer.heads] = at_step(layer, vital, step)
            ill[: layer.heads] = at_step(layer, "nonfinite", step) > 0
        cells = scales.cells_of(values, SCALES[vital], broken)
        words = f"{SCALES[vital].title} of {len(cells)} layers x {widest} heads at step {step:,}"
        shape = f"aspect-ratio:{max(widest / len(cells), 0.5):.3f}"
        maps.append(
            element(
                "figure",
                _picture(cells, words, shape),
                element("figcaption", f"step {step:,}"),
            )
        )
    return element(
        "div",
        element("p", element("strong", "Layers down, heads across, "), "at some steps"),
        element("div", maps, class_="moments"),
    )


def moments_of(history: History) -> list[int]:
    steps = history.steps
    places = np.linspace(0, len(steps) - 1, min(MOMENTS, len(steps))).round().astype(np.int64)
    return [int(step) for step in steps[np.unique(places)]]


def legend(vital: str) -> Markup:
    scale = SCALES[vital]
    ticks = [
        element("span", number(tick), style=f"left:{scale.place(tick):.1%}") for tick in scale.ticks
    ]
    return element(
        "div",
        element("img", src=scales.legend(), alt="", class_="ramp"),
        element("div", ticks, class_="across ends"),
        class_="legend",
    )


def _picture(cells: np.ndarray, words: str, style: str) -> Markup:
    rows, columns = cells.shape
    image = element(
        "image",
        href=scales.picture(cells),
        width=columns,
        height=rows,
        preserveAspectRatio="none",
    )
    return element(
        "svg",
        image,
        class_="cells",
        viewBox=f"0 0 {columns} {rows}",
        preserveAspectRatio="none",
        role="img",
        aria_label=words,
        style=style,
    )


def _broken(history: History, columns: np.ndarray) -> np.ndarray:
    """[columns, heads]: rows that held NaN or infinity between a column's step and the next."""
    found = np.zeros((len(columns), history.heads), bool)
    for layer, part in zip(history.layers, _parts(history, found), strict=True):
        series = layer.series["nonfinite"]
        place = np.searchsorted(columns, series.steps, side="right") - 1
        ill, heads = np.nonzero(series.values > 0)
        part[place[ill], heads] = True
    return found


def _parts(history: History, values: np.ndarray) -> list[np.ndarray]:
    """The columns of each layer, as views."""
    ends = np.cumsum([layer.heads for layer in history.layers])
    return np.split(values, ends[:-1], axis=1)


def _worst_of_layers(history: History, vital: str, values: np.ndarray) -> np.ndarray:
    worst = np.fmax if LARGER_IS_WORSE[vital] else np.fmin
    parts = _parts(history, values)
    return np.stack([worst.reduce(part, axis=1) for part in parts], axis=1)


def _carried(values: np.ndarray) -> np.ndarray:
    """A column without a reading shows the one before: [columns, rows]."""
    places = np.where(np.isnan(values), 0, np.arange(len(values))[:, None])
    np.maximum.accumulate(places, axis=0, out=places)
    return np.take_along_axis(values, places, axis=0)


def _layer_labels(history: History, by_layer: bool) -> list[tuple[float, str]]:
    names = layer_names(history.layers)
    heights = [1 if by_layer else layer.heads for layer in history.layers]
    total, top = sum(heights), 0
    labels = []
    for name, height in zip(names, heights, strict=True):
        labels.append(((top + height / 2) / total, name))
        top += height
    return labels[:: -(-len(labels) // LABELS)]


def layer_names(layers: Sequence[Layer]) -> list[str]:
    """As short as they are still told apart."""
    return short_layers([layer.name or "model" for layer in layers])[1]
