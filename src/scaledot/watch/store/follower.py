"""`Follower`: what is new in a run since the last look."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from scaledot.watch.reading import Scalar
from scaledot.watch.store.looking import look
from scaledot.watch.store.records import Chunk, Segment, Step, together
from scaledot.watch.store.tables import CHUNK_COLUMNS, read_name, read_segments, read_streams


class News(NamedTuple):
    """steps and scalars are new; segments are all there are, as they stand now."""

    steps: list[Step]
    scalars: list[Scalar]
    segments: list[Segment]
    replaced: bool  # another run has taken the file's place: forget what was shown before

    def __bool__(self) -> bool:
        return bool(self.steps or self.scalars or self.replaced)


class Follower:
    """Made by `RunReader.follow`."""

    def __init__(self, path: Path, from_start: bool) -> None:
        self._path = path
        self._run: str | None = None
        self._revision = 0
        self._seen: dict[int, int] = {}  # records seen of each chunk: the last ones still grow
        if not from_start:
            self._skip()

    def look(self) -> News:
        """Raises StoreError where the file is gone."""
        with look(self._path) as database:
            replaced = self._recognise(read_name(database))
            segments = list(read_segments(database).values())
            rows = database.execute(
                f"SELECT stream, revision, {CHUNK_COLUMNS} FROM chunk"
                " WHERE revision > ? ORDER BY id",
                (self._revision,),
            ).fetchall()
            streams = {stream.id: stream for stream in read_streams(database)} if rows else {}
        news = []
        for stream, revision, *columns in rows:
            chunk = Chunk.of(columns, streams[stream])
            news.append(chunk.since(self._seen.get(chunk.id, 0)))
            self._seen[chunk.id] = len(chunk)
            self._revision = max(self._revision, revision)
        return News(_steps(news), _scalars(news), segments, replaced)

    def _recognise(self, run: str) -> bool:
        """Is it another run than last time? Then all of it is new."""
        replaced = self._run not in (None, run)
        if replaced:
            self._revision, self._seen = 0, {}
        self._run = run
        return replaced

    def _skip(self) -> None:
        """Take all that is there as seen."""
        with look(self._path) as database:
            self._recognise(read_name(database))
            for id_, revision, records in database.execute(
                "SELECT id, revision, records FROM chunk"
            ):
                self._seen[id_] = records
                self._revision = max(self._revision, revision)


def _steps(chunks: Iterable[Chunk]) -> list[Step]:
    steps = [s for c in chunks if c.stream.layers for s in c.unpacked()]
    steps.sort(key=lambda step: (step.segment, step.step, step.time))
    return list(together(iter(steps)))


def _scalars(chunks: Iterable[Chunk]) -> list[Scalar]:
    return [
        Scalar(step, name, value)
        for chunk in chunks
        if chunk.stream.names
        for step, values in zip(chunk.steps.tolist(), chunk.data.tolist(), strict=True)
        for name, value in zip(chunk.stream.names, values, strict=True)
    ]
