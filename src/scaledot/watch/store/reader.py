"""`RunReader`: a run as a viewer sees it, while it is written and after."""

import heapq
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from scaledot.measure import COUNT_FIELDS, FLOAT_FIELDS
from scaledot.watch.reading import PHASES, Phase, RunAttributes
from scaledot.watch.store.follower import Follower
from scaledot.watch.store.looking import look
from scaledot.watch.store.records import Chunk, Segment, Series, Step, Stream, together
from scaledot.watch.store.tables import (
    CHUNK_COLUMNS,
    last_chunk,
    read_segments,
    read_streams,
    vitals_streams,
)

AT_ONCE = 32  # chunks fetched in one look: about a megabyte


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

    def layers(self, phase: Phase | None = None) -> dict[str, int]:
        """Every layer that was read and its number of heads, in the order of the model."""
        with look(self.path) as database:
            streams = vitals_streams(database, phase)
        return {layer: heads for stream in streams for layer, heads in stream.layers}

    def steps(self, phase: Phase | None = None) -> Iterator[Step]:
        """Every step: segment after segment, then in order of steps, training before evaluation."""
        with look(self.path) as database:
            streams = vitals_streams(database, phase)
        for segment in sorted({stream.segment.id for stream in streams}):
            parts = [self._unpacked(stream) for stream in streams if stream.segment.id == segment]
            in_order = heapq.merge(*parts, key=lambda s: (s.step, PHASES.index(s.phase)))
            yield from together(in_order)

    def latest(self, phase: Phase | None = "train") -> Step | None:
        """The last step that is on the disk; None before the first."""
        with look(self.path) as database:
            streams = vitals_streams(database, phase)
            newest = max((stream.segment.id for stream in streams), default=None)
            ends = [last_chunk(database, s) for s in streams if s.segment.id == newest]
        lasts = [s for c in ends if c is not None for s in c.since(len(c) - 1).unpacked()]
        last = max(lasts, key=lambda step: (step.time, step.step), default=None)
        if last is None:
            return None
        same = (step for step in lasts if step[:3] == last[:3])
        return next(together(same))

    def series(self, layer: str, head: int, field: str, phase: Phase = "train") -> Series:
        """One vital of one head over the run; values are float64 [n]."""
        every = self.heads(layer, field, phase)
        if not 0 <= head < every.values.shape[1]:
            number = every.values.shape[1]
            raise ValueError(f"head {head} of layer {layer!r}: it has heads 0 to {number - 1}")
        return Series(every.segments, every.steps, every.values[:, head])

    def heads(self, layer: str, field: str, phase: Phase = "train") -> Series:
        """One vital of every head of a layer; values are float64 [n, heads].

        NaN where a segment had fewer heads, or was written before this vital existed.
        """
        with look(self.path) as database:
            streams = vitals_streams(database, phase)
        known = {name: None for stream in streams for name, _ in stream.layers}
        streams = [s for s in streams if layer in dict(s.layers)]
        if not streams:
            there_are = ", ".join(known) or "none yet"
            raise ValueError(f"no {phase} readings of layer {layer!r}; layers: {there_are}")
        fields = dict.fromkeys((*FLOAT_FIELDS, "passes", *COUNT_FIELDS))
        fields |= dict.fromkeys(n for s in streams for n in s.segment.float_fields)
        fields |= dict.fromkeys(n for s in streams for n in s.segment.count_fields)
        if field not in fields:
            raise ValueError(f"there is no vital {field!r}; there are {', '.join(fields)}")
        return self._series(streams, lambda chunk: chunk.vital(layer, field))

    def scalar_names(self) -> list[str]:
        with look(self.path) as database:
            streams = read_streams(database)
        return list(dict.fromkeys(name for stream in streams for name in stream.names))

    def scalars(self, name: str) -> Series:
        """One scalar over the run (`loss`, `learning_rate`, ...), empty if it was never written."""
        with look(self.path) as database:
            every = read_streams(database)
        streams = [stream for stream in every if name in stream.names]
        series = self._series(
            streams, lambda chunk: chunk.data[:, [chunk.stream.names.index(name)]]
        )
        return Series(series.segments, series.steps, series.values[:, 0])

    def follow(self, *, from_start: bool = True) -> Follower:
        """For live viewers: `look()` on what comes back gives what is new since the last one."""
        return Follower(self.path, from_start)

    def _series(self, streams: list[Stream], values: Callable[[Chunk], np.ndarray]) -> Series:
        chunks = [chunk for stream in streams for chunk in self._chunks(stream)]
        if not chunks:
            nothing = np.empty(0, np.int64)
            return Series(nothing, nothing, np.empty((0, 1)))
        segments = np.concatenate([np.full(len(c), c.stream.segment.id) for c in chunks])
        steps = np.concatenate([chunk.steps for chunk in chunks])
        parts = [values(chunk) for chunk in chunks]
        width = max(part.shape[1] for part in parts)
        padded = [
            np.pad(part, ((0, 0), (0, width - part.shape[1])), constant_values=np.nan)
            for part in parts
        ]
        order = np.lexsort((steps, segments))
        return Series(segments[order], steps[order], np.concatenate(padded)[order])

    def _unpacked(self, stream: Stream) -> Iterator[Step]:
        for chunk in self._chunks(stream):
            yield from chunk.unpacked()

    def _chunks(self, stream: Stream) -> Iterator[Chunk]:
        last = -1
        while True:
            with look(self.path) as database:
                rows = database.execute(
                    f"SELECT {CHUNK_COLUMNS} FROM chunk"
                    " WHERE stream = ? AND id > ? ORDER BY id LIMIT ?",
                    (stream.id, last, AT_ONCE),
                ).fetchall()
            for row in rows:
                yield Chunk.of(row, stream)
            if len(rows) < AT_ONCE:
                return
            last = rows[-1][0]
