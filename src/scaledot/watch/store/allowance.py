"""How much work and memory a look at a run may take, by the size of its file.

A run may come from somebody else, and a few bytes can announce any amount of numbers. What scaledot
writes stays far below these limits: a vital that never changes takes an eighth of its size, numbers
that are packed a sixteenth.
"""

import time

MEGABYTE = 2**20
SECONDS = 2.0  # of computing in one look, and one for each BYTES_A_SECOND
BYTES_A_SECOND = 20 * MEGABYTE
# Bytes that any file may need, and how many times its own size more.
LIMITS = {
    "unpack": (64 * MEGABYTE, 16),  # what zlib gives
    "keep": (12 * MEGABYTE, 8),  # one vital of the steps that were asked for
    "parse": (16 * MEGABYTE, 1),  # JSON of layers and names
    "attributes": (8 * MEGABYTE, 1 / 4),  # JSON that every look reads
    "alarms": (20 * MEGABYTE, 0),  # JSON of all of them
    "chunks": (16 * MEGABYTE, 1),  # a small one costs as much time as a large one
}
SPENDINGS = 32  # between two looks at the clock, which may take longer than what is measured


class Excess(Exception):
    """The file asks for more than its size justifies."""


class Allowance:
    """What is left for one look."""

    def __init__(self, size: int) -> None:
        """size: of the file on the disk, in bytes."""
        self._left = {what: base + times * size for what, (base, times) in LIMITS.items()}
        self._spendings = 0
        self._end = time.thread_time() + SECONDS + size / BYTES_A_SECOND

    def spend(self, what: str, amount: int) -> None:
        """Raise Excess where it is more than is left."""
        self._left[what] -= amount
        if self._left[what] < 0:
            raise Excess("it announces far more numbers than a file of its size holds")
        self._spendings += 1
        if self._spendings % SPENDINGS == 0 and self.out_of_time():
            raise Excess("to read it takes far longer than a file of its size should")

    def out_of_time(self) -> bool:
        """Whether this thread has computed for too long; waiting for a disk does not count."""
        return time.thread_time() > self._end
