"""Follow how fast each head's logits grow: a straight line through ln(logit), kept up to date.

The points of the past are forgotten slowly: the line looks back over about a third of the run's
steps, so that in a long run no noise of single batches looks like growth, and that it means the
same whatever the cadence. A few sums a head are all that is kept, so a reading costs the same
however long the run is.
"""

from dataclasses import dataclass, field

import numpy as np

FEWEST = 8  # readings before anything is said of consecutive steps
FEWEST_APART, APART = 4, 16  # readings that suffice where they lie over so many steps
WINDOW = 1 / 3  # of the steps since the first reading


def _zeros() -> np.ndarray:
    return np.zeros(0)


@dataclass
class Trend:
    """Weighted sums over the readings, with the step of the last one as zero."""

    readings: np.ndarray = field(default_factory=_zeros)
    age: np.ndarray = field(default_factory=_zeros)  # steps from the first reading to the last
    weight: np.ndarray = field(default_factory=_zeros)
    x: np.ndarray = field(default_factory=_zeros)
    y: np.ndarray = field(default_factory=_zeros)
    xx: np.ndarray = field(default_factory=_zeros)
    xy: np.ndarray = field(default_factory=_zeros)
    slope: np.ndarray = field(default_factory=_zeros)  # of ln(score), a step
    level: np.ndarray = field(default_factory=_zeros)  # score on the line, now

    def grow(self, heads: int) -> None:
        for name, array in vars(self).items():
            setattr(self, name, np.append(array, np.zeros(heads)))

    def add(self, at: np.ndarray | slice, steps: np.ndarray, scores: np.ndarray) -> None:
        """at: which heads; steps: since their last reading."""
        finite = np.isfinite(scores)
        if not finite.all():
            at = np.arange(len(self.weight))[at][finite]
            steps, scores = steps[finite], scores[finite]
        y = np.log(np.maximum(scores, 1.0))  # scores below 1 are no matter of growth
        number = self.readings[at] + 1
        steps = np.where(number > 1, steps, 0)
        age = self.age[at] + steps
        # Readings in the window, were all of them as far apart as the last two; rare ones are few.
        within = WINDOW * (age / np.maximum(steps, 1) + 1)
        fewest = np.clip(APART / np.maximum(steps, 1), FEWEST_APART, FEWEST)
        keep = 1 - 1 / np.maximum(within, fewest)
        weight, x, sum_y = self.weight[at], self.x[at], self.y[at]
        xx = keep * (self.xx[at] - 2 * steps * x + steps**2 * weight)
        xy = keep * (self.xy[at] - steps * sum_y)
        x = keep * (x - steps * weight)
        weight, sum_y = keep * weight + 1, keep * sum_y + y
        spread = weight * xx - x * x
        slope = np.divide(
            weight * xy - x * sum_y, spread, out=np.zeros_like(y), where=spread > 1e-9 * weight
        )
        self.readings[at], self.age[at] = number, age
        self.weight[at], self.x[at], self.y[at] = weight, x, sum_y
        self.xx[at], self.xy[at], self.slope[at] = xx, xy, slope
        self.level[at] = np.exp(np.minimum((sum_y - slope * x) / weight, 80.0))

    @property
    def known(self) -> np.ndarray:
        far = (self.readings >= FEWEST_APART) & (self.age >= APART)
        return far | (self.readings >= FEWEST)
