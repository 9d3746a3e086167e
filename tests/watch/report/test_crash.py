"""A run that ends badly: the record is kept, and the script notices nothing of it."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from scaledot import cli
from scaledot.watch import crash, report
from scaledot.watch.crash import Crash, Guard
from scaledot.watch.store import RunReader

TRAIN = """
    import os, signal, sys, time
    import torch
    from torch.nn import functional as F

    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.eye(8))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def train(steps, broken=None):
        for step in range(steps):
            query = torch.randn(1, 2, 5, 8) @ weight
            loss = F.scaled_dot_product_attention(query, query, query).square().mean()
            if step == broken:
                loss = loss * float("nan")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.fixture
def kept():
    return []


@pytest.fixture
def guard(kept):
    guard = Guard(kept.append, lambda: 7)
    yield guard
    guard.remove()


def _run(tmp_path, script: str, watched: bool = True) -> tuple[subprocess.CompletedProcess, list]:
    """The script under `scaledot run`, and the crashes that its store keeps."""
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(TRAIN) + textwrap.dedent(script))
    store = tmp_path / "run.vitals"
    command = [sys.executable, str(file)]
    if watched:
        run = ["-m", "scaledot", "run", "--every", "1", "--store", str(store)]
        command = [sys.executable, *run, str(file)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    crashes = []
    if watched:
        note = RunReader(store).attributes.more.get(crash.NOTE)
        crashes = crash.from_note(note)
    return done, crashes


def test_an_exception_is_kept_and_the_traceback_is_the_scripts_own(tmp_path, capsys):
    script = """
        train(4)
        raise ValueError("a bad batch")
    """
    done, crashes = _run(tmp_path, script)
    plain, _ = _run(tmp_path, script, watched=False)
    assert done.returncode == plain.returncode == 1
    assert plain.stderr in done.stderr
    assert [(one.kind, one.step, one.words) for one in crashes] == [
        ("exception", 4, "ValueError: a bad batch")
    ]
    assert RunReader(tmp_path / "run.vitals").latest().step == 3
    assert cli.main(["report", str(tmp_path / "run.vitals")]) == 0
    assert "The script ended at step 4 with ValueError: a bad batch" in capsys.readouterr().out


@pytest.mark.nightly
def test_sigterm_is_kept_and_ends_the_process_as_ever(tmp_path):
    script = """
        train(4)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
    """
    done, crashes = _run(tmp_path, script)
    assert done.returncode == -signal.SIGTERM
    assert [(one.kind, one.step) for one in crashes] == [("signal", 4)]
    assert RunReader(tmp_path / "run.vitals").latest().step == 3


@pytest.mark.nightly
def test_the_scripts_own_handler_decides_its_exit_code(tmp_path):
    script = """
        train(2)
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(42))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
    """
    done, crashes = _run(tmp_path, script)
    assert done.returncode == 42
    assert crashes == []  # it ended as it wished


@pytest.mark.nightly
def test_a_loss_that_is_no_number_is_kept_and_training_goes_on(tmp_path):
    done, crashes = _run(tmp_path, "train(6, broken=2); print('done')")
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert [(one.kind, one.step) for one in crashes] == [("loss", 2)]
    facts, verdict = report.examine(tmp_path / "run.vitals")
    assert verdict.state == "broken"
    assert facts.loss.not_finite == 2


@pytest.mark.nightly
def test_a_good_end_leaves_no_record(tmp_path):
    done, crashes = _run(tmp_path, "train(2); sys.exit(5)")
    assert (done.returncode, crashes) == (5, [])


CHAIN = """
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    print(before, sys.excepthook is sys.__excepthook__)

    def terminated(number, frame):
        print("saved", flush=True)
        if callable(before[number]):
            before[number](number, frame)

    print(signal.signal(signal.SIGTERM, terminated))
    train(2)
    os.kill(os.getpid(), signal.SIGTERM)
    train(1)
    print("done")
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_a_handler_that_calls_the_one_before_it_calls_none(tmp_path):
    """Lightning's does: it ends the step that is running, and the training thereafter."""
    plain, _ = _run(tmp_path, CHAIN, watched=False)
    done, crashes = _run(tmp_path, CHAIN)
    assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout)
    assert (plain.returncode, plain.stdout.splitlines()[-2:]) == (0, ["saved", "done"])
    assert crashes == []


CAUGHT = """
    def test():
        raise ValueError("a failed test")

    train(2)
    try:
        test()
    except ValueError as error:
        sys.last_value = error.with_traceback(error.__traceback__.tb_next)  # as pytest does
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_an_exception_that_was_caught_has_not_ended_the_script(tmp_path):
    done, crashes = _run(tmp_path, CAUGHT)
    assert (done.returncode, crashes) == (0, [])


def test_hook_and_handler_are_as_without_it(guard):
    def known():
        handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP)
        return sys.excepthook, *handlers

    before = known()
    guard.install()
    assert known() == before
    guard.remove()
    assert known() == before
    guard.remove()  # more than once is fine
    assert known() == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_handler_of_the_script_is_left_alone(guard, kept, number):
    """It decides what the signal means, and when it is called."""
    handler = lambda number, frame: None  # noqa: E731
    before = signal.signal(number, handler)
    try:
        guard.install()
        assert signal.getsignal(number) is handler
    finally:
        guard.remove()
        signal.signal(number, before)


LONG_CALL = """
    import ctypes

    train(4)
    system = ctypes.CDLL(None)
    lock = ctypes.create_string_buffer(256)
    system.pthread_mutex_init(lock, None)
    system.pthread_mutex_lock(lock)
    print("begun", flush=True)
    system.pthread_mutex_lock(lock)  # forever: no signal ends it, and no Python runs here
"""


@pytest.mark.one_case
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_a_signal_inside_a_long_call_ends_the_process_before_the_call_does(
    tmp_path, number, stopped
):
    file, store = tmp_path / "train.py", tmp_path / "run.vitals"
    file.write_text(textwrap.dedent(TRAIN) + textwrap.dedent(LONG_CALL))
    command = [sys.executable, "-m", "scaledot", "run", "--every", "1", "--store", str(store)]
    with subprocess.Popen(
        [*command, str(file)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        time.sleep(0.2)
        if stopped:
            process.send_signal(signal.SIGSTOP)
            process.send_signal(number)
            time.sleep(0.2)
            process.send_signal(signal.SIGCONT)
        else:
            process.send_signal(number)
        try:
            assert process.wait(120) == -number
        finally:
            process.kill()
    found = RunReader(store)
    (one,) = crash.from_note(found.attributes.more.get(crash.NOTE))
    assert (one.kind, one.signal, one.step) == ("signal", number.name, 4)
    assert found.latest().step == 3


def test_an_ignored_signal_stays_ignored(guard):
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        guard.install()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        guard.remove()
        signal.signal(signal.SIGTERM, before)


def test_outside_the_main_thread_no_handler_is_touched(guard):
    handler = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=guard.install)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is handler


def test_each_kind_is_kept_once_with_all_that_came_before(guard, kept):
    guard.loss(3, 1.0)
    guard.loss(4, float("nan"))
    guard.loss(5, float("inf"))
    guard.exception(RuntimeError("boom"))
    guard.exception(KeyboardInterrupt())
    guard.exception(SystemExit(1))
    kinds = [[one.kind for one in crashes] for crashes in kept]
    assert kinds == [["loss"], ["loss", "exception"], ["loss", "exception", "interrupt"]]
    assert (guard.crashes[0].step, guard.crashes[0].words) == (4, "the loss is nan")


def test_a_keeper_that_fails_or_hangs_does_not_hold_the_script(monkeypatch, caplog):
    def fails(crashes):
        raise OSError("disk full")

    guard = Guard(fails, lambda: 0)
    guard.exception(ValueError("x"))
    assert "could not be kept" in caplog.text
    monkeypatch.setattr(crash, "PATIENCE", 0.1)
    let_go, ended = threading.Event(), threading.Event()

    def hangs(crashes):
        let_go.wait()
        ended.set()

    guard = Guard(hangs, lambda: 0)
    guard.exception(ValueError("x"))
    assert not ended.is_set()
    let_go.set()
    assert ended.wait(60)


def test_a_forked_copy_keeps_nothing(guard, kept):
    child = os.fork()
    if not child:
        guard.exception(ValueError("x"))
        os._exit(len(kept))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_note_comes_back_as_it_was_and_a_foreign_one_as_nothing():
    crashes = [Crash("loss", 3, "the loss is nan", 12.5), Crash("signal", 4, "SIGTERM", 13.0)]
    assert crash.from_note(json.loads(json.dumps(crash.as_note(crashes)))) == crashes
    foreign = [{"kind": "unheard", "step": 1, "words": "", "time": 0}, {"step": 1}, "text", None]
    assert crash.from_note(foreign) == []
    assert crash.from_note("text") == crash.from_note(None) == []


def test_a_long_exception_is_cut(guard):
    guard.exception(ValueError("x" * 5000))
    assert len(guard.crashes[0].words) <= crash.LONGEST + 1
