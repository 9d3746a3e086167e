"""A case after it was measured: both sides' samples, and the verdict."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from scaledot.bench import clock, memory
from scaledot.bench.cases import Case
from scaledot.bench.clock import Samples
from scaledot.bench.workload import read


@dataclass(frozen=True)
class Outcome:
    """Samples in milliseconds, or MiB where memory was measured."""

    case: Case
    ours: Samples
    peer: Samples

    @property
    def unit(self) -> str:
        return "ms" if self.case.measures == "time" else "MiB"

    @property
    def ratio(self) -> float:
        """Median of ours over the median of the peer's."""
        return self.ours.median / self.peer.median

    @property
    def paired_ratio(self) -> float:
        """Median over the rounds of ours / peer: both sides of a pair saw the same machine."""
        pairs = zip(self.ours.values, self.peer.values, strict=True)
        return statistics.median(ours / peer for ours, peer in pairs)

    @property
    def measured(self) -> float:
        return self.case.quantity.of(self.ours.median, self.peer.median)

    @property
    def holds(self) -> bool | None:
        """None: there is no bar."""
        return None if self.case.bar is None else self.case.bar.holds(self.measured)


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
    return _scaled(seconds["ours"], 1e3), _scaled(seconds["peer"], 1e3)


def _weigh(case: Case, repeats: int, after_round: Callable[[], None]) -> tuple[Samples, Samples]:
    ours, peer = [], []
    for _ in range(repeats):
        peer.append(memory.peak_extra_bytes(case.peer.attend, case.workload))
        ours.append(memory.peak_extra_bytes(case.ours.attend, case.workload))
        after_round()
    return _scaled(Samples(tuple(ours)), 2**-20), _scaled(Samples(tuple(peer)), 2**-20)


def _scaled(samples: Samples, factor: float) -> Samples:
    return Samples(tuple(value * factor for value in samples.values))
