"""One reading after the other goes round: one all-gather each, unless a rank has something new.

Every rank sends a header and, where they have the size of the reading before, its numbers. The
headers tell all ranks alike what is still missing: lists of layers that somebody does not know
(a second round), numbers that were longer than the room for them (a third). One reading is on its
way at a time, so the ranks' collectives come in the same order.
"""

import time
from collections import deque
from collections.abc import Generator
from typing import NamedTuple, Protocol

from scaledot.watch.ranks.layout import Layout, mark_of
from scaledot.watch.ranks.parcel import SIZE, Contents, Header, Parcel

KNOWN = 16  # lists of layers that are remembered of each rank; all ranks forget alike


class Gather(Protocol):
    @property
    def done(self) -> bool: ...

    def result(self) -> list[bytes]: ...

    def forsake(self) -> None: ...


class Side(Protocol):
    """The group that the watch talks in."""

    def gather(self, own: bytes, size: int) -> Gather: ...


class Bundle(NamedTuple):
    """One reading of all ranks."""

    step: int
    parts: list[Contents]  # rank by rank
    collectives: int
    bytes: int  # that every rank received

    @property
    def over(self) -> list[int]:
        """Ranks whose watch ended with this."""
        return [rank for rank, part in enumerate(self.parts) if part.header.last]


class OutOfStep(Exception):
    """The ranks are not at the same step."""


class Exchange:
    def __init__(self, side: Side, rank: int, size: int) -> None:
        self.side, self.rank, self.size = side, rank, size
        self.waiting: deque[Parcel] = deque()  # the first of them may be on its way
        self._finished: deque[tuple[Parcel, Bundle]] = deque()
        self._known: list[dict[bytes, Layout]] = [{} for _ in range(size)]
        self._room = 0  # bytes for the numbers: what the reading before took
        self._rounds: Generator[Gather, list[bytes], Bundle] | None = None
        self._gather: Gather | None = None
        self._collectives = self._bytes = 0  # of the reading that is on its way
        self._over = False  # a rank's watch has ended: a further round would find nobody there

    def put(self, parcel: Parcel) -> None:
        self.waiting.append(parcel)

    def advance(self, until_step: int = -1) -> None:
        """As far as it goes without waiting for other ranks. Raises what went wrong.

        until_step: numbers of steps up to this are waited for where the device has them still.
        """
        while self.waiting and not self._over:
            if self._rounds is None:
                if not (self.waiting[0].step <= until_step or self.waiting[0].here):
                    return
                self._collectives = self._bytes = 0
                self._rounds = self._go_round(self.waiting[0])
                self._gather = next(self._rounds)
            assert self._gather is not None
            if not self._gather.done:
                return
            try:
                self._gather = self._rounds.send(self._gather.result())
            except StopIteration as end:
                self._rounds = self._gather = None
                self._finished.append((self.waiting.popleft(), end.value))
                self._over = bool(end.value.over)

    def wait(self, until_step: int, end: float) -> bool:
        """Until readings up to a step have gone round, or a watch has ended.

        False: not before `end` (monotonic).
        """
        self.advance(until_step)
        pause = 0.0002
        while not self._over and self.waiting and self.waiting[0].step <= until_step:
            if time.monotonic() >= end:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
            self.advance(until_step)
        return True

    def taken(self, until_step: int) -> list[tuple[Parcel, Bundle]]:
        """What has gone round, oldest first."""
        found = []
        while self._finished and self._finished[0][0].step <= until_step:
            found.append(self._finished.popleft())
        return found

    def abandon(self) -> list[Parcel]:
        """Nobody answers any more: what has not gone round, to be used as it is."""
        if self._gather is not None and not self._gather.done:
            self._gather.forsake()
        self._rounds = self._gather = None
        left, self.waiting = list(self.waiting), deque()
        return left

    def _send(self, own: bytes, size: int) -> Gather:
        self._collectives += 1
        self._bytes += size * self.size
        return self.side.gather(own, size)

    def _go_round(self, parcel: Parcel) -> Generator[Gather, list[bytes], Bundle]:
        layout = parcel.layout().encoded()
        has, payload = parcel.payload()
        header = Header(
            parcel.step, parcel.wish, parcel.last, has, len(layout), len(payload), mark_of(layout)
        )
        fits = payload if len(payload) <= self._room else b""
        texts = yield self._send(header.packed() + fits, SIZE + self._room)
        headers = [Header.read(text) for text in texts]
        _check_steps(headers)
        unknown = [r for r, one in enumerate(headers) if one.mark not in self._known[r]]
        if unknown:
            longest = max(headers[rank].layout for rank in unknown)
            lists = yield self._send(layout if self.rank in unknown else b"", longest)
            for rank in unknown:
                self._learn(rank, lists[rank][: headers[rank].layout])
        longest = max(one.payload for one in headers)
        if longest > self._room:
            payloads = yield self._send(payload, longest)
        else:
            payloads = [text[SIZE:] for text in texts]
        self._room = longest
        parts = [
            Contents.read(one, self._known[rank][one.mark], payloads[rank][: one.payload])
            for rank, one in enumerate(headers)
        ]
        return Bundle(parcel.step, parts, self._collectives, self._bytes)

    def _learn(self, rank: int, encoded: bytes) -> None:
        known = self._known[rank]
        if len(known) >= KNOWN:
            del known[next(iter(known))]
        known[mark_of(encoded)] = Layout.decoded(encoded)


def _check_steps(headers: list[Header]) -> None:
    """A watch that ends may do so at any step."""
    steps = {rank: one.step for rank, one in enumerate(headers) if not one.last}
    if len(set(steps.values())) > 1:
        first = next(iter(steps.values()))
        other = next(rank for rank, step in steps.items() if step != first)
        raise OutOfStep(
            f"rank {next(iter(steps))} is at step {first}, rank {other} at step {steps[other]}"
        )
