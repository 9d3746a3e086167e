"""`kill -9` at a random moment: the store opens, and nothing older than a second is lost.

A second of a machine that has time: the run's own pace says how much of one it had.

SCALEDOT_KILLS=50 repeats it fifty times.
"""

import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from watch.store_cases import assert_same, readings

from scaledot.watch.store import RunReader, Store

PAUSE = 0.003  # seconds between two steps
KILLS = int(os.environ.get("SCALEDOT_KILLS", "4"))

# Imports once, then forks a run for every path it is given: importing torch takes seconds.
SERVER = f"""
import os, sys, time
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from watch.store_cases import readings, scalars
from scaledot.watch.store import Store

for line in sys.stdin:
    run = os.fork()
    if run == 0:
        store = Store(line.strip())
        os.write(1, b"pid %d\\n" % os.getpid())
        for step in range(10**9):
            store.write(readings(step), scalars(step))
            os.write(1, b"%d %f\\n" % (step, time.time()))
            time.sleep({PAUSE})
    os.waitpid(run, 0)
    os.write(1, b"end\\n")
"""


@pytest.fixture(scope="module")
def server():
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


@pytest.mark.one_case
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(KILLS))
def test_killed_run_keeps_all_but_the_last_second(server, tmp_path, seed):
    path = tmp_path / "run.vitals"
    server.stdin.write(f"{path}\n")
    server.stdin.flush()
    run = int(server.stdout.readline().removeprefix("pid "))
    # Random, but spread: six of them fall into six parts of the time.
    time.sleep((seed % 6 + random.Random(seed).random()) * 2.5 / 6)
    killed = time.time()
    os.kill(run, signal.SIGKILL)
    written = [line.split() for line in iter(server.stdout.readline, "end\n")]
    times = [float(written_at) for _, written_at in written]
    pace = (killed - times[0]) / len(times) if times else 0.0
    second = max(1.0, pace / (2 * PAUSE))
    due = [int(step) for step, written_at in written if float(written_at) < killed - second]

    found = list(RunReader(path).steps())
    assert [step.step for step in found] == list(range(len(found)))
    assert len(found) >= len(due)
    for step in found[-3:]:
        for one, other in zip(step.readings, readings(step.step), strict=True):
            assert_same(one, other)
    (segment,) = RunReader(path).segments()
    assert segment.ended is None
    with contextlib.closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    with Store(path) as store:
        store.write(readings(len(found)))
    assert len(list(RunReader(path).steps())) == len(found) + 1
