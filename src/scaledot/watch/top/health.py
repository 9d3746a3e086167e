"""What is healthy: a head's number held against the band of its vital."""

from collections.abc import Iterable, Mapping

import numpy as np

from scaledot.fields import BANDS, COUNT_FIELDS, FLOAT_FIELDS, Band
from scaledot.watch.reading import Reading

# In the order in which the keys go through them: what decides first.
VITALS = (
    "passes",
    "max_logit",
    "entropy_ratio",
    "row_std",
    "logit_std",
    "top_p",
    "saturated",
    "sink",
    "off",
    "q_rms",
    "k_rms",
    "entropy",
    "sum_p2",
    "logit_mean",
    "nonfinite",
)
# Said twice: sum_p2 is 1 - passes, and whoever counts ill heads by vital would count them twice.
COUNTED = tuple(name for name in VITALS if name != "sum_p2")


def values(reading: Reading, vital: str) -> np.ndarray:
    """One number a head, float64; NaN where a head had no row, so that nothing was measured."""
    return numbers(reading.floats, reading.counts, vital)


def numbers(floats: np.ndarray, counts: np.ndarray, vital: str) -> np.ndarray:
    """The same of one reading or of many: floats [F, ...] and counts [C, ...] as in `Reading`."""
    if vital in COUNT_FIELDS:
        return counts[COUNT_FIELDS.index(vital)].astype(np.float64)
    name = "sum_p2" if vital == "passes" else vital
    found = floats[FLOAT_FIELDS.index(name)].astype(np.float64)
    found = 1 - found if vital == "passes" else found
    return np.where(counts[COUNT_FIELDS.index("rows")] > 0, found, np.nan)


def ill(latest: Iterable[Reading]) -> tuple[dict[str, int], int]:
    """Count the heads outside the band of each vital, where there are any, and outside of any."""
    counts = dict.fromkeys(COUNTED, 0)
    heads = 0
    for one in latest:
        flags = {name: outside(values(one, name), name) != 0 for name in COUNTED}
        for name, flag in flags.items():
            counts[name] += int(flag.sum())
        heads += int(np.any(list(flags.values()), axis=0).sum())
    return {name: count for name, count in counts.items() if count}, heads


def listed(by_vital: Mapping[str, int]) -> str:
    """`logit_std 12, passes 3`: the most common first."""
    vitals = sorted(by_vital, key=lambda name: -by_vital[name])
    return ", ".join(f"{name} {by_vital[name]}" for name in vitals)


def outside(found: np.ndarray, vital: str) -> np.ndarray:
    """-1 below the band, 1 above it, 0 inside or not measured."""
    band = BANDS[vital]
    low = -np.inf if band.low is None else band.low
    high = np.inf if band.high is None else band.high
    return (found > high).astype(np.int8) - (found < low).astype(np.int8)


def badness(found: np.ndarray, vital: str) -> np.ndarray:
    """Larger is worse, 1 is the edge of the band; NaN where nothing was measured."""
    low, high, _ = BANDS[vital]
    if low is not None and high is not None:
        return np.abs(found - (low + high) / 2) / ((high - low) / 2)
    if high is not None:
        return found / high if high > 0 else np.where(found > 0, 1 + found, found)
    if low is not None:
        return (1 - found) / (1 - low)  # of numbers from 0 to 1
    return _spread(found, vital)


def has_band(vital: str) -> bool:
    band = BANDS[vital]
    return band.low is not None or band.high is not None


def band_words(band: Band) -> str:
    """`0.1 to 4`, `0.1 or more`, `up to 100`; empty where there is none."""
    if band.low is not None and band.high is not None:
        return f"{band.low:g} to {band.high:g}"
    if band.low is not None:
        return f"{band.low:g} or more"
    return "" if band.high is None else f"up to {band.high:g}"


def _spread(found: np.ndarray, vital: str) -> np.ndarray:
    """Without a band there is no edge: from 0 for the least remarkable head here to 1."""
    remarkable = -found if vital == "entropy" else np.abs(found)
    finite = remarkable[np.isfinite(remarkable)]
    if not finite.size or finite.max() == finite.min():
        return np.where(np.isnan(found), np.nan, 0.0)
    return (remarkable - finite.min()) / (finite.max() - finite.min())
