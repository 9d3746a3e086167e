"""Follow how long a condition holds of each head: what holds in one batch alone is no news."""

from dataclasses import dataclass, field

import numpy as np

# Readings of consecutive steps; fewer suffice where they lie so many steps apart.
LASTS, LASTS_APART = 3, 2  # readings in a row until it counts
RESTS, RESTS_APART = 6, 3  # readings without it until it has ended
APART = 8


def _whole_numbers() -> np.ndarray:
    return np.zeros(0, np.int64)


@dataclass
class Stretch:
    """Of each head: since when a condition holds. It survives a reading or two without it."""

    held: np.ndarray = field(default_factory=_whole_numbers)  # readings
    missed: np.ndarray = field(default_factory=_whole_numbers)  # readings since
    since: np.ndarray = field(default_factory=_whole_numbers)  # the first step it held in
    seen: np.ndarray = field(default_factory=_whole_numbers)  # the last one
    lasts: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    begun: bool = False  # of any head: most conditions never hold in a healthy run

    def grow(self, heads: int) -> None:
        for name in ("held", "missed", "since", "seen", "lasts"):
            array = getattr(self, name)
            setattr(self, name, np.append(array, np.zeros(heads, array.dtype)))

    def add(self, at: np.ndarray | slice, holds: np.ndarray, step: int) -> None:
        if not (self.begun or np.count_nonzero(holds)):
            return  # what has not begun cannot be missed
        held = self.held[at] + holds
        since = np.where(holds & (held == 1), step, self.since[at])
        seen = np.where(holds, step, self.seen[at])
        missed = np.where(holds, 0, self.missed[at] + 1)
        lasts = self.lasts[at] | _enough(held, LASTS, LASTS_APART, step - since, holds)
        # Until it counts, one miss ends it; after that it takes several.
        over = _enough(missed, RESTS, RESTS_APART, step - seen, ~holds) | ~(holds | lasts)
        self.held[at] = np.where(over, 0, held)
        self.lasts[at] = lasts & ~over
        self.missed[at], self.since[at], self.seen[at] = missed, since, seen
        self.begun = bool(np.count_nonzero(self.held))


def _enough(
    readings: np.ndarray, consecutive: int, apart: int, steps: np.ndarray, holds: np.ndarray
) -> np.ndarray:
    return holds & ((readings >= consecutive) | ((readings >= apart) & (steps >= APART)))
