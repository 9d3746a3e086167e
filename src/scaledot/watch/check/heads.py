"""A head and what can be said of it: the bands it leaves, what it does, how strained it is."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from scaledot.fields import BANDS, Band
from scaledot.watch.check.offsets import Offset

POSITIONAL_ABOVE = 0.5  # more than half of the weight at one distance from the query
SINK_ABOVE = 0.3  # on the first token; the epsilon of Gu et al. 2024, arXiv 2410.10781
SHARES = ("entropy_ratio", "sum_p2", "top_p", "saturated", "sink", "off")  # end at 1


@dataclass(frozen=True)
class Head:
    layer: str
    head: int
    vitals: dict[str, float]  # BANDS' names, and rows and pairs
    d_k: int | None = None  # None: not known, or not the same in every call
    divisor: float | None = None
    offset: Offset | None = None  # where it looks most; None: not known

    @property
    def keys(self) -> float:
        """How many keys a row sees, on average."""
        return self.vitals["pairs"] / max(self.vitals["rows"], 1)

    @property
    def freezing(self) -> float:
        """sqrt(2 ln n): above it a softmax over n Gaussian scores picks a few and stays there."""
        return math.sqrt(2 * math.log(max(self.keys, 1.0)))

    @property
    def bands(self) -> dict[str, Band]:
        """measure.BANDS, with the limit of row_std for as many keys as there are."""
        words = f"below sqrt(2 ln n) = {self.freezing:.2f}"
        return {**BANDS, "row_std": BANDS["row_std"]._replace(high=self.freezing, words=words)}

    @property
    def outside(self) -> tuple[str, ...]:
        """The vitals that are not in their healthy band; NaN is in none."""
        bands = self.bands
        return tuple(name for name in bands if not _inside(self.vitals[name], bands[name]))

    @property
    def roles(self) -> tuple[str, ...]:
        found = {
            "broken": self.vitals["nonfinite"] > 0,
            "positional": self.offset is not None and self.offset.weight > POSITIONAL_ABOVE,
            "sink": self.vitals["sink"] > SINK_ABOVE,
            "saturated": self.vitals["saturated"] > (BANDS["saturated"].high or 0),
            "flat": self.vitals["entropy_ratio"] > (BANDS["entropy_ratio"].high or 1),
        }
        return tuple(role for role, holds in found.items() if holds)

    @property
    def strain(self) -> float:
        """How near to the edge of a band, at worst: 1 on the edge, more outside."""
        bands = self.bands
        return max(_strain(name, self.vitals[name], bands[name]) for name in bands)

    @property
    def scale_holds(self) -> bool:
        """Whether the divisor of this head's scores still does what sqrt(d_k) is there for."""
        return not {"logit_std", "row_std"} & set(self.outside)


def worst_first(heads: Iterable[Head]) -> list[Head]:
    return sorted(heads, key=lambda head: (bool(head.outside), head.strain), reverse=True)


def _inside(value: float, band: Band) -> bool:
    low = -math.inf if band.low is None else band.low
    high = math.inf if band.high is None else band.high
    return low <= value <= high


def _strain(name: str, value: float, band: Band) -> float:
    if math.isnan(value):
        return math.inf
    strains = [0.0]
    if band.low is not None:
        strains.append(_ratio(band.low, value))
    if band.high is not None and name in SHARES:
        strains.append(_ratio(1 - band.high, 1 - value))  # how little is left up to 1
    elif band.high is not None:
        strains.append(_ratio(value, band.high))
    return max(strains)


def _ratio(a: float, b: float) -> float:
    if a <= 0:
        return 0.0
    return a / b if b > 0 else math.inf
