"""The end of a run: streams, and their last chunks while they still grow.

Everything here can be written more than once: until `written` is called, `chunk_rows` gives the
same rows again. A commit that failed is simply repeated.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from scaledot.watch.reading import Reading, Scalar
from scaledot.watch.store.packing import FLOAT32, FLOAT64, pack_integers
from scaledot.watch.store.schema import IDS_A_SEGMENT, SCALARS

CHUNK_BYTES = 64 * 1024  # of data; a row of this size wastes next to nothing of its pages
# A model that runs other layers in every step (random depth, routing) would make a stream of every
# set of layers. Beyond this many sets each layer is kept by itself. Scalars likewise.
MOST_SETS = 64

Layers = tuple[tuple[str, int], ...]
Names = tuple[str, ...]


class Tail:
    """What the writer's thread has taken from the queue and not finished writing."""

    def __init__(self) -> None:
        self._streams: dict[tuple[str, Layers | Names], _Stream] = {}
        self._chunks = 0
        self._new_streams: list[_Stream] = []
        self._changed: dict[int, _Chunk] = {}

    def __bool__(self) -> bool:
        """Is there anything to write?"""
        return bool(self._changed)

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

    def stream_rows(self, segment: int) -> Iterator[tuple[int, int, str, str]]:
        for stream in self._new_streams:
            content = json.dumps(stream.content)
            yield _id(segment, stream.number), segment, stream.kind, content

    def chunk_rows(
        self, segment: int, revision: int
    ) -> Iterator[tuple[int, int, int, int, bytes, bytes | None, bytes | None, bytes]]:
        for chunk in self._changed.values():
            ids = _id(segment, chunk.number), _id(segment, chunk.stream)
            yield *ids, revision, len(chunk.steps), *chunk.columns()

    def written(self) -> None:
        """All rows are on the disk."""
        self._new_streams.clear()
        self._changed.clear()

    def _add_step(self, phase: str, readings: Sequence[Reading]) -> None:
        layers = tuple((reading.layer, reading.heads) for reading in readings)
        if len(layers) > 1 and self._too_many(phase, layers):
            for reading in readings:
                self._add_step(phase, [reading])
            return
        chunk = self._chunk(phase, layers)
        chunk.steps.append(readings[0].step)
        chunk.times.append(round(readings[0].time * 1e6))
        chunk.counts.append(np.concatenate([reading.counts.ravel() for reading in readings]))
        for reading in readings:
            chunk.data += reading.floats.astype(FLOAT32, copy=False).tobytes()

    def _add_scalars(self, step: int, named: dict[str, float]) -> None:
        names = tuple(named)
        if len(names) > 1 and self._too_many(SCALARS, names):
            for name, value in named.items():
                self._add_scalars(step, {name: value})
            return
        chunk = self._chunk(SCALARS, names)
        chunk.steps.append(step)
        chunk.data += np.array(list(named.values()), FLOAT64).tobytes()

    def _too_many(self, kind: str, content: Layers | Names) -> bool:
        """Would this be one set too many?"""
        new = (kind, content) not in self._streams
        return new and sum(other == kind for other, _ in self._streams) >= MOST_SETS

    def _chunk(self, kind: str, content: Layers | Names) -> "_Chunk":
        """The chunk that takes the next record of this make."""
        stream = self._streams.get((kind, content))
        if stream is None:
            stream = _Stream(len(self._streams), kind, content)
            self._streams[kind, content] = stream
            self._new_streams.append(stream)
        if stream.chunk is None or len(stream.chunk.data) >= CHUNK_BYTES:
            stream.chunk = _Chunk(self._chunks, stream.number)
            self._chunks += 1
        self._changed[stream.chunk.number] = stream.chunk
        return stream.chunk


@dataclass
class _Chunk:
    number: int
    stream: int
    steps: list[int] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    counts: list[np.ndarray] = field(default_factory=list)
    data: bytearray = field(default_factory=bytearray)

    def columns(self) -> tuple[bytes, bytes | None, bytes | None, bytes]:
        steps = pack_integers(np.array(self.steps, np.int64))
        if not self.times:
            return steps, None, None, bytes(self.data)
        times = pack_integers(np.array(self.times, np.int64))
        return steps, times, pack_integers(np.stack(self.counts)), bytes(self.data)


@dataclass
class _Stream:
    number: int
    kind: str
    content: Layers | Names
    chunk: _Chunk | None = None


def _id(segment: int, number: int) -> int:
    return segment * IDS_A_SEGMENT + number


def _merged(readings: Sequence[Reading]) -> list[Reading]:
    """One reading a layer: two readings of a layer in one step are of disjoint rows."""
    layers: dict[tuple[str, int], Reading] = {}
    for reading in readings:
        key = (reading.layer, reading.heads)
        layers[key] = layers[key].merge(reading) if key in layers else reading
    return list(layers.values())
