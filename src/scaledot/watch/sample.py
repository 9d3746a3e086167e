"""Choose which entries of a batch a reading is made of.

A reading of one entry costs a fraction of one of the whole batch. The choice is a fixed rule of the
step's number: it takes nothing from the training's random numbers, and every run makes the same.
"""

import math

LEAST_ROWS = 32  # of a head, in a sample of short sequences
# The fractional parts of its multiples are spread evenly, whatever steps are read.
GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


def entries_of(step: int, batch: int, rows: int) -> slice:
    """Return the entries to read in a step: one, or as many as have LEAST_ROWS rows together."""
    number = max(math.ceil(LEAST_ROWS / max(rows, 1)), 1)
    if number >= batch:
        return slice(None)
    first = int(step * GOLDEN_RATIO % 1.0 * (batch - number + 1))
    return slice(first, first + number)
