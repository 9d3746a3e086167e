"""The job that a watch is part of: alone, together with the other ranks, or apart from them.

Together, a reading is sent round when its step has ended and is handed on a fixed number of steps
later, at the same step on every rank: what follows from it (an alarm that ends the run, how often
to look) then happens on all ranks at once. It has arrived long before; only where it has not is it
waited for, and never longer than the group's timeout. When a rank is gone, is at another step or
does not answer, one line says so and every rank goes on by itself; rank 0 alone still writes.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from scaledot.watch.ranks import MODES, Mode, meeting
from scaledot.watch.ranks.exchange import Bundle, Exchange, OutOfStep
from scaledot.watch.ranks.layout import Layout
from scaledot.watch.ranks.meeting import Absent, Gather, Meeting, World, world
from scaledot.watch.ranks.merge import readings_of, scalars_of, wish_of
from scaledot.watch.ranks.parcel import Parcel
from scaledot.watch.ranks.told import Placing, numbered, ranks_along, ranks_in
from scaledot.watch.reading import Reading, Scalar

log = logging.getLogger("scaledot.watch")

# Steps between the end of a step and the moment at which its reading is handed on. A host that
# runs ahead of its device is stopped only where it is further ahead than this.
LAG = 4
FOREVER = 2**62
PATIENCE = 10.0  # seconds for the last reading: who crashed never sends one


class Traffic(NamedTuple):
    """What the ranks of a job have told each other."""

    world: int
    rank: int
    merged: bool  # False: each rank for itself
    readings: int = 0
    collectives: int = 0
    bytes: int = 0  # that every rank received
    collectives_a_reading: int = 0  # of the last usual one
    bytes_a_reading: int = 0
    apart: str = ""  # why the ranks go on by themselves

    def note(self) -> dict[str, Any]:
        """As the store keeps it."""
        names = ("world", "bytes_a_reading", "collectives_a_reading", "apart")
        return {name: getattr(self, name) for name in names if name != "apart" or self.apart}

    def words(self) -> str:
        """One line for who looks at the run; "" for a process by itself."""
        if self.world == 1:
            return ""
        if self.apart:
            return f"{self.world} ranks, each by itself: {self.apart}"
        if not self.readings:
            return f"{self.world} ranks"
        number = self.collectives_a_reading
        collectives = f"{number} collective{'' if number == 1 else 's'}"
        return f"{self.world} ranks, {collectives} of {self.bytes_a_reading:,} bytes a reading"


class Arrived(NamedTuple):
    readings: list[Reading]
    scalars: list[Scalar]
    wish: int  # how often all ranks look from now on; 0: as before


class Job:
    """mode: "merge" the readings of all ranks, or keep them "apart"."""

    def __init__(
        self, mode: Mode, tensor_parallel: Any, pipeline_parallel: Any, names: Callable[[], Any]
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"ranks={mode!r}; use {' or '.join(map(repr, MODES))}")
        self.together = False
        self.traffic = Traffic(1, 0, False)
        self._mode = mode
        self._tensor, self._pipeline = ranks_in(tensor_parallel), ranks_in(pipeline_parallel)
        self._names = names  # of all modules that the watch knows
        self._settled = False  # whether there are other ranks is known
        self._was_together = False
        self._meeting: Meeting | None = None
        self._exchange: Exchange | None = None
        self._placing = Placing()
        self._left: list[Parcel] = []  # that no other rank has seen
        self._all_over = False  # every rank's watch has ended with the last reading
        self._lock = threading.Lock()

    @property
    def silent(self) -> bool:
        """Whether another rank writes and speaks for this one."""
        return self._was_together and self.traffic.rank != 0

    @property
    def apart(self) -> bool:
        """Whether this rank measures for itself, and will."""
        return self._mode == "apart" or (self._settled and not self.together)

    @property
    def alone(self) -> bool:
        """Whether there never was another rank to exchange readings with."""
        return self._exchange is None

    def join(self, patience: float | None = None) -> bool:
        """Find the other ranks at the end of a step, once there are any; return `alone`."""
        if not (self._settled or self._mode == "apart") and (here := world()) is not None:
            self._meet(here, patience)
        return self._exchange is None

    def _meet(self, here: World, patience: float | None) -> None:
        self._settled = True
        self.traffic = Traffic(here.size, here.rank, False)
        try:
            self._meeting = Meeting(here, meeting.PRESENCE if patience is None else patience)
        except Absent as absent:
            hint = "make it on every rank, or say ranks='apart'"
            self._say_alone(here, f"{absent} came with no watch; {hint}")
        except Exception as error:
            self._say_alone(here, f"no group of gloo could be made: {error}")
        else:
            self._pipeline = self._pipeline or ranks_along("pp")
            self._exchange = Exchange(self._meeting, here.rank, here.size)
            self.together = self._was_together = True
            self.traffic = self.traffic._replace(merged=True)

    def put(self, parcel: Parcel) -> None:
        assert self._exchange is not None
        self._exchange.put(parcel)

    def told(self) -> Layout:
        """What every parcel of this rank says besides its layers."""
        spans = numbered(self._names()) if self._pipeline else ()
        return Layout((), self._tensor, self._pipeline, spans)

    def take(self, step: int, all_of_it: bool = False, patience: float = PATIENCE) -> list[Arrived]:
        """What is handed on at the end of a step; all_of_it: whatever there is, after `patience`.

        Called by a thread too where a run ends badly: who finds the other at work has nothing.
        """
        if self._exchange is None or not self._lock.acquire(timeout=1.0):
            return []
        try:
            return self._taken(step if all_of_it else step - LAG, all_of_it, patience)
        finally:
            self._lock.release()

    def leave(self) -> None:
        """Wait until every rank has written what it has: who starts them may end them all when
        the first one ends."""
        if self._all_over and self._meeting is not None:
            try:
                gather = self._meeting.gather(b"", 1)
                end = time.monotonic() + PATIENCE
                while not gather.done and time.monotonic() < end:
                    time.sleep(0.001)
                if not gather.done:
                    self._forsake(gather)
            except RuntimeError:
                pass  # somebody has ended already
        self._meeting = self._exchange = None

    # ---------------------------------------------------------------------------------------------

    def _taken(self, until: int, all_of_it: bool, patience: float) -> list[Arrived]:
        exchange = self._exchange
        assert exchange is not None
        if self.together:
            assert self._meeting is not None
            limit = patience if all_of_it else self._meeting.timeout
            try:
                if not exchange.wait(until, time.monotonic() + limit):
                    self._break(until, f"no answer within {limit:.0f} s")
            except OutOfStep as error:
                self._break(until, f"the ranks are out of step: {error}", all_there=True)
            except Exception as error:
                self._break(until, _words(error))
        found = self._handed(exchange.taken(until))
        if not self.together:  # no other rank waits for the same step: all of it, in its order
            found += self._handed(exchange.taken(FOREVER))
        left, self._left = self._left, []
        found += [Arrived(parcel.readings(), parcel.numbers(), 0) for parcel in left]
        return found

    def _handed(self, taken: list[tuple[Parcel, Bundle]]) -> list[Arrived]:
        found = []
        for parcel, bundle in taken:
            self._count(bundle.collectives, bundle.bytes)
            readings = readings_of(bundle, self._placing)
            found.append(Arrived(readings, scalars_of(bundle), wish_of(bundle)))
            if bundle.over and not parcel.last and self.together:
                why = f"the watch of rank {bundle.over[0]} has ended"
                self._break(parcel.step, why, all_there=True)
            elif parcel.last:
                self._all_over = len(bundle.over) == len(bundle.parts)
                self.together = False
        return found

    def _count(self, collectives: int, size: int) -> None:
        before = self.traffic
        usual = before.collectives_a_reading != 1 or collectives == 1
        self.traffic = before._replace(
            readings=before.readings + 1,
            collectives=before.collectives + collectives,
            bytes=before.bytes + size,
            collectives_a_reading=collectives if usual else before.collectives_a_reading,
            bytes_a_reading=size if usual else before.bytes_a_reading,
        )

    def _break(self, step: int, why: str, all_there: bool = False) -> None:
        assert self._exchange is not None
        assert self._meeting is not None
        self.together = False
        self._left += self._exchange.abandon()
        silent = [] if all_there else self._meeting.silent(step)
        self._meeting.forsake()
        own = self.traffic.rank
        if silent:
            why = f"{why}; nothing is heard of rank {', '.join(map(str, silent[:8]))}"
        step = min((parcel.step for parcel in self._left), default=step)
        reason = f"{why} (rank {own}, step {step})"
        self.traffic = self.traffic._replace(merged=False, apart=reason)
        speaker = min(set(range(self.traffic.world)) - set(silent), default=own)
        if own == speaker:
            log.warning(
                "the watch goes on without the other ranks: %s; readings from step %d on are those "
                "of rank %d alone",
                why,
                step,
                own,
            )

    def _forsake(self, gather: Gather) -> None:
        assert self._meeting is not None
        gather.forsake()
        self._meeting.forsake()

    def _say_alone(self, here: World, why: str) -> None:
        self.traffic = self.traffic._replace(apart=why)
        log.warning("rank %d of %d watches for itself alone: %s", here.rank, here.size, why)


def _words(error: Exception) -> str:
    """gloo's messages begin with a place in its source and end with advice."""
    return str(error).split("] ", 1)[-1].split(". ")[0].strip() or type(error).__name__
