"""`Follower`: what is new in a run since the last look."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from scaledot.watch.alarms.alarm import Alarm
from scaledot.watch.reading import Scalar
from scaledot.watch.store.chunks import number_of_records, read_chunks
from scaledot.watch.store.looking import look
from scaledot.watch.store.records import Chunk, Segment, Step, together
from scaledot.watch.store.tables import read_alarms, read_name, read_segments, read_streams


class News(NamedTuple):
    """steps, scalars and alarms are new; segments are all there are, as they stand now."""

    steps: list[Step]
    scalars: list[Scalar]
    segments: list[Segment]
    replaced: bool  # another run has taken the file's place: forget what was shown before
    alarms: tuple[Alarm, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.steps or self.scalars or self.alarms or self.replaced)


class Follower:
    """Made by `RunReader.follow`."""

    def __init__(self, path: Path, from_start: bool) -> None:
        self._path = path
        self._run: str | None = None
        self._seen: dict[int, int] = {}  # records seen of each stream
        self._last_alarm = -1  # its id
        if not from_start:
            self._skip()

    def look(self) -> News:
        """Raises StoreError where the file is gone."""
        with look(self._path) as database:
            replaced = self._recognise(read_name(database))
            segments = read_segments(database)
            news = [
                chunk
                for stream in read_streams(database, segments)
                for chunk in read_chunks(database, stream, from_record=self._seen.get(stream.id, 0))
            ]
            alarms = read_alarms(database, self._last_alarm)
        for chunk in news:
            self._seen[chunk.stream.id] = chunk.end
        self._last_alarm = max(alarms, default=self._last_alarm)
        told = tuple(alarms.values())
        return News(_steps(news), _scalars(news), list(segments.values()), replaced, told)

    def _recognise(self, run: str) -> bool:
        """Is it another run than last time? Then all of it is new."""
        replaced = self._run not in (None, run)
        if replaced:
            self._seen, self._last_alarm = {}, -1
        self._run = run
        return replaced

    def _skip(self) -> None:
        """Take all that is there as seen."""
        with look(self._path) as database:
            self._recognise(read_name(database))
            for stream in read_streams(database):
                self._seen[stream.id] = number_of_records(database, stream)
            self._last_alarm = max(read_alarms(database), default=-1)


def _steps(chunks: Iterable[Chunk]) -> list[Step]:
    steps = [s for c in chunks if c.stream.layers for s in c.unpacked()]
    steps.sort(key=lambda step: (step.segment, step.step, step.time))
    return list(together(iter(steps)))


def _scalars(chunks: Iterable[Chunk]) -> list[Scalar]:
    return [
        Scalar(step, name, value)
        for chunk in chunks
        if chunk.stream.names
        for name in chunk.stream.names
        for step, value in zip(chunk.steps.tolist(), chunk.fields[name][:, 0].tolist(), strict=True)
    ]
