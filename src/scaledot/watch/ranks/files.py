"""Which file a process writes to: the job's for rank 0, one of its own for whoever is alone."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import distributed as dist

from scaledot.watch.alarms.alarm import Alarm
from scaledot.watch.reading import Reading, Scalar


class Silence(Protocol):
    @property
    def silent(self) -> bool: ...


def rank_here() -> int | None:
    """None where nobody has counted the processes."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else None


def file_of(wish: Path, rank: int | None, main: bool) -> Path:
    """The file of a process by itself: each rank and each further process has one of its own."""
    if rank:
        return wish.with_name(f"{wish.stem}.rank{rank}{wish.suffix}")
    if rank is None and not main:
        return wish.with_name(f"{wish.stem}.process{os.getpid()}{wish.suffix}")
    return wish


class RankStore:
    """The store of a rank that is not the first: opened only if the ranks do not come together.

    A job's readings reach rank 0. Processes that were started with a rank and never meet write
    into files of their own.
    """

    def __init__(self, path: Path, opened: Callable[[Path], Any], job: Silence) -> None:
        self._path, self._opened, self._job = path, opened, job
        self._store: Any = None
        self._notes: dict[str, Any] = {}  # what came before the file was open

    def write(self, readings: Sequence[Reading] = (), scalars: Sequence[Scalar] = ()) -> bool:
        if self._job.silent:
            return True
        if self._store is None and readings:
            self._store = self._opened(file_of(self._path, rank_here(), main=True))
            for name, value in self._notes.items():
                self._store.note(name, value)
        return self._store is None or self._store.write(readings, scalars)

    def write_alarms(self, alarms: Sequence[Alarm]) -> None:
        if self._store is not None:
            self._store.write_alarms(alarms)

    def note(self, name: str, value: Any) -> None:
        if self._store is None:
            self._notes[name] = value
        else:
            self._store.note(name, value)

    def flush(self) -> bool:
        return self._store is None or self._store.flush()

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
