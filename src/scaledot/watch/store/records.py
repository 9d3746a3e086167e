"""What a reader hands out, and how a row of the table `chunk` becomes readings again."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np

from scaledot.measure import COUNT_FIELDS, FLOAT_FIELDS
from scaledot.watch.reading import Phase, Reading, RunAttributes
from scaledot.watch.store.packing import FLOAT32, FLOAT64, unpack_floats, unpack_integers
from scaledot.watch.store.schema import SCALARS


@dataclass(frozen=True)
class Segment:
    """What one process wrote: the run, or a continuation of it."""

    id: int
    started: float  # seconds since 1970, as the times below
    seen: float  # the last commit
    ended: float | None  # None: still writing, or killed
    dropped: int  # readings and scalars lost because the disk was too slow
    float_fields: tuple[str, ...]
    count_fields: tuple[str, ...]
    attributes: RunAttributes

    def knows(self, name: str) -> bool:
        return name in self.float_fields or name in self.count_fields


class Step(NamedTuple):
    """All readings of one step in one phase, in the order of the model's layers."""

    segment: int
    step: int
    phase: Phase
    time: float
    readings: tuple[Reading, ...]

    def layer(self, name: str) -> Reading | None:
        return next((reading for reading in self.readings if reading.layer == name), None)


@dataclass(frozen=True, eq=False)
class Series:
    """Points in the order of segments, then of steps.

    A continued run may repeat steps: both are here. `newest()` leaves out what was repeated.
    """

    segments: np.ndarray  # int64 [n]
    steps: np.ndarray  # int64 [n]
    values: np.ndarray  # float64 [n], or [n, heads] where all heads were asked for

    def __len__(self) -> int:
        return len(self.steps)

    def newest(self) -> "Series":
        """Without the steps from which a later segment started anew."""
        keep = np.ones(len(self), bool)
        for segment in np.unique(self.segments):
            first = self.steps[self.segments == segment].min()
            keep &= (self.segments >= segment) | (self.steps < first)
        return Series(self.segments[keep], self.steps[keep], self.values[keep])


@dataclass(frozen=True)
class Stream:
    """A sequence of records of one make: see schema.py."""

    id: int
    segment: Segment
    kind: str  # a phase, or schema.SCALARS
    layers: tuple[tuple[str, int], ...]  # path and heads
    names: tuple[str, ...]  # of scalars

    @staticmethod
    def of(row: Sequence, segments: dict[int, Segment]) -> "Stream":
        id_, segment, kind, content = row
        if kind == SCALARS:
            return Stream(id_, segments[segment], kind, (), tuple(json.loads(content)))
        pairs = tuple((layer, heads) for layer, heads in json.loads(content))
        return Stream(id_, segments[segment], kind, pairs, ())

    @property
    def heads(self) -> int:
        return sum(heads for _, heads in self.layers)


@dataclass(frozen=True, eq=False)
class Chunk:
    """Consecutive records of a stream, unpacked."""

    id: int
    stream: Stream
    steps: np.ndarray  # int64 [n]
    times: np.ndarray | None  # float64 [n]
    counts: np.ndarray | None  # int64 [n, count fields * heads of all layers]
    data: np.ndarray  # float32 [n, float fields * heads of all layers]; scalars: float64 [n, names]

    @staticmethod
    def of(row: Sequence, stream: Stream) -> "Chunk":
        id_, records, steps, times, counts, data = row
        numbers = unpack_integers(steps, records, 1)[:, 0]
        if stream.names:
            values = unpack_floats(data, records, len(stream.names), FLOAT64)
            return Chunk(id_, stream, numbers, None, None, values)
        segment, heads = stream.segment, stream.heads
        return Chunk(
            id_,
            stream,
            numbers,
            unpack_integers(times, records, 1)[:, 0] / 1e6,
            unpack_integers(counts, records, len(segment.count_fields) * heads),
            unpack_floats(data, records, len(segment.float_fields) * heads, FLOAT32),
        )

    def __len__(self) -> int:
        return len(self.steps)

    def since(self, start: int) -> "Chunk":
        """Without its first records."""
        times = None if self.times is None else self.times[start:]
        counts = None if self.counts is None else self.counts[start:]
        return Chunk(self.id, self.stream, self.steps[start:], times, counts, self.data[start:])

    def unpacked(self) -> Iterator[Step]:
        """Of vitals: its records as steps."""
        assert self.times is not None
        phase = cast(Phase, self.stream.kind)
        layers = [
            (place.layer, self._fields(place, FLOAT_FIELDS), self._fields(place, COUNT_FIELDS))
            for place in self._places()
        ]
        for position, (number, time) in enumerate(
            zip(self.steps.tolist(), self.times.tolist(), strict=True)
        ):
            readings = tuple(
                Reading(number, phase, time, layer, floats[position], counts[position])
                for layer, floats, counts in layers
            )
            yield Step(self.stream.segment.id, number, phase, time, readings)

    def vital(self, layer: str, name: str) -> np.ndarray:
        """One field of a layer's heads, float64 [n, heads]."""
        if name == "passes":
            rows, sum_p2 = self.vital(layer, "rows"), self.vital(layer, "sum_p2")
            return np.where(rows > 0, 1 - sum_p2, 0.0)
        place = next(place for place in self._places() if place.layer == layer)
        return self._field(place, name).astype(np.float64)

    def _places(self) -> Iterator["_Place"]:
        before = 0
        for layer, heads in self.stream.layers:
            yield _Place(layer, heads, before)
            before += heads

    def _fields(self, place: "_Place", names: tuple[str, ...]) -> np.ndarray:
        """[n, fields, heads]"""
        return np.stack([self._field(place, name) for name in names], axis=1)

    def _field(self, place: "_Place", name: str) -> np.ndarray:
        """[n, heads]. A file may be older than this code: what it lacks is NaN, a count is 0."""
        segment = self.stream.segment
        for packed, fields in (
            (self.data, segment.float_fields),
            (self.counts, segment.count_fields),
        ):
            if name in fields:
                assert packed is not None
                start = place.before * len(fields) + fields.index(name) * place.heads
                return packed[:, start : start + place.heads]
        missing = 0 if name in COUNT_FIELDS else np.nan
        return np.full((len(self), place.heads), missing)


class _Place(NamedTuple):
    layer: str
    heads: int
    before: int  # heads of the layers before it in the record


def together(steps: Iterator[Step]) -> Iterator[Step]:
    """Steps that follow each other and are the same step of other layers, as one."""
    last: Step | None = None
    for step in steps:
        if last is not None and last[:3] == step[:3] and not _overlap(last, step):
            last = last._replace(readings=last.readings + step.readings)
            continue
        if last is not None:
            yield last
        last = step
    if last is not None:
        yield last


def _overlap(one: Step, other: Step) -> bool:
    layers = {reading.layer for reading in one.readings}
    return any(reading.layer in layers for reading in other.readings)
