"""A file that takes a store's name stays as it is, and a file has one writer."""

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from watch.store_cases import readings, scalars, warnings_in

from scaledot.watch.store import RunReader, Store, ownership, schema, writer


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.vitals"


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(writer, "RETRY", 0.05)
    monkeypatch.setattr(writer, "INTERVAL", 0.05)


def steps_in(path) -> list[int]:
    return [step.step for step in RunReader(path).steps()]


def text(path: Path) -> None:
    path.write_text("something else")


def database(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE songs (title TEXT)")
        connection.executemany("INSERT INTO songs VALUES (?)", [("x" * 900,)] * 50)
        connection.commit()


def backup(path: Path) -> None:
    with Store(path) as store:
        for step in range(100, 130):
            store.write(readings(step))


def replaced(path: Path, new: Path) -> None:
    new.replace(path)


def moved_away(path: Path, new: Path) -> None:
    path.rename(path.with_name("away.vitals"))
    new.rename(path)


def deleted(path: Path, new: Path) -> None:
    path.unlink()
    new.rename(path)


def whole(path: Path, before: bytes) -> None:
    """It is as it was, alone, and stays so when it is opened with SQLite."""
    assert path.read_bytes() == before
    assert schema.companions(path) == []
    if before.startswith(b"SQLite"):
        with contextlib.closing(sqlite3.connect(path)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert path.read_bytes() == before


def wait_for(condition) -> None:
    limit = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < limit, "it did not happen"
        time.sleep(0.01)


@pytest.mark.parametrize("take", [replaced, moved_away, deleted])
@pytest.mark.parametrize("make", [text, database, backup])
def test_file_that_takes_the_name_is_left_alone(path, tmp_path, make, take, caplog):
    new = tmp_path / "new"
    make(new)
    before = new.read_bytes()
    with Store(path) as store:
        for step in range(20):
            store.write(readings(step), scalars(step))
        assert store.flush()
        take(path, new)
        wait_for(lambda: store.broken is not None)
        wait_for(lambda: not schema.companions(path))
        whole(path, before)
        store.write(readings(20))
    whole(path, before)
    assert "was deleted or replaced" in warnings_in(caplog)[0]
    if take is moved_away:
        assert steps_in(tmp_path / "away.vitals") == list(range(20))


@pytest.mark.parametrize("moment", ["_tidy", "_finish", "_write_down"])
def test_file_that_takes_the_name_in_the_midst_is_left_alone(path, tmp_path, moment, monkeypatch):
    """Before the log is emptied, at the end, and before a commit."""
    new = tmp_path / "new"
    backup(new)
    before = new.read_bytes()
    place = writer if moment == "_finish" else Store
    original = getattr(place, moment)

    def after_the_swap(*arguments, **options):
        if new.exists():
            new.replace(path)
        return original(*arguments, **options)

    with Store(path) as store:
        store.write(readings(0))
        assert store.flush()
        monkeypatch.setattr(place, moment, after_the_swap)
        store.write(readings(1))
        if moment != "_finish":
            wait_for(lambda: store.broken is not None)
    assert not new.exists()
    whole(path, before)


def test_file_of_another_living_store_is_left_alone(path, tmp_path):
    """The other one goes on with its file, whose name it has lost."""
    with Store(path) as store, Store(tmp_path / "other.vitals") as other:
        store.write(readings(0))
        other.write(readings(100))
        assert store.flush()
        assert other.flush()
        wait_for(lambda: not os.path.getsize(f"{other.path}-wal"))
        before = other.path.read_bytes()
        other.path.replace(path)
        wait_for(lambda: None not in (store.broken, other.broken))
    assert path.read_bytes() == before
    assert steps_in(path) == [100]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run.vitals"]


def test_link_that_points_elsewhere_takes_nothing_away(tmp_path):
    """The run goes on in the file that it began."""
    ours, theirs, link = (tmp_path / name for name in ("ours", "theirs", "latest.vitals"))
    ours.touch()
    link.symlink_to(ours)
    backup(theirs)
    before = theirs.read_bytes()
    with Store(link) as store:
        store.write(readings(0))
        assert store.flush()
        link.unlink()
        link.symlink_to(theirs)
        store.write(readings(1))
        assert store.flush()
    whole(theirs, before)
    assert steps_in(ours) == [0, 1]


def test_log_is_empty_between_commits(path):
    """So that a run that is killed after its file was replaced leaves nothing to write there."""
    with Store(path) as store:
        for step in range(3):
            store.write(readings(step))
            assert store.flush()
            wait_for(lambda: os.path.getsize(f"{path}-wal") == 0)
        assert steps_in(path) == [0, 1, 2]


# One writer


def started(script: str, path: Path) -> subprocess.Popen:
    head = f"""
        import os, sys, time
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        from watch.store_cases import readings
        from scaledot.watch.store import Store
        path = {str(path)!r}
    """
    code = textwrap.dedent(head) + textwrap.dedent(script)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    return process


WRITES = """
    store = Store(path)
    store.write(readings(7))
    assert store.flush()
    print("begun", flush=True)
    time.sleep(100)
"""


def test_second_run_takes_a_file_of_its_own_until_the_first_is_killed(path, caplog):
    first = started(WRITES, path)
    with first, Store(path) as second:
        assert second.path == path.with_name("run-2.vitals")
        assert second.write(readings(0))
        assert second.flush()
        assert f"another run writes {path} now" in warnings_in(caplog)[0]
        assert str(second.path) in warnings_in(caplog)[0]
        os.kill(first.pid, signal.SIGKILL)
    assert steps_in(path) == [7]
    assert steps_in(second.path) == [0]
    with Store(path) as third:
        assert third.path == path
        third.write(readings(1))
    assert steps_in(path) == [7, 1]


def test_second_store_of_a_process_takes_a_file_of_its_own(path):
    with Store(path) as one, Store(path) as two:
        assert (one.path.name, two.path.name) == ("run.vitals", "run-2.vitals")
        assert one.write(readings(1))
        assert two.write(readings(2))
    assert (steps_in(one.path), steps_in(two.path)) == ([1], [2])
    with Store(path) as again:
        assert again.path == path


@pytest.mark.nightly
def test_fork_waits_for_the_commit(path):
    """A child that was forked in the midst of SQLite could not open a store of its own."""
    script = """
        store = Store(path)
        for step in range(15):
            store.write(readings(step))
            assert store.flush()  # the thread empties the log now
            child = os.fork()
            if child == 0:
                with Store(path) as own:
                    own.write(readings(0))
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        print("begun", flush=True)
    """
    with started(script, path) as process:
        assert process.wait(30) == 0


def test_forked_child_neither_keeps_the_file_nor_takes_it(path):
    """A data loader's worker may live longer than the run that was killed."""
    script = """
        store = Store(path)
        store.write(readings(7))
        assert store.flush()
        child = os.fork()
        if child == 0:
            with Store(path) as own:
                assert own.path.name == "run-2.vitals", own.path
            print("begun", flush=True)
            time.sleep(100)
        print(child, flush=True)
        time.sleep(100)
    """
    parent = started(script.replace("print(child, flush=True)", ""), path)
    with parent:
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        with Store(path) as store:
            assert store.path == path
        os.kill(int(children[0]), signal.SIGKILL)


@pytest.mark.parametrize(("age", "name"), [(0.0, "run-2.vitals"), (1000.0, "run.vitals")])
def test_without_locks_a_run_that_wrote_lately_is_taken_for_living(path, monkeypatch, age, name):
    def no_locks(*arguments):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(ownership.fcntl, "fcntl", no_locks)
    with Store(path) as store:
        store.write(readings(0))
        assert store.flush()
        copy = path.with_name("copy.vitals")
        copy.write_bytes(path.read_bytes())  # as a killed run leaves it
    with contextlib.closing(sqlite3.connect(copy)) as connection:
        connection.execute("UPDATE segment SET seen = ?", (time.time() - age,))
        connection.commit()
    copy.replace(path)
    with Store(path) as store:
        assert store.path.name == name


# The first reading and the last word


def test_first_reading_is_on_the_disk_at_once(path, monkeypatch):
    monkeypatch.setattr(writer, "INTERVAL", 100.0)
    with Store(path) as store:
        store.write(readings(0))
        wait_for(lambda: steps_in(path) == [0])


def test_new_store_is_made_without_waiting_for_the_disk(path):
    """A run that is killed early leaves a store; one that has numbers waits before it changes."""
    path.touch()
    for waits in (0, 2):  # SQLite's OFF and FULL
        with contextlib.closing(schema.connect(path, "mode=rw", 1.0)) as connection:
            schema.prepare(connection, path)
            assert connection.execute("PRAGMA synchronous").fetchone() == (waits,)


def test_store_is_for_its_owner_alone(path):
    with Store(path) as store:
        store.write(readings(0))
        assert store.flush()
        assert {name.stat().st_mode & 0o777 for name in path.parent.iterdir()} == {0o600}


def test_full_disk_keeps_that_the_run_ended_and_what_was_lost(path, monkeypatch, caplog):
    def full(*_):
        raise sqlite3.OperationalError("database or disk is full")

    with Store(path) as store:
        store.write(readings(0))
        assert store.flush()
        monkeypatch.setattr(writer, "_write_rows", full)
        store.write(readings(1))
        assert not store.flush()
        store.write(readings(2), scalars(2))
    assert store.broken is not None
    assert str(path) in store.broken
    (segment,) = RunReader(path).segments()
    assert segment.ended is not None
    assert segment.dropped == store.dropped == 8
    assert steps_in(path) == [0]
    assert schema.companions(path) == []
