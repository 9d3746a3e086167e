"""How long something has been so: what holds in one batch alone is no news."""

from dataclasses import dataclass, field

import numpy as np

LASTS = 3  # readings in a row until it counts
RESTS = 6  # readings without it until it has ended


@dataclass
class Stretch:
    """Of each head: since when a condition holds. It survives a reading or two without it."""

    held: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    missed: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    since: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def grow(self, heads: int) -> None:
        for name, array in vars(self).items():
            setattr(self, name, np.append(array, np.zeros(heads, np.int64)))

    def add(self, at: np.ndarray, holds: np.ndarray, step: int) -> None:
        held = self.held[at]
        self.since[at] = np.where(holds & (held == 0), step, self.since[at])
        missed = np.where(holds, 0, self.missed[at] + 1)
        # Until it counts, one miss ends it; after that it takes several.
        over = (missed >= RESTS) | (~holds & (held < LASTS))
        self.held[at] = np.where(over, 0, held + holds)
        self.missed[at] = missed

    @property
    def lasts(self) -> np.ndarray:
        return self.held >= LASTS
