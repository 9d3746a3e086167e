"""A sparkline: a head's number over the steps of the run."""

import math
from collections.abc import Sequence

import numpy as np
from rich.text import Text

from scaledot.watch.top import health

BARS = "▁▂▃▄▅▆▇█"


def draw(steps: Sequence[int], numbers: Sequence[float], vital: str, width: int) -> Text:
    """One column for an equal share of the steps, the last reading of each; red: outside."""
    columns = _columns(np.asarray(steps), np.asarray(numbers, np.float64), width)
    low, high = _range(columns[np.isfinite(columns)])
    flags = health.outside(columns, vital)
    line = Text()
    for number, flag in zip(columns, flags, strict=True):
        line.append(_bar(number, low, high), "red" if flag else "cyan")
    return line


def _range(finite: np.ndarray) -> tuple[float, float]:
    """From the lowest bar to the highest; a tenth of the number at least, so that noise is flat."""
    if not finite.size:
        return 0.0, 0.0
    low, high = float(finite.min()), float(finite.max())
    missing = max(0.0, max(abs(low), abs(high)) / 10 - (high - low))
    return low - missing / 2, high + missing / 2


def _columns(steps: np.ndarray, numbers: np.ndarray, width: int) -> np.ndarray:
    first, last = steps[0], steps[-1]
    width = min(width, len(steps))
    places = ((steps - first) * width // (last - first + 1)).astype(int)
    columns = np.full(width, np.nan)
    columns[places] = numbers  # of equal places the last one stays
    for place in range(1, width):  # no reading fell into it: it stayed as it was, so far as known
        if math.isnan(columns[place]) and place not in places:
            columns[place] = columns[place - 1]
    return columns


def _bar(number: float, low: float, high: float) -> str:
    if math.isnan(number):
        return " "
    if high <= low or not math.isfinite(number):
        return BARS[3] if math.isfinite(number) else BARS[-1] if number > 0 else BARS[0]
    return BARS[min(int((number - low) / (high - low) * len(BARS)), len(BARS) - 1)]
