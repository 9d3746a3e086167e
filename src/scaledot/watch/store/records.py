"""What a reader hands out, and how a chunk's numbers become readings again."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, cast

import numpy as np

from scaledot.fields import COUNT_FIELDS, FLOAT_FIELDS
from scaledot.watch.reading import Phase, Reading, RunAttributes

LAST = 2**63 - 1  # no step is later


@dataclass(frozen=True)
class Segment:
    """What one process wrote: the run, or a continuation of it."""

    id: int
    started: float  # seconds since 1970, as the times below
    seen: float  # the last commit
    ended: float | None  # None: still writing, or killed
    dropped: int  # readings and scalars lost: the disk was too slow, or refused to write
    float_fields: tuple[str, ...]
    count_fields: tuple[str, ...]
    attributes: RunAttributes

    @property
    def cut_off(self) -> bool:
        """Whether it ended while the disk refused to write: what came after `seen` is lost."""
        return self.ended is not None and self.ended > self.seen

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

    A continued run may repeat steps: both are here. `newest()` leaves out what was repeated;
    `newest(reader.starts())` also where the continuation has no point of this series.
    """

    segments: np.ndarray  # int64 [n]
    steps: np.ndarray  # int64 [n]
    values: np.ndarray  # float64 [n], or [n, heads] where all heads were asked for
    times: np.ndarray | None = None  # float64 [n], seconds since 1970; scalars have none

    def __len__(self) -> int:
        return len(self.steps)

    def newest(self, starts: Mapping[int, int] | None = None) -> "Series":
        """Without the steps from which a later segment started anew."""
        starts = starts or {}
        keep = np.ones(len(self), bool)
        for segment in {*np.unique(self.segments)[1:].tolist(), *starts}:
            first = self.steps[self.segments == segment].min(initial=starts.get(segment, LAST))
            keep &= (self.segments >= segment) | (self.steps < first)
        return self if keep.all() else self.at(keep)

    def thinned(self, most: int) -> "Series":
        """At most so many points, evenly chosen; the first and the last are among them."""
        if len(self) <= most:
            return self
        return self.at(np.linspace(0, len(self) - 1, most).round().astype(np.int64))

    def at(self, places: "np.ndarray | slice") -> "Series":
        times = None if self.times is None else self.times[places]
        return Series(self.segments[places], self.steps[places], self.values[places], times)


def replaced_from(starts: Mapping[int, int], segment: int) -> float:
    """The first step of the segment that a later one wrote again; infinity: there is none."""
    return min((first for later, first in starts.items() if later > segment), default=math.inf)


@dataclass(frozen=True)
class Stream:
    """A sequence of records of one make: see schema.py."""

    id: int
    segment: Segment
    kind: str  # a phase, or schema.SCALARS
    layers: tuple[tuple[str, int], ...]  # path and heads
    names: tuple[str, ...]  # of scalars

    @cached_property
    def heads(self) -> int:
        return sum(heads for _, heads in self.layers)

    @property
    def width(self) -> int:
        """Numbers of a field in one record."""
        return self.heads or 1

    @property
    def floats(self) -> tuple[str, ...]:
        """The fields of its records, counts apart; of scalars: their names."""
        return self.names or self.segment.float_fields

    @property
    def counts(self) -> tuple[str, ...]:
        return () if self.names else self.segment.count_fields

    def columns_of(self, layer: str) -> slice | None:
        """Where a layer's heads are in a record; None: it has no such layer."""
        return self._columns.get(layer)

    @cached_property
    def _columns(self) -> dict[str, slice]:
        columns: dict[str, slice] = {}
        before = 0
        for name, heads in self.layers:
            columns.setdefault(name, slice(before, before + heads))
            before += heads
        return columns


@dataclass(frozen=True, eq=False)
class Chunk:
    """Consecutive records of a stream, as far as they were asked for."""

    stream: Stream
    first: int  # how many records of the stream came before
    steps: np.ndarray  # int64 [n]
    times: np.ndarray | None  # float64 [n]
    fields: dict[str, np.ndarray]  # [n, heads of all layers]; scalars: [n, 1]

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def end(self) -> int:
        return self.first + len(self)

    def since(self, record: int) -> "Chunk":
        """Without the records before that one of the stream."""
        start = max(record - self.first, 0)
        return self if start == 0 else self.at(slice(start, None), self.first + start)

    def at(self, places: "np.ndarray | slice", first: int | None = None) -> "Chunk":
        return Chunk(
            self.stream,
            self.first if first is None else first,
            self.steps[places],
            None if self.times is None else self.times[places],
            {name: values[places] for name, values in self.fields.items()},
        )

    def unpacked(self) -> Iterator[Step]:
        """Of vitals, all fields: its records as steps."""
        assert self.times is not None
        phase = cast(Phase, self.stream.kind)
        floats = np.stack([self.field(name) for name in FLOAT_FIELDS], 1).astype(np.float32)
        counts = np.stack([self.field(name) for name in COUNT_FIELDS], 1).astype(np.int64)
        layers = []
        for layer, _ in self.stream.layers:
            place = self.stream.columns_of(layer)
            layers.append((layer, floats[..., place], counts[..., place]))
        for position, (number, time) in enumerate(
            zip(self.steps.tolist(), self.times.tolist(), strict=True)
        ):
            readings = tuple(
                Reading.trusted(number, phase, time, layer, f[position], c[position])
                for layer, f, c in layers
            )
            yield Step(self.stream.segment.id, number, phase, time, readings)

    def field(self, name: str) -> np.ndarray:
        """[n, heads]. A file may be older than this code: what it lacks is NaN, a count is 0."""
        if name in self.fields:
            return self.fields[name]
        if name == "passes":
            sum_p2 = self.field("sum_p2")
            return np.where(self.field("rows") > 0, sum_p2.dtype.type(1) - sum_p2, 0)
        return np.full(
            (len(self), self.stream.width), 0 if name in COUNT_FIELDS else np.nan, np.float32
        )


PASSES = ("sum_p2", "rows")  # what `passes` is made of


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
