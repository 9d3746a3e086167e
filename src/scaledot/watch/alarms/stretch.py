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
    begun: bool = False  # of any head: most conditions never hold in a healthy run

    def grow(self, heads: int) -> None:
        for name in ("held", "missed", "since"):
            setattr(self, name, np.append(getattr(self, name), np.zeros(heads, np.int64)))

    def add(self, at: np.ndarray | slice, holds: np.ndarray, step: int) -> None:
        if not (self.begun or np.count_nonzero(holds)):
            return  # what has not begun cannot be missed
        held = self.held[at]
        self.since[at] = np.where(holds & (held == 0), step, self.since[at])
        missed = np.where(holds, 0, self.missed[at] + 1)
        # Until it counts, one miss ends it; after that it takes several.
        over = (missed >= RESTS) | (~holds & (held < LASTS))
        self.held[at] = np.where(over, 0, held + holds)
        self.missed[at] = missed
        self.begun = bool(np.count_nonzero(self.held))

    @property
    def lasts(self) -> np.ndarray:
        return self.held >= LASTS
