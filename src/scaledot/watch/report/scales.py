"""The colours of a heat map. They mean the same in every picture, so that runs can be compared.

Each scale is logarithmic and has the edge of the healthy band in its middle: pale is healthy, the
middle is the edge, dark is ill.
"""

from dataclasses import dataclass

import numpy as np

from scaledot.watch.report import png

NOTHING, BROKEN, FIRST = 0, 1, 2  # places in the palette: no number; not finite; then the shades
SHADES = 254
# Pale to dark, after ColorBrewer's OrRd with a dark end; growing darkness for eyes that see no hue.
STOPS = np.array(
    [[247, 246, 240], [253, 220, 170], [250, 160, 95], [222, 75, 70], [140, 10, 80], [40, 0, 55]]
)
NOT_FINITE = (0, 110, 210)


@dataclass(frozen=True)
class Scale:
    title: str
    low: float  # pale
    high: float  # dark
    ticks: tuple[float, ...]
    words: str

    def shade(self, values: np.ndarray) -> np.ndarray:
        """0 to 1, NaN stays NaN."""
        ends = self.low, self.high
        with np.errstate(divide="ignore", invalid="ignore"):
            found = np.log(np.clip(values, min(ends), max(ends)) / self.low)
        return found / np.log(self.high / self.low)

    def place(self, value: float) -> float:
        return float(self.shade(np.array([value]))[0])


SCALES = {
    "max_logit": Scale(
        "Largest logit (max_logit)", 1, 10_000, (1, 10, 100, 1000, 10_000), "grows without bound"
    ),
    "passes": Scale(
        "How much the softmax lets through (passes)",
        1,
        0.01,
        (1, 0.3, 0.1, 0.03, 0.01),
        "1 - Σp²: falls to 0 as the softmax closes",
    ),
    "entropy_ratio": Scale(
        "Entropy as a share of the greatest possible (entropy_ratio)",
        1,
        0.01,
        (1, 0.3, 0.1, 0.03, 0.01),
        "0: each row looks at one key",
    ),
}


def palette() -> np.ndarray:
    """uint8 [256, 3]."""
    places = np.linspace(0, 1, len(STOPS))
    at = np.linspace(0, 1, SHADES)
    shades = np.stack([np.interp(at, places, channel) for channel in STOPS.T], axis=1)
    return np.concatenate([[(128, 128, 128)], [NOT_FINITE], shades.round()]).astype(np.uint8)


def cells_of(values: np.ndarray, scale: Scale, broken: np.ndarray | None = None) -> np.ndarray:
    """uint8, places in the palette. broken: where rows held NaN or infinity."""
    shade = np.nan_to_num(scale.shade(values), nan=0.0)
    cells = (FIRST + np.round(shade * (SHADES - 1))).astype(np.uint8)
    cells[np.isnan(values)] = NOTHING
    if broken is not None:
        cells[broken] = BROKEN
    return cells


def picture(cells: np.ndarray) -> str:
    """The address of a PNG, [rows, columns]."""
    return png.address(png.encode(cells, palette(), NOTHING))


def legend() -> str:
    """All shades from left to right."""
    return picture(np.arange(FIRST, FIRST + SHADES, dtype=np.uint8)[None, :])
