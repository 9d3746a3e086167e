"""The clock of a GPU: events around each call, contenders in turn, the host always ahead.

A GPU runs behind the host. Had it to wait for the host between two launches of one call, the time
would be the host's. So each round begins with a pause on the GPU during which the host queues the
whole round; before each call a buffer larger than the L2 cache is written, so that nobody finds
another's tensors there. The host checks that the pause was long enough and lengthens it; a
contender that waits for the GPU inside its own call is found by that, gets rounds of its own so
that it slows nobody else, and is named.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch

from scaledot.bench.clock import Call, Samples, collector_off, rotated

WARM_UP_ROUNDS = 3
FLUSHED_BYTES = 256 * 2**20  # an H200 has 60 MB of L2
CYCLES_A_SECOND = 2.0e9  # no less than the clock of the GPU, so that a pause is not too short
SHORTEST_PAUSE, LONGEST_PAUSE = 1e-4, 0.1  # seconds; no host needs the latter to queue a round


class Event(Protocol):
    def record(self) -> None: ...

    def query(self) -> bool:
        """Whether the GPU has come by."""
        ...

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds."""
        ...


class Device(Protocol):
    """What the clock needs of a GPU."""

    def event(self) -> Event: ...

    def pause(self, seconds: float) -> None: ...

    def flush(self) -> None: ...

    def synchronize(self) -> None: ...


class Cuda:
    """torch's current device and stream."""

    def __init__(self) -> None:
        self._larger_than_cache = torch.empty(FLUSHED_BYTES // 4, dtype=torch.int32, device="cuda")

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)

    def pause(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * CYCLES_A_SECOND))

    def flush(self) -> None:
        self._larger_than_cache.zero_()

    def synchronize(self) -> None:
        torch.cuda.synchronize()


class Race(NamedTuple):
    """Seconds a call; and who waits for the GPU inside a call, host time included."""

    samples: dict[str, Samples]
    waits: frozenset[str]


class Round(NamedTuple):
    seconds: dict[str, float]
    queued_in: float  # seconds of the host
    overtaken_at: str | None  # during this contender's call the GPU had caught up


@dataclass
class Pace:
    """How long the GPU pauses before a round, learnt on the way; and who waits for it anyhow."""

    at_first: float
    pause: float
    waits: set[str] = field(default_factory=set)

    def overtaken(self, name: str) -> None:
        if self.pause < LONGEST_PAUSE:
            self.pause = min(max(2 * self.pause, SHORTEST_PAUSE), LONGEST_PAUSE)
        else:  # no pause is long enough: the call itself waits for the GPU
            self.waits.add(name)
            self.pause = self.at_first


def race(
    contenders: Mapping[str, Call],
    repeats: int,
    device: Device,
    *,
    after_round: Callable[[], None] = lambda: None,
) -> Race:
    """`repeats` rounds of one sample each, another contender first each time."""
    if not contenders:
        return Race({}, frozenset())
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    with collector_off():
        for _ in range(WARM_UP_ROUNDS):
            for call in contenders.values():
                call()
        device.synchronize()
        first = 1.5 * _round(list(contenders), contenders, device, 0.0).queued_in
        pace = Pace(first, first)
        for number in range(repeats):
            names = rotated(list(contenders), number)
            for name, value in _turn(names, contenders, device, pace).items():
                seconds[name].append(value)
            after_round()  # progress is drawn here: outside of all events
    samples = {name: Samples(tuple(values)) for name, values in seconds.items()}
    return Race(samples, frozenset(pace.waits))


def _turn(
    names: Sequence[str], contenders: Mapping[str, Call], device: Device, pace: Pace
) -> dict[str, float]:
    """A round that the GPU did not overtake; those that wait for it come after the others."""
    while True:
        together = [name for name in names if name not in pace.waits]
        done = _round(together, contenders, device, pace.pause)
        if done.overtaken_at is None:
            break
        pace.overtaken(done.overtaken_at)
    seconds = dict(done.seconds)
    for name in names:
        if name in pace.waits:
            seconds |= _round([name], contenders, device, 0.0).seconds
    return seconds


def _round(
    names: Sequence[str], contenders: Mapping[str, Call], device: Device, pause: float
) -> Round:
    """One sample of each, queued as a whole."""
    overtaken_at = None
    begun = perf_counter()
    if pause:
        device.pause(pause)
    paused = device.event()
    paused.record()
    events: dict[str, tuple[Event, Event]] = {}
    for name in names:
        device.flush()
        start, end = events[name] = device.event(), device.event()
        start.record()
        contenders[name]()
        end.record()
        if overtaken_at is None and paused.query():
            overtaken_at = name
    queued_in = perf_counter() - begun
    device.synchronize()
    seconds = {name: start.elapsed_time(end) * 1e-3 for name, (start, end) in events.items()}
    return Round(seconds, queued_in, overtaken_at)
