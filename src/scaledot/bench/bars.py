"""A bar is a comparison and a limit; what is held against it is one number made of two medians."""

import operator
from dataclasses import dataclass
from enum import StrEnum

COMPARISONS = {"<=": operator.le, "<": operator.lt, ">=": operator.ge, ">": operator.gt}


class Quantity(StrEnum):
    """What is held against the bar."""

    RATIO = "ours / peer"
    SPEEDUP = "peer / ours"
    SPEED = "speed, ours / peer"
    EXTRA_MICROSECONDS = "ours - peer, us"
    EXTRA_BYTES = "ours - peer, B/row"

    def of(self, ours: float, peer: float) -> float:
        """ours and peer: medians, in milliseconds where the difference counts."""
        match self:
            case Quantity.RATIO:
                return ours / peer
            case Quantity.SPEEDUP | Quantity.SPEED:  # of two times: how much faster ours is
                return peer / ours
            case Quantity.EXTRA_MICROSECONDS:
                return (ours - peer) * 1e3
            case Quantity.EXTRA_BYTES:
                return ours - peer


@dataclass(frozen=True)
class Bar:
    comparison: str
    limit: float

    def __post_init__(self) -> None:
        if self.comparison not in COMPARISONS:
            known = ", ".join(COMPARISONS)
            raise ValueError(f"{self.comparison!r} is no comparison; use one of {known}")

    def holds(self, measured: float) -> bool:
        return COMPARISONS[self.comparison](measured, self.limit)

    def __str__(self) -> str:
        return f"{self.comparison} {self.limit:g}"

    @staticmethod
    def parse(text: str) -> "Bar":
        """The inverse of str()."""
        comparison, _, limit = text.partition(" ")
        return Bar(comparison, float(limit))
