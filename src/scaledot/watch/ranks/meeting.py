"""The other ranks of the job, and a group of gloo's that belongs to the watch alone.

The user's groups, their streams and the count of them stay untouched: the group is made from a copy
of the store that the job met at, and never registered. Nobody waits for a rank that has no watch:
the ranks leave their names in the store first, and whoever misses one says for all of them that
each goes alone.
"""

import ctypes
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

LONGEST = 60.0  # seconds that a rank may be waited for; less where the user's group has less
# Seconds, once: all ranks have just ended the same step, if they all watch. To go apart by mistake
# would cost more than a pause.
PRESENCE = 20.0
TOGETHER = "together"
# None where torch was built without. Asked in every step, so not through functions of torch's.
C10D: Any = dist.distributed_c10d if dist.is_available() else None


class World(NamedTuple):
    rank: int
    size: int


def world() -> World | None:
    """Return this process's place among the ranks; None where there is nobody else."""
    if C10D is None or C10D._world.default_pg is None:
        return None
    if dist.get_backend() in ("fake", "threaded"):  # ranks that are no processes
        return None
    here = World(dist.get_rank(), dist.get_world_size())
    return here if here.size > 1 else None


class Meeting:
    """Raises Absent where ranks are missing, RuntimeError where no group can be made."""

    def __init__(self, here: World, patience: float) -> None:
        """patience: seconds that the others may take to come here."""
        self.here = here
        self.timeout = min(LONGEST, _timeout())
        # A copy: whoever waits at the original would hold up the user's own use of it.
        store: Any = dist.distributed_c10d._get_default_store()
        store = store.clone()
        everything = dist.PrefixStore("scaledot/watch", store)
        everything.set_timeout(timedelta(seconds=self.timeout))
        # The next meeting of this job, counted where all see it: a rank may have had a watch more.
        number = int(everything.compare_set("meeting", "", "0"))
        self._store = dist.PrefixStore(str(number), everything)
        try:
            self._meet(min(patience, self.timeout))
        finally:
            everything.compare_set("meeting", str(number), str(number + 1))
        group = dist.PrefixStore("group", self._store)
        self._group: Any = dist.ProcessGroupGloo(
            group, here.rank, here.size, timedelta(seconds=self.timeout)
        )

    def gather(self, own: bytes, size: int) -> "Gather":
        """Everybody's bytes, padded to `size`; all ranks must ask for the same size."""
        sent = torch.zeros(size, dtype=torch.uint8, device="cpu")
        sent[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8) if own else 0
        room = torch.empty(self.here.size, size, dtype=torch.uint8, device="cpu")
        return Gather(self._group.allgather([list(room)], [sent]), sent, room)

    def silent(self, step: int, patience: float = 1.0) -> list[int]:
        """Ranks that do not say, in the store, that they miss somebody too."""
        missing = list(range(self.here.size))
        try:
            self._store.set_timeout(timedelta(seconds=patience))
            self._store.set(f"alive{self.here.rank}", str(step))
            end = time.monotonic() + patience
            while missing and time.monotonic() < end:
                missing = [rank for rank in missing if not self._store.check([f"alive{rank}"])]
                time.sleep(0.02)
        except Exception:  # the store may have been with the rank that is gone
            return []
        return missing

    def forsake(self) -> None:
        """Leave the group as it is: its destructor would wait for messages that never come."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))

    def _meet(self, patience: float) -> None:
        own, size = self.here
        self._store.set(f"rank{own}", "here")
        number, end = self._store.add("present", 1), time.monotonic() + patience
        while number < size and time.monotonic() < end:
            time.sleep(0.005)
            number = self._store.add("present", 0)
        verdict = TOGETHER if number >= size else _listed(self._missing())
        # The first to say decides for all: they must not believe different things.
        verdict = self._store.compare_set("verdict", "", verdict).decode()
        if verdict != TOGETHER:
            raise Absent(verdict)

    def _missing(self) -> list[int]:
        return [rank for rank in range(self.here.size) if not self._store.check([f"rank{rank}"])]


class Absent(Exception):
    """Names the ranks that have no watch."""


class Gather:
    """An all-gather on its way."""

    def __init__(self, work: Any, sent: Tensor, room: Tensor) -> None:
        self._work, self._sent, self._room = work, sent, room  # alive until it has ended

    @property
    def done(self) -> bool:
        return self._work.is_completed()

    def result(self) -> list[bytes]:
        """Raises RuntimeError where a rank is gone."""
        self._work.wait()
        return [row.numpy().tobytes() for row in self._room]

    def forsake(self) -> None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._work))


def _timeout() -> float:
    try:
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
        return max(backend.options._timeout.total_seconds(), 1.0)
    except (AttributeError, RuntimeError):  # a group without a backend for the CPU
        return LONGEST


def _listed(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'' if len(ranks) == 1 else 's'} {named}"
