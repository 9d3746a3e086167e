"""The clock: contenders take turns, so that drift of the machine hits all of them alike.

It knows nothing of attention or of devices. A stopwatch measures one call at a time; a GPU, which
runs behind the host, has a race of its own (gpu/clock.py).
"""

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

Call = Callable[[], object]
Stopwatch = Callable[[Call, int], float]  # a call and how often to make it -> seconds a call

WARM_UP_ROUNDS = 2  # or as many as are measured, if fewer


@dataclass(frozen=True)
class Samples:
    """What was measured of one contender, in the order of the rounds."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def p20(self) -> float:
        return self._quintiles[0]

    @property
    def p80(self) -> float:
        return self._quintiles[3]

    @property
    def _quintiles(self) -> list[float]:
        if len(self.values) == 1:
            return [self.values[0]] * 4
        return statistics.quantiles(self.values, n=5, method="inclusive")

    def times(self, factor: float) -> "Samples":
        """In another unit."""
        return Samples(tuple(value * factor for value in self.values))


def wall_seconds(call: Call, calls: int) -> float:
    start = perf_counter()
    for _ in range(calls):
        call()
    return (perf_counter() - start) / calls


def race(
    contenders: Mapping[str, Call],
    repeats: int,
    calls: int = 1,
    *,
    stopwatch: Stopwatch = wall_seconds,
    after_round: Callable[[], None] = lambda: None,
) -> dict[str, Samples]:
    """Seconds a call: `repeats` rounds of one sample each, another contender first each time."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    with collector_off():
        for _ in range(min(WARM_UP_ROUNDS, repeats)):
            for call in contenders.values():
                stopwatch(call, calls)
        for number in range(repeats):
            for name in rotated(list(contenders), number):
                seconds[name].append(stopwatch(contenders[name], calls))
            after_round()  # progress is drawn here: outside the stopwatch
    return {name: Samples(tuple(values)) for name, values in seconds.items()}


def rotated(names: list[str], by: int) -> list[str]:
    start = by % len(names)
    return names[start:] + names[:start]


@contextmanager
def collector_off() -> Iterator[None]:
    """The garbage collector runs before the race, not during it."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
