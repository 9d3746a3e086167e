"""Processes of their own compile side by side, are asked one by one, leave nobody behind."""

import json
import sys
import textwrap

import pytest
import torch

from scaledot.bench.gpu import apart
from scaledot.bench.gpu.apart import Duels
from scaledot.bench.workload import Workload

ONE, TWO = Workload(1, 1, 16, 8), Workload(1, 1, 32, 8)


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Another program in the place of duel.py; `stand_in(code)` says what it does."""
    popen = apart.subprocess.Popen
    started = []

    def be(code: str) -> list:
        script = tmp_path / "duel.py"
        script.write_text(
            "import json, sys\nprint('noise of a compiler')\n" + textwrap.dedent(code)
        )

        def start(command, **options):
            assert command[:3] == [sys.executable, "-m", "scaledot.bench.gpu.duel"]
            process = popen([sys.executable, str(script), *command[3:]], **options)
            started.append(process)
            return process

        monkeypatch.setattr(apart.subprocess, "Popen", start)
        return started

    return be


WELL = """
    length = json.loads(sys.argv[1])["length"]
    print('duel: {"absent": {}}', flush=True)
    rounds = int(sys.stdin.readline())
    seconds = {"ours": [length] * rounds, "peer": [2 * length] * rounds}
    print("duel: " + json.dumps({"seconds": seconds, "waits": ["peer"]}), flush=True)
"""


def test_samples_come_back_by_side(stand_in):
    started = stand_in(WELL)
    with Duels([ONE, TWO, ONE]) as duels:
        duels.ready()
        reports = {load: duels.race(load, 3) for load in (TWO, ONE)}
    assert len(started) == 2  # a workload asked for twice is one process
    assert reports[ONE].samples["ours"].values == (16, 16, 16)
    assert reports[TWO].samples["peer"].values == (64, 64, 64)
    assert reports[ONE].waits == ["peer"]
    assert reports[ONE].absent == {}
    assert all(process.poll() is not None for process in started)


def test_a_side_that_is_not_there_is_told(stand_in):
    stand_in("""
        print('duel: {"absent": {"peer": "ImportError: none"}}', flush=True)
        sys.stdin.readline()
        print('duel: {"seconds": {"ours": [1.0]}, "waits": []}', flush=True)
    """)
    with Duels([ONE]) as duels:
        report = duels.race(ONE, 1)
    assert report.absent == {"peer": "ImportError: none"}
    assert list(report.samples) == ["ours"]


def test_a_process_that_breaks_is_told_with_its_last_words(stand_in):
    stand_in("raise SystemExit('no such compiler')")
    with Duels([ONE]) as duels:
        duels.ready()
        report = duels.race(ONE, 1)
    assert report.samples == {}
    assert "status 1: no such compiler" in report.absent["peer"]
    assert report.absent["ours"] == report.absent["peer"]


def test_patience_ends(stand_in, monkeypatch):
    monkeypatch.setattr(apart, "PATIENCE", 0.3)
    started = stand_in("import time\ntime.sleep(600)")
    with Duels([ONE]) as duels:
        duels.ready()
        assert "status -9" in duels.race(ONE, 1).absent["peer"]
    assert started[0].poll() is not None


def test_nobody_is_left_behind_by_an_interruption(stand_in):
    started = stand_in("import time\ntime.sleep(600)")
    with pytest.raises(KeyboardInterrupt), Duels([ONE, TWO]):
        raise KeyboardInterrupt
    assert all(process.poll() is not None for process in started)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU both sides are there")
def test_the_real_process_says_why_it_cannot(monkeypatch):
    load = Workload(1, 1, 64, 16, dtype="bfloat16", device="cuda")
    with Duels([load]) as duels:
        duels.ready()
        report = duels.race(load, 1)
    assert report.samples == {}
    assert report.absent["peer"]
    assert json.dumps(report.absent)
