"""A picture of a step: one row a layer, one column a head, bright where a head is ill.

The colours mean the same in every picture, so that pictures of different steps and runs can be
compared: shares run from 0 to 1, what has no bound runs over decades.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from scaledot.watch.sinks.whole import WholeStep, counted

# From dark to bright, after matplotlib's colour map inferno (CC0).
COLOURS = np.array([[0, 0, 4], [87, 16, 110], [188, 55, 84], [249, 142, 9], [252, 255, 164]])
NO_HEAD = (64, 64, 64)  # the layer has fewer heads, or the head counted no row
NOT_FINITE = (0, 255, 255)
PICTURE, SMALLEST, LARGEST = 384, 4, 24  # pixels: of the longer side about, of a cell at least


class Shade(NamedTuple):
    """How ill a value is, 0 to 1, and what to tell the reader."""

    of: Callable[[np.ndarray], np.ndarray]
    words: str


def _share(words: str) -> Shade:
    return Shade(lambda values: values, f"dark 0, bright 1: {words}")


def _lack(words: str, whole: float = 1.0) -> Shade:
    return Shade(lambda values: 1 - values / whole, f"dark {whole:g}, bright 0: {words}")


def _decades(number: int, words: str) -> Shade:
    return Shade(
        lambda values: np.log10(1 + np.abs(values)) / number,
        f"dark 0, bright {10**number:g} and above, by decades: {words}",
    )


SHADES: dict[str, Shade] = {
    "max_logit": _decades(4, "the largest logit"),
    "logit_mean": _decades(4, "size of the mean logit"),
    "logit_std": _decades(2, "spread of the logits"),
    "row_std": _decades(2, "spread of the logits within a row"),
    "entropy": _lack("entropy in nats", 10.0),
    "entropy_ratio": _lack("entropy as a share of the greatest possible"),
    "sum_p2": _share("mean of the sum of squared weights"),
    "passes": _lack("how much gradient the softmax lets through"),
    "top_p": _share("mean largest weight of a row"),
    "saturated": _share("share of saturated rows"),
    "sink": _share("weight on the first key"),
    "off": _share("weight on the learned sink"),
    "q_rms": _decades(2, "size of the queries"),
    "k_rms": _decades(2, "size of the keys"),
    "nonfinite": _decades(4, "rows that hold NaN or infinity"),
}


def check_vitals(vitals: Sequence[str]) -> tuple[str, ...]:
    unknown = [name for name in vitals if name not in SHADES]
    if unknown or isinstance(vitals, str):
        raise ValueError(f"vitals={vitals!r}: give a tuple of names out of {', '.join(SHADES)}")
    return tuple(vitals)


def heat_map(step: WholeStep, vital: str) -> np.ndarray:
    """[layers * cell, most heads * cell, 3] uint8."""
    heads = max((reading.heads for reading in step.layers.values()), default=1)
    cells = np.full((len(step.layers), heads, 3), NO_HEAD, dtype=np.uint8)
    for row, reading in zip(cells, step.layers.values(), strict=True):
        row[: reading.heads] = colours_of(counted(reading, vital), vital)
        if vital != "nonfinite":
            broken = reading.value("nonfinite") > 0
            row[: reading.heads][broken] = NOT_FINITE
    cell = int(np.clip(PICTURE // max(cells.shape[:2]), SMALLEST, LARGEST))
    return cells.repeat(cell, axis=0).repeat(cell, axis=1)


def colours_of(values: np.ndarray, vital: str) -> np.ndarray:
    """[n, 3] uint8; NaN stands for a head without rows."""
    with np.errstate(invalid="ignore"):
        shade = np.clip(SHADES[vital].of(values), 0, 1)
    places = np.linspace(0, 1, len(COLOURS))
    mixed = np.stack([np.interp(shade, places, channel) for channel in COLOURS.T], axis=-1)
    return np.where(np.isnan(values)[:, None], NO_HEAD, np.round(mixed)).astype(np.uint8)


def caption(step: WholeStep, vital: str) -> str:
    layers = list(step.layers)
    ends = layers[0] if len(layers) == 1 else f"{layers[0]} (top) to {layers[-1]}"
    return f"{vital}, a row a layer, a column a head; {SHADES[vital].words}; {ends}"


def legend(step: WholeStep, vitals: Sequence[str]) -> str:
    """Markdown: which row is which layer, what the colours mean."""
    lines = ["Rows are layers, columns are heads.", ""]
    lines += [f"- **{vital}**: {SHADES[vital].words}" for vital in vitals]
    lines += ["- grey: no such head, or it counted no row; cyan: rows hold NaN or infinity"]
    lines += ["", "| row | layer | heads |", "|---|---|---|"]
    rows = enumerate(step.layers.items())
    lines += [
        f"| {row} | `{layer or 'model'}` | {reading.heads} |" for row, (layer, reading) in rows
    ]
    return "\n".join(lines)
