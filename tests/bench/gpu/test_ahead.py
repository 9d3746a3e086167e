"""Kernels are compiled ahead: each call by one process, nobody is left behind, no error counts."""

import json
import sys
import textwrap
import time
from dataclasses import replace

import pytest

from scaledot.bench.cases import Contender
from scaledot.bench.gate import Subject
from scaledot.bench.gpu import ahead, cases
from scaledot.bench.gpu.ahead import Ahead
from scaledot.bench.workload import Answer, Workload

LOADS = [Workload(4, 8, length, 64, device="cuda") for length in (16, 32, 48, 64, 80)]
SUBJECTS = [Subject(cases.OWN, load) for load in LOADS]


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Another program in the place of ahead.py; `stand_in(code)` says what it does."""
    popen = ahead.subprocess.Popen
    started = []
    monkeypatch.setattr(ahead.os, "cpu_count", lambda: 6)

    def be(code: str) -> list:
        script = tmp_path / "ahead.py"
        script.write_text("import json, sys, time\n" + textwrap.dedent(code))

        def start(command, **options):
            assert command[:3] == [sys.executable, "-m", "scaledot.bench.gpu.ahead"]
            process = popen([sys.executable, str(script), str(tmp_path), *command[3:]], **options)
            started.append(process)
            return process

        monkeypatch.setattr(ahead.subprocess, "Popen", start)
        return started

    return be


NOTES = """
    calls = json.loads(sys.argv[2])
    name = "-".join(str(fields["length"]) for _, fields in calls)
    open(f"{sys.argv[1]}/{name}.json", "w").write(json.dumps(calls))
"""


def test_each_call_is_made_by_one_process(stand_in, tmp_path):
    started = stand_in(NOTES)
    with Ahead(SUBJECTS) as them:
        them.ready()
    assert len(started) == 3  # half of the cores
    calls = [call for file in tmp_path.glob("*.json") for call in json.loads(file.read_text())]
    assert sorted(fields["length"] for _, fields in calls) == [16, 32, 48, 64, 80]
    assert {name for name, _ in calls} == {cases.OWN.name}
    assert [Workload(**fields) for _, fields in calls if fields["length"] == 16] == LOADS[:1]


def test_only_our_own_and_only_on_a_gpu(stand_in):
    started = stand_in(NOTES)
    foreign = [Subject(cases.CUDNN, load) for load in LOADS]
    elsewhere = [Subject(cases.OWN, replace(load, device="cpu")) for load in LOADS]
    with Ahead([*foreign, *elsewhere]) as them:
        them.ready()
    assert not started


def test_one_call_is_left_to_the_gate(stand_in):
    started = stand_in(NOTES)
    with Ahead(SUBJECTS[:1]) as them:
        them.ready()
    assert not started


def test_whoever_takes_too_long_is_stopped(stand_in, monkeypatch):
    monkeypatch.setattr(ahead, "PATIENCE", 0.2)
    started = stand_in("time.sleep(60)")
    begun = time.monotonic()
    with Ahead(SUBJECTS) as them:
        them.ready()
        assert all(process.poll() is not None for process in started)
    assert time.monotonic() - begun < 30


def test_nobody_is_left_behind(stand_in):
    started = stand_in("time.sleep(60)")
    with Ahead(SUBJECTS):
        assert len(started) == 3
    assert all(process.poll() is not None for process in started)


def test_a_process_calls_with_few_heads_and_goes_on_after_an_error(monkeypatch):
    called = []

    def attend(inputs):
        called.append(tuple(inputs.query.shape))
        if inputs.query.shape[2] == 16:
            raise RuntimeError("no such kernel")
        return Answer(None, None)

    monkeypatch.setattr(cases, "OURS", (Contender("ours", attend),))
    loads = [Workload(4, 8, length, 8) for length in (16, 32)]
    ahead.main(json.dumps([("ours", vars(load)) for load in loads]))
    assert called == [(1, 2, 16, 8), (1, 2, 32, 8)]


def test_every_contender_of_ours_is_known_by_its_name():
    ours = {case.ours.name for case in cases.on_gpu(device="cpu")}
    peers = {case.peer.name for case in cases.on_gpu(device="cpu") if not case.peer.foreign}
    assert ours | peers <= {contender.name for contender in cases.OURS}
