"""A number made of many rounds, and how far luck reaches: a bootstrap over rounds."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

DRAWS = 2000
CONFIDENCE = 0.95
SEED = 0


class Interval(NamedTuple):
    value: float
    low: float
    high: float

    def holds(self, limit: float) -> bool | None:
        """Whether it is at most the limit; None where luck decides."""
        if self.high <= limit:
            return True
        return False if self.low > limit else None


def bootstrap(
    rounds: Mapping[str, np.ndarray], number: Callable[[dict[str, float]], float]
) -> Interval:
    """rounds: one value a round of each side. number: of the sides of one round.

    The sides of a round saw the same machine, so the number is made round by round; its median over
    rounds is what is found, and rounds are drawn again and again for the interval.
    """
    names = list(rounds)
    each = zip(*(rounds[name] for name in names), strict=True)
    numbers = np.array([number(dict(zip(names, map(float, sides), strict=True))) for sides in each])
    drawn = np.random.default_rng(SEED).integers(len(numbers), size=(DRAWS, len(numbers)))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.median(numbers[drawn], axis=-1), (tail, 1 - tail))
    return Interval(float(np.median(numbers)), float(low), float(high))
