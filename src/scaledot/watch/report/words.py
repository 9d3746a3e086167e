"""Numbers, times and names as a sentence needs them."""

import math
import time
from collections.abc import Sequence

from scaledot.watch.top.words import count

__all__ = [
    "count",
    "duration",
    "listed",
    "moment",
    "number",
    "sentence",
    "share",
    "signed",
    "where",
]


def number(value: float | None) -> str:
    """1,723; 23.4; 0.014; 2.1e-05: three digits, or all before the point."""
    if value is None or math.isnan(value):
        return "not known"
    if math.isinf(value):
        return "infinite" if value > 0 else "minus infinite"
    size = abs(value)
    if size >= 999.5:
        return f"{value:,.0f}" if size < 1e9 else f"{value:.3g}"
    if size >= 99.5:
        return f"{value:.0f}"
    return f"{value:.3g}"


def signed(value: float) -> str:
    return number(value) if value < 0 else f"+{number(value)}"


def share(value: float | None) -> str:
    """0.42 %: of a whole."""
    if value is None or not math.isfinite(value):
        return "not known"
    percent = 100 * value
    return f"{percent:.0f} %" if percent >= 9.95 or percent == 0 else f"{percent:.2g} %"


def sentence(text: str) -> str:
    """With a full stop, unless it ends by itself."""
    return text if text.endswith((".", "?", "!")) else f"{text}."


def where(layer: str, head: int | None) -> str:
    name = layer or "the model"
    return name if head is None else f"{name}, head {head}"


def moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    if minutes < 90:
        return f"{minutes:.0f} min"
    hours = minutes / 60
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} days"


def listed(names: Sequence[str], most: int = 4) -> str:
    more = len(names) - most
    if more > 0:
        return f"{', '.join(names[:most])} and {more} more"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1] if names else ""]))
