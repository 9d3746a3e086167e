"""The end of a run: streams, and their last records while they still wait for a full chunk.

The records that are new since the last commit go to the disk as a *piece*, a chunk of its own; when
enough records are there, their pieces are replaced by one chunk. So every number is written about
twice, however slow the run is, and a full chunk wastes next to nothing of its pages.

Everything here can be written more than once: until `written` is called, `rows` gives the same
rows again. A commit that failed is simply repeated.
"""

import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from scaledot.fields import COUNT_FIELDS, FLOAT_FIELDS
from scaledot.watch.reading import Reading, Scalar
from scaledot.watch.store.packing import FLOAT32, FLOAT64, INT64, pack, pack_integers
from scaledot.watch.store.schema import IDS_A_SEGMENT, PARTS_A_CHUNK, SCALARS

PIECE_BYTES = 16 * 1024  # a piece that is smaller grows with the next commit
CHUNK_BYTES = 64 * 1024  # of data in a row; a row of this size wastes next to nothing of its pages
SPLIT_FROM = 64  # heads: from here on each field of a full chunk is a row by itself
# A model that runs other layers in every step (random depth, routing) would make a stream of every
# set of layers. Beyond this many sets each layer is kept by itself. Scalars likewise.
MOST_SETS = 64

# What waits in memory for full chunks: with many sets the longest becomes a smaller chunk sooner.
WAITING_BYTES = 2**20

Layers = tuple[tuple[str, int], ...]
Names = tuple[str, ...]


class Rows(NamedTuple):
    """What a commit changes: `gone` first, so that the pages of pieces are used again at once."""

    streams: list[tuple]
    gone: list[int]  # chunks
    chunks: list[tuple]
    parts: list[tuple]


class Tail:
    """What the writer's thread has taken from the queue and not finished writing."""

    def __init__(self) -> None:
        self._streams: dict[tuple[str, Layers | Names], _Stream] = {}
        self._new_streams: list[_Stream] = []
        self._numbers = 0  # of chunks
        self._full: list[_Records] = []
        self._changed: dict[int, _Stream] = {}
        self._waiting = 0  # bytes in open records

    def __bool__(self) -> bool:
        """Is there anything to write?"""
        return bool(self._changed or self._full)

    def add_readings(self, readings: Iterable[Reading]) -> None:
        steps: dict[tuple[str, int], list[Reading]] = {}
        for reading in readings:
            steps.setdefault((reading.phase, reading.step), []).append(reading)
        for (phase, _), together in steps.items():
            self._add_step(phase, _merged(together))

    def add_scalars(self, scalars: Iterable[Scalar]) -> None:
        steps: dict[int, dict[str, float]] = {}
        for step, name, value in scalars:
            steps.setdefault(step, {})[name] = value
        for step, named in steps.items():
            self._add_scalars(step, named)

    def rows(self, segment: int) -> Rows:
        rows = Rows([], [], [], [])
        for stream in self._new_streams:
            content = json.dumps(stream.content)
            rows.streams.append((_id(segment, stream.number), segment, stream.kind, content))
        for records in self._full:
            rows.gone.extend(_id(segment, piece.number) for piece in records.pieces)
            self._add_chunk(rows, segment, records, 0, records.split)
        for stream in self._changed.values():
            piece = self._piece_to_write(stream.open)
            rows.gone.append(_id(segment, piece.number))
            self._add_chunk(rows, segment, stream.open, piece.start, False, piece.number)
        return rows

    def written(self) -> None:
        """All rows are on the disk."""
        self._new_streams.clear()
        self._full.clear()
        for stream in self._changed.values():
            stream.open.pieces[-1].end = len(stream.open.steps)
        self._changed.clear()

    def _piece_to_write(self, records: "_Records") -> "_Piece":
        last = records.pieces[-1] if records.pieces else None
        # A piece without an end was tried by a commit that failed.
        if last is not None and last.end is not None:
            if (last.end - last.start) * records.record_bytes < PIECE_BYTES:
                last.end = None
            else:
                last = None
        if last is None:
            start = (records.pieces[-1].end or 0) if records.pieces else 0
            last = _Piece(self._number(), start)
            records.pieces.append(last)
        return last

    def _add_chunk(
        self,
        rows: Rows,
        segment: int,
        records: "_Records",
        start: int,
        split: bool,
        number: int | None = None,
    ) -> None:
        if records.number is None:
            records.number = records.pieces[0].number if records.pieces else self._number()
        chunk = _id(segment, records.number if number is None else number)
        steps = np.frombuffer(records.steps, np.int64)[start:]
        times = np.frombuffer(records.times, np.int64)[start:]
        rows.chunks.append(
            (
                chunk,
                _id(segment, records.stream),
                records.first + start,
                len(steps),
                int(steps.max()),
                int(split),
                pack_integers(steps),
                pack_integers(times) if len(times) else None,
            )
        )
        # A field's place among all fields is where its part is found.
        place = 0
        for fields in records.columns(start):
            for part in fields[:, None] if split else [fields]:
                packing, data = pack(part, small=records.width < SPLIT_FROM)
                rows.parts.append((chunk * PARTS_A_CHUNK + place, packing, data))
                place += len(part)

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers - 1

    def _add_step(self, phase: str, readings: Sequence[Reading]) -> None:
        layers = tuple((reading.layer, reading.heads) for reading in readings)
        if len(layers) > 1 and self._too_many(phase, layers):
            for reading in readings:
                self._add_step(phase, [reading])
            return
        floats = np.concatenate([reading.floats for reading in readings], axis=1)
        counts = np.concatenate([reading.counts for reading in readings], axis=1)
        stream = self._stream(phase, layers)
        stream.open.times.append(round(readings[0].time * 1e6))
        stream.open.counts += counts.astype(INT64, copy=False).tobytes()
        self._append(stream, readings[0].step, floats.astype(FLOAT32, copy=False))

    def _add_scalars(self, step: int, named: dict[str, float]) -> None:
        names = tuple(named)
        if len(names) > 1 and self._too_many(SCALARS, names):
            for name, value in named.items():
                self._add_scalars(step, {name: value})
            return
        self._append(self._stream(SCALARS, names), step, np.array(list(named.values()), FLOAT64))

    def _append(self, stream: "_Stream", step: int, values: np.ndarray) -> None:
        records = stream.open
        records.steps.append(step)
        records.data += values.tobytes()
        self._waiting += records.record_bytes
        self._changed[stream.number] = stream
        if records.full:
            self._close(stream)
        elif self._waiting > WAITING_BYTES:
            self._close(max(self._streams.values(), key=lambda one: len(one.open.data)))

    def _close(self, stream: "_Stream") -> None:
        """Make a chunk of its records."""
        self._full.append(stream.open)
        self._waiting -= len(stream.open.data)
        stream.open = stream.open.next()
        self._changed.pop(stream.number, None)

    def _too_many(self, kind: str, content: Layers | Names) -> bool:
        """Would this be one set too many?"""
        new = (kind, content) not in self._streams
        return new and sum(other == kind for other, _ in self._streams) >= MOST_SETS

    def _stream(self, kind: str, content: Layers | Names) -> "_Stream":
        """Of records of this make."""
        stream = self._streams.get((kind, content))
        if stream is None:
            stream = _Stream.of(len(self._streams), kind, content)
            self._streams[kind, content] = stream
            self._new_streams.append(stream)
        return stream


@dataclass
class _Piece:
    number: int
    start: int  # its first record among those that wait
    end: int | None = None  # None: not on the disk as it is now


@dataclass
class _Records:
    """Records of a stream that are not in a full chunk yet."""

    stream: int
    fields: int
    width: int  # heads of all layers; scalars: 1
    dtype: np.dtype
    first: int = 0  # how many records of the stream came before
    steps: array = field(default_factory=lambda: array("q"))
    times: array = field(default_factory=lambda: array("q"))  # microseconds; none of scalars
    data: bytearray = field(default_factory=bytearray)
    counts: bytearray = field(default_factory=bytearray)
    pieces: list[_Piece] = field(default_factory=list)
    number: int | None = None  # of the chunk that they become

    @property
    def record_bytes(self) -> int:
        return self.fields * self.width * self.dtype.itemsize

    @property
    def split(self) -> bool:
        return self.width >= SPLIT_FROM

    @property
    def full(self) -> bool:
        return len(self.data) >= CHUNK_BYTES * (self.fields if self.split else 1)

    def next(self) -> "_Records":
        first = self.first + len(self.steps)
        return _Records(self.stream, self.fields, self.width, self.dtype, first)

    def columns(self, start: int) -> Iterator[np.ndarray]:
        """[fields, records, width]: of the vitals, and of their counts."""
        yield _by_field(self.data, self.dtype, self.fields, self.width)[:, start:]
        if self.counts:
            yield _by_field(self.counts, INT64, len(COUNT_FIELDS), self.width)[:, start:]


def _by_field(data: bytearray, dtype: np.dtype, fields: int, width: int) -> np.ndarray:
    return np.frombuffer(bytes(data), dtype).reshape(-1, fields, width).swapaxes(0, 1)


@dataclass
class _Stream:
    number: int
    kind: str
    content: Layers | Names
    open: _Records

    @staticmethod
    def of(number: int, kind: str, content: Layers | Names) -> "_Stream":
        if kind == SCALARS:
            return _Stream(number, kind, content, _Records(number, len(content), 1, FLOAT64))
        heads = sum(int(heads) for _, heads in content)
        return _Stream(number, kind, content, _Records(number, len(FLOAT_FIELDS), heads, FLOAT32))


def _id(segment: int, number: int) -> int:
    return segment * IDS_A_SEGMENT + number


def _merged(readings: Sequence[Reading]) -> list[Reading]:
    """One reading a layer: two readings of a layer in one step are of disjoint rows."""
    layers: dict[tuple[str, int], Reading] = {}
    for reading in readings:
        key = (reading.layer, reading.heads)
        layers[key] = layers[key].merge(reading) if key in layers else reading
    return list(layers.values())
