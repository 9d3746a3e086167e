"""One race a workload, cases as pairs of it, whoever is not there named; with stand-ins."""

from dataclasses import replace

import pytest

from scaledot.bench.bars import Bar, Quantity
from scaledot.bench.cases import Case, Contender
from scaledot.bench.clock import Samples
from scaledot.bench.gpu import clock, engine, memory
from scaledot.bench.gpu.apart import Report
from scaledot.bench.gpu.engine import OnGpu
from scaledot.bench.peers import plain
from scaledot.bench.workload import Answer, Workload

LOAD = Workload(2, 3, 37, 16)


def _fails(inputs):
    raise RuntimeError("no such kernel\nand more")


def _wrong(inputs):
    return Answer(plain(inputs).out * 1.1, None)


OURS, OTHER = Contender("ours", plain), Contender("other", lambda inputs: plain(inputs))
PEER = Contender("peer", lambda inputs: plain(inputs), foreign=True)
MISSING = Contender("missing", _fails, foreign=True)
LYING = Contender("lying", _wrong, foreign=True)
OURS_MISSING, OURS_LYING = Contender("ours missing", _fails), Contender("ours lying", _wrong)


def _case(name: str, ours: Contender, peer: Contender, **rest) -> Case:
    return Case(name, LOAD, ours, peer, Quantity.SPEED, Bar(">=", 1.0), repeats=3, **rest)


@pytest.fixture
def raced(monkeypatch):
    """A race whose times are told: `raced.append` what ran; seconds by name."""
    seen = []
    seconds = {"ours": 0.001, "other": 0.004, "peer": 0.002, "missing": 9.0, "lying": 9.0}

    def race(contenders, repeats, device, *, after_round):
        seen.append(list(contenders))
        for call in contenders.values():
            call()
        for _ in range(repeats):
            after_round()
        samples = {name: Samples((seconds[name],) * repeats) for name in contenders}
        return clock.Race(samples, frozenset({"other"}))

    monkeypatch.setattr(clock, "race", race)
    monkeypatch.setattr(clock, "Cuda", lambda: "a device")
    return seen


def _run(cases: list[Case]):
    drawn = []
    with OnGpu(cases) as on_gpu:
        checks = [check for subject in on_gpu.subjects() for check in on_gpu.examine(subject)]
        outcomes = [
            outcome
            for group in on_gpu.groups()
            for outcome in on_gpu.measure(group, 3, lambda: drawn.append(1))
        ]
    return checks, {outcome.case.name: outcome for outcome in outcomes}, len(drawn)


def test_a_workload_is_one_race_and_every_case_a_pair_of_it(raced):
    causal = replace(_case("causal", OURS, PEER), workload=replace(LOAD, causal=True))
    cases = [_case("first", OURS, PEER), causal, _case("second", OTHER, OURS)]
    checks, outcomes, drawn = _run(cases)
    assert raced == [["peer", "ours", "other"], ["peer", "ours"]]
    assert drawn == 2 * 3
    assert {check.contender for check in checks} == {"ours", "other"}  # peers are not our gate
    assert outcomes["first"].measured == pytest.approx(2.0)
    assert outcomes["first"].holds is True
    assert outcomes["first"].unit == "ms"
    assert outcomes["first"].ours.values == pytest.approx((1.0, 1.0, 1.0))
    assert outcomes["second"].measured == pytest.approx(0.25)
    assert outcomes["second"].holds is False
    assert outcomes["second"].note == f"other {engine.WAITS}"


def test_a_peer_that_fails_or_lies_is_named_and_the_bar_left_open(raced):
    cases = [_case("one", OURS, MISSING), _case("two", OURS, LYING), _case("three", OURS, PEER)]
    _, outcomes, _ = _run(cases)
    assert raced == [["ours", "peer"]]
    assert outcomes["one"].measured is None
    assert outcomes["one"].holds is None
    assert outcomes["one"].note == "missing: RuntimeError: no such kernel"
    assert outcomes["one"].ours.median == pytest.approx(1.0)
    assert outcomes["two"].note.startswith("lying: its out is off by")
    assert outcomes["three"].holds is True


def test_our_own_absence_falls_short(raced):
    _, outcomes, _ = _run([_case("one", OURS_MISSING, PEER), _case("two", OURS, OURS_MISSING)])
    assert outcomes["one"].holds is False
    assert outcomes["two"].holds is False
    assert outcomes["one"].note == "ours missing: RuntimeError: no such kernel"


def test_our_own_error_is_the_gates():
    with OnGpu([_case("one", OURS_LYING, PEER)]) as on_gpu:
        checks = [check for subject in on_gpu.subjects() for check in on_gpu.examine(subject)]
    assert {(check.contender, check.field) for check in checks if not check.holds} == {
        ("ours lying", "out")
    }


def test_memory_is_weighed_by_itself(raced, monkeypatch):
    weights = {"ours": 96.0, "peer": 64.0}
    monkeypatch.setattr(memory, "peak_bytes_a_row", lambda side, load: weights[side.name])
    case = replace(
        _case("memory", OURS, PEER, measures="row memory"),
        quantity=Quantity.EXTRA_BYTES,
        bar=Bar("<=", 31.0),
    )
    _, outcomes, _ = _run([case])
    assert raced == []
    assert outcomes["memory"].measured == pytest.approx(32.0)
    assert outcomes["memory"].unit == "B/row"
    assert outcomes["memory"].holds is False


def test_what_runs_apart_is_asked_there(raced, monkeypatch):
    told = {"ours": Samples((0.001,) * 3), "peer": Samples((0.0011,) * 3)}
    asked = []

    class Duels:
        def __init__(self, workloads):
            asked.append(list(workloads))

        def __enter__(self):
            asked.append("compile")

        def __exit__(self, *_):
            asked.append("end")

        def ready(self):
            asked.append("ready")

        def race(self, workload, rounds):
            asked.append(rounds)
            return Report(told, ["ours"], {"peer": "why not"} if "peer" not in told else {})

    monkeypatch.setattr(engine, "Duels", Duels)
    case = _case("apart", OURS, MISSING, apart=True)
    _, outcomes, drawn = _run([case])
    assert asked == [[LOAD], "compile", "ready", 3, "end"]
    assert outcomes["apart"].measured == pytest.approx(1.1)
    assert outcomes["apart"].note == f"ours {engine.WAITS}"
    assert drawn == 3
    del told["peer"]
    _, outcomes, _ = _run([case])
    assert outcomes["apart"].holds is None
    assert outcomes["apart"].note.endswith("missing: why not")


def test_peak_bytes_are_counted_above_the_inputs(monkeypatch):
    """torch's allocator told: 1000 bytes before the call, 1000 + 8 a row at its peak."""
    called = []
    import torch

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1000)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: called.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1000 + 8 * LOAD.rows)
    side = Contender("side", lambda inputs: (called.append("call"), Answer(None, None))[1])
    assert memory.peak_bytes_a_row(side, LOAD) == 8.0
    assert called == ["call", "reset", "call"]  # compiled before it counts
