"""The clock of a GPU, on a GPU and a host that are two numbers each: how far in time they are."""

import pytest

from scaledot.bench.gpu import clock

FLUSH = 60e-6


class Machine:
    """The GPU works off what the host queues; the host only waits where it is told to."""

    def __init__(self) -> None:
        self.host = self.gpu = 0.0
        self.log: list[str] = []

    def launch(self, host: float, gpu: float) -> None:
        """The host takes its time, then the GPU does what was queued."""
        self.host += host
        self.gpu = max(self.gpu, self.host) + gpu

    def event(self) -> "Mark":
        return Mark(self)

    def pause(self, seconds: float) -> None:
        self.launch(0.0, seconds)
        self.log.append("pause")

    def flush(self) -> None:
        self.launch(5e-6, FLUSH)
        self.log.append("flush")

    def synchronize(self) -> None:
        self.host = self.gpu = max(self.host, self.gpu)

    def contender(self, name: str, *, host: float, gpu: float, waits: bool = False):
        def call() -> None:
            self.log.append(name)
            self.launch(host / 2, gpu / 2)
            if waits:
                self.synchronize()
            self.launch(host / 2, gpu / 2)

        return call


class Mark:
    def __init__(self, machine: Machine) -> None:
        self._machine, self.when = machine, 0.0

    def record(self) -> None:
        self.when = max(self._machine.gpu, self._machine.host)

    def query(self) -> bool:
        return self._machine.host >= self.when

    def elapsed_time(self, end: "Mark") -> float:
        return (end.when - self.when) * 1e3


@pytest.fixture
def machine(monkeypatch):
    made = Machine()
    monkeypatch.setattr(clock, "perf_counter", lambda: made.host)
    return made


def test_the_machine_shows_the_mistake_that_the_clock_avoids(machine):
    start, end = machine.event(), machine.event()
    start.record()
    machine.contender("slow host", host=1e-3, gpu=2e-4)()
    end.record()
    assert start.elapsed_time(end) == pytest.approx(1.1)  # ms: the host's, not the GPU's


def test_a_slow_host_is_not_in_the_time(machine):
    contenders = {
        "ours": machine.contender("ours", host=1e-3, gpu=2e-4),
        "peer": machine.contender("peer", host=1e-5, gpu=3e-4),
    }
    raced = clock.race(contenders, 7, machine)
    assert raced.waits == frozenset()
    assert raced.samples["ours"].values == pytest.approx([2e-4] * 7)
    assert raced.samples["peer"].values == pytest.approx([3e-4] * 7)


@pytest.mark.nightly
def test_a_pause_that_was_too_short_is_lengthened(machine):
    hosts = iter(
        [1e-5] * 8
    )  # compiled code is quick at first, then the host has other things to do

    def call() -> None:
        machine.launch(next(hosts, 2e-3), 1e-4)
        machine.launch(1e-5, 1e-4)

    raced = clock.race({"only": call}, 9, machine)
    assert raced.waits == frozenset()
    assert raced.samples["only"].values == pytest.approx([2e-4] * 9)


@pytest.mark.nightly
def test_a_contender_that_waits_is_named_and_slows_nobody_else(machine):
    contenders = {
        "peer": machine.contender("peer", host=5e-4, gpu=1e-4),
        "waiter": machine.contender("waiter", host=4e-4, gpu=1e-4, waits=True),
        "ours": machine.contender("ours", host=6e-4, gpu=2e-4),
    }
    raced = clock.race(contenders, 5, machine)
    assert raced.waits == {"waiter"}
    assert raced.samples["peer"].values == pytest.approx([1e-4] * 5)
    assert raced.samples["ours"].values == pytest.approx([2e-4] * 5)
    assert len(raced.samples["waiter"].values) == 5
    assert min(raced.samples["waiter"].values) >= 2e-4  # its own waiting is its own time


@pytest.mark.nightly
def test_contenders_take_turns_and_the_cache_is_emptied_before_each(machine):
    contenders = {
        name: machine.contender(name, host=1e-5, gpu=1e-3) for name in ("peer", "ours", "third")
    }
    clock.race(contenders, 3, machine)
    rounds = " ".join(machine.log).split("pause")
    calls = [word for word in rounds[0].split() if word != "flush"]
    assert calls == ["peer", "ours", "third"] * (clock.WARM_UP_ROUNDS + 1)  # and one to learn pace
    assert [part.split() for part in rounds[1:]] == [
        ["flush", "peer", "flush", "ours", "flush", "third"],
        ["flush", "ours", "flush", "third", "flush", "peer"],
        ["flush", "third", "flush", "peer", "flush", "ours"],
    ]


@pytest.mark.nightly
def test_progress_is_drawn_once_a_round(machine):
    drawn = []
    contenders = {"only": machine.contender("only", host=1e-5, gpu=1e-3)}
    clock.race(contenders, 4, machine, after_round=lambda: drawn.append(1))
    assert len(drawn) == 4


def test_nobody_to_race_is_no_error(machine):
    assert clock.race({}, 3, machine).samples == {}
