"""`RunReader`: a run as a viewer sees it, while it is written and after."""

import heapq
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from scaledot.fields import COUNT_FIELDS, FLOAT_FIELDS
from scaledot.watch.alarms.alarm import Alarm
from scaledot.watch.reading import PHASES, Phase, Reading, RunAttributes
from scaledot.watch.store.chunks import (
    first_step,
    joined,
    last_record,
    read_chunks,
    read_evenly,
)
from scaledot.watch.store.follower import Follower
from scaledot.watch.store.looking import NoSuchSeries, look
from scaledot.watch.store.records import (
    Chunk,
    Segment,
    Series,
    Step,
    Stream,
    replaced_from,
    together,
)
from scaledot.watch.store.schema import IDS_A_SEGMENT
from scaledot.watch.store.tables import read_alarms, read_segments, read_streams, vitals_streams

JUDGED = "judged"  # the attribute of a segment whose readings were shown to the rules
AT_ONCE = 2**16  # heads whose readings are unpacked at a time: some eight megabytes


class RunReader:
    """Opens nothing for longer than a moment, so it may be kept, and shared between threads."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises StoreError where there is no run, or none that this version understands."""
        self.path = Path(path).absolute()
        self.segments()

    def segments(self) -> list[Segment]:
        """Oldest first."""
        with look(self.path) as database:
            return list(read_segments(database).values())

    @property
    def attributes(self) -> RunAttributes:
        """Of the newest segment."""
        segments = self.segments()
        return segments[-1].attributes if segments else RunAttributes()

    def alarms(self) -> list[Alarm]:
        """What was said while the run was trained, oldest first; of steps that a continuation wrote
        again, what was said of these.

        A run that was trained without alarms, or before there were any, has none here (`judged` is
        then False): `scaledot.watch.alarms.of_run(reader)` judges it now.
        """
        starts = self.starts()
        with look(self.path) as database:
            found = read_alarms(database)
        return [
            alarm
            for id_, alarm in found.items()
            if alarm.step < replaced_from(starts, id_ // IDS_A_SEGMENT)
        ]

    @property
    def judged(self) -> bool:
        """Whether the rules were asked while the run was trained."""
        return bool(self.attributes.more.get(JUDGED, False))

    def starts(self) -> dict[int, int]:
        """The first step of every segment that has one; an evaluation alone continues nothing."""
        firsts: dict[int, int] = {}
        with look(self.path) as database:
            for stream in read_streams(database):
                if stream.kind != "eval" and (step := first_step(database, stream)) is not None:
                    segment = stream.segment.id
                    firsts[segment] = min(step, firsts.get(segment, step))
        return firsts

    def layers(self, phase: Phase | None = None) -> dict[str, int]:
        """Every layer that was read and its number of heads, in the order of the model."""
        with look(self.path) as database:
            streams = vitals_streams(database, phase)
        return {layer: heads for stream in streams for layer, heads in stream.layers}

    def steps(self, phase: Phase | None = None) -> Iterator[Step]:
        """Every step: segment after segment, then in order of steps, training before evaluation.

        All vitals of all heads: for one vital, `vital` and `heads` are many times faster.
        """
        with look(self.path) as database:
            streams = vitals_streams(database, phase)
        for segment in sorted({stream.segment.id for stream in streams}):
            parts = [self._unpacked(stream) for stream in streams if stream.segment.id == segment]
            in_order = heapq.merge(*parts, key=lambda s: (s.step, PHASES.index(s.phase)))
            yield from together(in_order)

    def latest(self, phase: Phase | None = "train") -> Step | None:
        """The last step that is on the disk; None before the first."""
        lasts = self._last_steps(phase, only_newest=True)
        last = max(lasts, key=lambda step: (step.time, step.step), default=None)
        if last is None:
            return None
        same = (step for step in lasts if step[:3] == last[:3])
        return next(together(same))

    def latest_of_layers(self, phase: Phase = "train") -> dict[str, Reading]:
        """The last reading of every layer: layers may run in different steps."""
        newest: dict[str, tuple[tuple[int, float], Reading]] = {}
        for step in self._last_steps(phase):
            age = (step.segment, step.time)
            for reading in step.readings:
                if reading.layer not in newest or age >= newest[reading.layer][0]:
                    newest[reading.layer] = (age, reading)
        return {layer: reading for layer, (_, reading) in newest.items()}

    def series(self, layer: str, head: int, field: str, phase: Phase = "train") -> Series:
        """One vital of one head over the run; values are float64 [n]."""
        every = self.heads(layer, field, phase)
        if not 0 <= head < every.values.shape[1]:
            number = every.values.shape[1]
            raise NoSuchSeries(f"head {head} of layer {layer!r}: it has heads 0 to {number - 1}")
        return Series(every.segments, every.steps, every.values[:, head], every.times)

    def heads(
        self, layer: str, field: str, phase: Phase = "train", since: int | None = None
    ) -> Series:
        """One vital of every head of a layer; values are float64 [n, heads].

        NaN where a segment had fewer heads, or was written before this vital existed. since: only
        the steps after this one.
        """
        with look(self.path) as database:
            streams = vitals_streams(database, phase)
            known = {name: None for stream in streams for name, _ in stream.layers}
            streams = [s for s in streams if layer in dict(s.layers)]
            if not streams:
                there_are = ", ".join(known) or "none yet"
                raise NoSuchSeries(f"no {phase} readings of layer {layer!r}; layers: {there_are}")
            _check_field(field, streams)
            parts = [
                _Part.of(read_chunks(database, s, (field,), after_step=since), s, field)
                for s in streams
            ]
        found = _of_layer(parts, layer, since)
        return Series(found.segments, found.steps, found.values.astype(np.float64), found.times)

    def vital(
        self,
        field: str,
        phase: Phase = "train",
        since: int | None = None,
        most: int | None = None,
    ) -> dict[str, Series]:
        """One vital of every head of every layer: values [n, heads], float32 (counts: int64).

        As `heads` of each layer, in one pass over the file. since: only the steps after this one.
        most: of a long run so many points, evenly chosen; the rest is not even read.
        """
        with look(self.path) as database:
            streams = vitals_streams(database, phase)
            if streams:
                _check_field(field, streams)
            parts = []
            for stream in streams:
                if most is None:
                    chunks = read_chunks(database, stream, (field,), after_step=since)
                else:
                    chunks = read_evenly(database, stream, (field,), most)
                parts.append(_Part.of(chunks, stream, field))
        return _by_layer(parts, since)

    def timeline(self, phase: Phase = "train") -> dict[str, Series]:
        """When each layer was read: values are seconds since 1970, [n]."""
        with look(self.path) as database:
            streams = vitals_streams(database, phase)
            parts = [
                _Part(s, chunks := read_chunks(database, s, ()), _nothing(chunks, s))
                for s in streams
            ]
        return {
            layer: Series(found.segments, found.steps, found.times, found.times)
            for layer, found in _by_layer(parts, None).items()
            if found.times is not None
        }

    def scalar_names(self) -> list[str]:
        with look(self.path) as database:
            streams = read_streams(database)
        return list(dict.fromkeys(name for stream in streams for name in stream.names))

    def scalars(self, name: str, since: int | None = None) -> Series:
        """One scalar over the run (`loss`, `learning_rate`, ...), empty if it was never written."""
        with look(self.path) as database:
            streams = [stream for stream in read_streams(database) if name in stream.names]
            parts = [
                _Part.of(read_chunks(database, s, (name,), after_step=since), s, name)
                for s in streams
            ]
        found = _in_order(parts, [part.values for part in parts], since)
        return Series(found.segments, found.steps, found.values[:, 0])

    def follow(self, *, from_start: bool = True) -> Follower:
        """For live viewers: `look()` on what comes back gives what is new since the last one."""
        return Follower(self.path, from_start)

    def _last_steps(self, phase: Phase | None, only_newest: bool = False) -> list[Step]:
        """The last step of every stream."""
        with look(self.path) as database:
            streams = vitals_streams(database, phase)
            newest = max((stream.segment.id for stream in streams), default=None)
            if only_newest:
                streams = [stream for stream in streams if stream.segment.id == newest]
            lasts = [last_record(database, stream) for stream in streams]
        return [step for chunk in lasts if chunk is not None for step in chunk.unpacked()]

    def _unpacked(self, stream: Stream) -> Iterator[Step]:
        most = max(1, AT_ONCE // max(stream.heads, 1))
        seen = 0
        while True:
            with look(self.path) as database:
                chunks = read_chunks(database, stream, from_record=seen, most_records=most)
            for chunk in chunks:
                yield from chunk.unpacked()
                seen = chunk.end
            if not chunks:
                return


class _Part:
    """One field of one stream, all layers side by side."""

    def __init__(self, stream: Stream, chunks: Sequence[Chunk], values: np.ndarray) -> None:
        self.stream, self.values = stream, values
        self.steps = np.concatenate([np.empty(0, np.int64), *(chunk.steps for chunk in chunks)])
        self.segments = np.full(len(self.steps), stream.segment.id)
        times = [chunk.times for chunk in chunks if chunk.times is not None]
        self.times = np.concatenate([np.empty(0), *times]) if stream.layers else None

    @staticmethod
    def of(chunks: list[Chunk], stream: Stream, field: str) -> "_Part":
        if chunks:
            return _Part(stream, chunks, joined(chunks, (field,))[field])
        return _Part(stream, [], np.empty((0, stream.width), np.float32))

    def has(self, layer: str) -> bool:
        return self.stream.columns_of(layer) is not None

    def of_layer(self, layer: str) -> np.ndarray:
        return self.values[:, self.stream.columns_of(layer)]


def _check_field(field: str, streams: list[Stream]) -> None:
    fields = dict.fromkeys((*FLOAT_FIELDS, "passes", *COUNT_FIELDS))
    fields |= dict.fromkeys(name for s in streams for name in (*s.floats, *s.counts))
    if field not in fields:
        raise NoSuchSeries(f"there is no vital {field!r}; there are {', '.join(fields)}")


def _by_layer(parts: list[_Part], since: int | None) -> dict[str, Series]:
    layers = dict.fromkeys(layer for part in parts for layer, _ in part.stream.layers)
    return {
        layer: _of_layer([part for part in parts if part.has(layer)], layer, since)
        for layer in layers
    }


def _nothing(chunks: Sequence[Chunk], stream: Stream) -> np.ndarray:
    """The place of values that nobody asked for; it takes no memory."""
    shape = (sum(map(len, chunks)), stream.heads)
    return np.broadcast_to(np.float32(np.nan), shape)


def _of_layer(parts: list[_Part], layer: str, since: int | None) -> Series:
    return _in_order(parts, [part.of_layer(layer) for part in parts], since)


def _in_order(parts: list[_Part], values: list[np.ndarray], since: int | None) -> Series:
    """By segments, then by steps; without a copy where that is how they lie."""
    if not parts:
        nothing = np.empty(0, np.int64)
        return Series(nothing, nothing, np.empty((0, 1)))
    segments = _one_or_joined([part.segments for part in parts])
    steps = _one_or_joined([part.steps for part in parts])
    width = max(part.shape[1] for part in values)
    padded = [
        part
        if part.shape[1] == width
        else np.pad(
            part.astype(np.float64),
            ((0, 0), (0, width - part.shape[1])),
            constant_values=np.nan,
        )
        for part in values
    ]
    times = [part.times for part in parts if part.times is not None]
    found = Series(
        segments, steps, _one_or_joined(padded), _one_or_joined(times) if times else None
    )
    if since is not None:
        found = found.at(np.flatnonzero(found.steps > since))
    order = np.lexsort((found.steps, found.segments))
    in_order = bool((order[1:] > order[:-1]).all())
    return found if in_order else found.at(order)


def _one_or_joined(arrays: list[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
