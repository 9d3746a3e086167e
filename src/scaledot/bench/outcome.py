"""A case after it was measured: both sides' samples, and the verdict."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from scaledot.bench import clock, memory
from scaledot.bench.cases import Case, Contender
from scaledot.bench.clock import Samples
from scaledot.bench.workload import read

UNITS = {"time": "ms", "memory": "MiB", "row memory": "B/row"}


@dataclass(frozen=True)
class Outcome:
    """Samples in `unit`; None for a side that is not there, and then note says why."""

    case: Case
    ours: Samples | None
    peer: Samples | None
    note: str = ""

    @property
    def unit(self) -> str:
        return UNITS[self.case.measures]

    @property
    def ratio(self) -> float | None:
        """Median of ours over the median of the peer's; None where that is nothing."""
        if self.ours is None or self.peer is None or self.peer.median == 0:
            return None
        return self.ours.median / self.peer.median

    @property
    def paired_ratio(self) -> float | None:
        """Median over the rounds of ours / peer: both sides of a pair saw the same machine."""
        if self.ours is None or self.peer is None or 0 in self.peer.values:
            return None
        pairs = zip(self.ours.values, self.peer.values, strict=True)
        return statistics.median(ours / peer for ours, peer in pairs)

    @property
    def measured(self) -> float | None:
        if self.ours is None or self.peer is None:
            return None
        return self.case.quantity.of(self.ours.median, self.peer.median)

    @property
    def holds(self) -> bool | None:
        """None: there is no bar, or nobody to hold against it. Our own absence clears no bar."""
        if self.case.bar is None:
            return None
        if self.measured is None:
            sides = ((self.case.ours, self.ours), (self.case.peer, self.peer))
            foreign = all(who.foreign for who, samples in sides if samples is None)
            return None if foreign else False
        return self.case.bar.holds(self.measured)

    def tflops(self, side: Contender, samples: Samples | None) -> float | None:
        """Floating-point operations a second, in 1e12, by the convention of the literature."""
        if samples is None or self.case.measures != "time" or not side.work:
            return None
        return self.case.workload.flops * side.work / samples.median * 1e-9


def measure(case: Case, repeats: int, after_round: Callable[[], None] = lambda: None) -> Outcome:
    """Samples of both sides, in turn."""
    weigh_or_time = _weigh if case.measures == "memory" else _time
    ours, peer = weigh_or_time(case, repeats, after_round)
    return Outcome(case, ours, peer)


def _time(case: Case, repeats: int, after_round: Callable[[], None]) -> tuple[Samples, Samples]:
    inputs = case.workload.make()
    ours, peer = case.ours.attend, case.peer.attend
    seconds = clock.race(
        {"peer": lambda: read(peer(inputs)), "ours": lambda: read(ours(inputs))},
        repeats,
        case.calls,
        stopwatch=case.stopwatch,
        after_round=after_round,
    )
    return seconds["ours"].times(1e3), seconds["peer"].times(1e3)


def _weigh(case: Case, repeats: int, after_round: Callable[[], None]) -> tuple[Samples, Samples]:
    ours, peer = [], []
    for _ in range(repeats):
        peer.append(memory.peak_extra_bytes(case.peer.attend, case.workload))
        ours.append(memory.peak_extra_bytes(case.ours.attend, case.workload))
        after_round()
    return Samples(tuple(ours)).times(2**-20), Samples(tuple(peer)).times(2**-20)
