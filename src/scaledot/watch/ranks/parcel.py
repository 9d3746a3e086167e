"""What one rank sends of one reading: a header of fixed size, then the numbers."""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from scaledot.fields import COUNT_FIELDS, FLOAT_FIELDS
from scaledot.watch.gather import Waiting
from scaledot.watch.late import Late
from scaledot.watch.ranks.layout import Layout, Slot
from scaledot.watch.reading import (
    LEARNING_RATE,
    LOSS,
    ROWS_READ,
    ROWS_THERE,
    STEP_TIME,
    WATCH_COST,
    Reading,
    Scalar,
)

MAGIC = b"sdw2"
# magic, scalars that are there (a bit each), is it the last, step, wish, lengths, mark; padded.
_HEADER = struct.Struct("<4sBBxxqqQQ8s16x")
SIZE = _HEADER.size
# The scalars of a step that travel.
NUMBERS = (LOSS, LEARNING_RATE, STEP_TIME, WATCH_COST, ROWS_READ, ROWS_THERE)


class Header(NamedTuple):
    step: int
    wish: int  # the interval that the rank's budget allows; 0: it has none, or knows it not yet
    last: bool  # the rank's watch ends with this
    has: int  # which scalars are there
    layout: int  # bytes
    payload: int
    mark: bytes

    def packed(self) -> bytes:
        return _HEADER.pack(
            MAGIC, self.has, self.last, self.step, self.wish, self.layout, self.payload, self.mark
        )

    @staticmethod
    def read(text: bytes) -> "Header":
        magic, has, last, step, wish, layout, payload, mark = _HEADER.unpack(text[:SIZE])
        if magic != MAGIC:
            raise ValueError("another rank sent something else: is it another version of scaledot?")
        return Header(step, wish, bool(last), has, layout, payload, mark)


@dataclass
class Parcel:
    """A rank's reading, before it is sent; kept until all ranks' are here."""

    step: int
    waiting: Sequence[Waiting]
    scalars: Sequence[Scalar]
    late: Sequence[Late]
    wish: int
    last: bool
    firsts: dict[str, int]  # heads before this rank's, of layers that share theirs out
    told: Layout  # what is the same in every reading of the rank

    @property
    def here(self) -> bool:
        return all(one.here for one in (*self.waiting, *self.late))

    def readings(self) -> list[Reading]:
        """Waits where the numbers are not here yet."""
        return [reading for one in self.waiting for reading in one.readings()]

    def numbers(self) -> list[Scalar]:
        return [*self.scalars, *(one.scalar() for one in self.late)]

    def layout(self) -> Layout:
        slots = tuple(
            Slot(key.layer, key.phase, heads, self.firsts.get(key.layer, 0))
            for one in self.waiting
            for key, heads in one.heads.items()
        )
        return self.told._replace(slots=slots)

    def payload(self) -> tuple[int, bytes]:
        """Which scalars are there, and all numbers."""
        known = {scalar.name: scalar.value for scalar in self.numbers()}
        has = sum(1 << place for place, name in enumerate(NUMBERS) if name in known)
        readings = self.readings()
        counts = [reading.counts for reading in readings]
        floats = [reading.floats for reading in readings]
        parts: list[Any] = [
            np.array([known.get(name, math.nan) for name in NUMBERS], np.float64),
            np.array([reading.step for reading in readings], np.int64),
            np.array([reading.time for reading in readings], np.float64),
            np.concatenate(counts, 1) if counts else np.empty(0, np.int64),
            np.concatenate(floats, 1) if floats else np.empty(0, np.float32),
        ]
        return has, b"".join(part.tobytes() for part in parts)


class Contents(NamedTuple):
    """A parcel as another rank reads it."""

    header: Header
    layout: Layout
    scalars: dict[str, float]
    steps: list[int]  # of each slot
    times: list[float]
    counts: np.ndarray  # [C, heads of all slots]
    floats: np.ndarray  # [F, heads of all slots]

    @staticmethod
    def read(header: Header, layout: Layout, payload: bytes) -> "Contents":
        slots, heads = len(layout.slots), layout.heads
        sizes = (len(NUMBERS), slots, slots, len(COUNT_FIELDS) * heads, len(FLOAT_FIELDS) * heads)
        types = (np.float64, np.int64, np.float64, np.int64, np.float32)
        if len(payload) != sum(n * np.dtype(t).itemsize for n, t in zip(sizes, types, strict=True)):
            raise ValueError("another rank's numbers do not fit its list of layers")
        arrays: list[np.ndarray] = []
        place = 0
        for size, dtype in zip(sizes, types, strict=True):
            arrays.append(np.frombuffer(payload, dtype, size, place))
            place += arrays[-1].nbytes
        scalars, steps, times, counts, floats = arrays
        return Contents(
            header,
            layout,
            {name: float(scalars[i]) for i, name in enumerate(NUMBERS) if header.has >> i & 1},
            steps.tolist(),
            times.tolist(),
            counts.reshape(len(COUNT_FIELDS), heads),
            floats.reshape(len(FLOAT_FIELDS), heads),
        )
