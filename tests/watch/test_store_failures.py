"""Whatever happens to the disk, the training goes on, one warning is logged, nothing is hidden."""

import contextlib
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from watch.store_cases import (
    files_no_larger_than,
    readings,
    refuse_rows,
    scalars,
    unprivileged,
    warnings_in,
)

from scaledot.printable import typed
from scaledot.watch.reading import DISK
from scaledot.watch.store import RunReader, Store, StoreError, schema, writer
from scaledot.watch.store.packing import pack_integers

DOT_FILE = "&vfs=unix-dotfile"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.vitals"


@pytest.fixture(autouse=True)
def fast_retry(monkeypatch):
    monkeypatch.setattr(writer, "RETRY", 0.05)
    monkeypatch.setattr(writer, "INTERVAL", 0.05)


def wait_for(condition, seconds: float = 60.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not happen"
        time.sleep(0.01)


def steps_in(path) -> list[int]:
    return [step.step for step in RunReader(path).steps()]


# Files that are something else


def other_database(path: Path, application: int = 0, version: int = 0) -> None:
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE songs (title TEXT)")
        database.execute(f"PRAGMA application_id = {application}")
        database.execute(f"PRAGMA user_version = {version}")
        database.commit()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.write_text("Dear diary,\n" * 100), "not an SQLite file"),
        (lambda path: path.write_text("hello"), "not an SQLite file"),
        (other_database, "not a run of scaledot"),
        (lambda path: other_database(path, application=17), "not a run of scaledot"),
        (
            lambda path: other_database(path, schema.APPLICATION_ID, schema.VERSION + 1),
            "pip install --upgrade",
        ),
        (lambda path: other_database(path, schema.APPLICATION_ID, 1), "choose another file name"),
        (lambda path: path.mkdir(), "folder"),
    ],
    ids=["text", "short text", "no application", "other application", "newer", "older", "folder"],
)
def test_foreign_file_is_refused_and_left_alone(path, make, words):
    make(path)
    before = path.read_bytes() if path.is_file() else None
    for open_it in (Store, RunReader):
        with pytest.raises(StoreError, match=words):
            open_it(path)
    assert list(path.parent.iterdir()) == [path]
    if before is not None:
        assert path.read_bytes() == before


def test_missing_run_is_named_with_the_way_to_make_one(path):
    with pytest.raises(StoreError, match="scaledot run --store"):
        RunReader(path)
    assert not path.exists()


def test_empty_file_becomes_a_run_but_cannot_be_read_as_one(path):
    path.touch()
    with pytest.raises(StoreError, match="no run yet"):
        RunReader(path)
    with Store(path) as store:
        store.write(readings(0))
    assert steps_in(path) == [0]


def test_folder_of_a_new_run_is_made(tmp_path):
    with Store(tmp_path / "runs" / "today" / "run.vitals") as store:
        store.write(readings(0))
    assert steps_in(store.path) == [0]


@pytest.mark.nightly
def test_run_with_an_endless_command_line_can_be_read(path, monkeypatch):
    monkeypatch.setattr(
        "sys.argv", ["train.py", *(f"data/{place}.parquet" for place in range(50_000))]
    )
    for _ in range(20):
        with Store(path) as store:
            store.write(readings(0))
    command = RunReader(path).attributes.command
    assert command[:2] == ("train.py", "data/0.parquet")
    assert command[-1].endswith("…")
    assert len(" ".join(command)) < 20_000


@pytest.mark.parametrize("name", ["-run.vitals", "a b.vitals", "a\x1b[2J\n.vitals"])
def test_command_of_a_message_names_the_file_for_a_shell(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    path = Path(name)
    with pytest.raises(StoreError) as missing:
        RunReader(path)
    assert f"--store {typed(path.absolute())} SCRIPT" in str(missing.value)
    with Store(path) as store:
        store.write(readings(0))
    content = bytearray(path.read_bytes())
    content[4096:] = bytes(len(content) - 4096)
    path.write_bytes(content)
    with pytest.raises(StoreError) as damaged:
        RunReader(path)
    assert f"sqlite3 {typed(path.absolute())} .recover" in str(damaged.value)


def test_announced_size_of_a_packed_column_is_a_limit(path):
    with Store(path) as store:
        store.write(readings(0))
    with contextlib.closing(sqlite3.connect(path)) as database:
        long = pack_integers(np.arange(2))
        database.execute("UPDATE chunk SET steps = ?", (long,))
        database.commit()
    with pytest.raises(StoreError, match="expected 8"):
        list(RunReader(path).steps())


# Disks that fail


def test_full_disk_is_survived_and_nothing_that_fits_the_queue_is_lost(path, caplog):
    with Store(path) as store:
        for step in range(40):
            store.write(readings(step))
        assert store.flush()
        with files_no_larger_than(4096):
            for step in range(40, 80):
                assert store.write(readings(step))
            assert not store.flush()
            assert store.broken is not None
            for step in range(80, 90):
                store.write(readings(step))
            assert not store.flush()
            assert len(warnings_in(caplog)) == 1
            assert "The training goes on" in warnings_in(caplog)[0]
        assert store.flush()
        assert store.broken is None
        store.write(readings(90))
    assert steps_in(path) == list(range(91))
    assert len(warnings_in(caplog)) == 1


def test_disk_that_stays_full_ends_with_what_was_committed(path, caplog):
    store = Store(path)
    store.write(readings(0))
    assert store.flush()
    with files_no_larger_than(4096):
        for step in range(1, 50):
            store.write(readings(step))
        store.close()
    assert steps_in(path) == [0]
    assert len(warnings_in(caplog)) == 1


@pytest.mark.parametrize("full", [False, True])
def test_disk_that_refuses_to_the_end_leaves_a_note_in_the_file(path, monkeypatch, full):
    store = Store(path)
    store.write(readings(0))
    assert store.flush()
    began = time.time()
    refuse_rows(monkeypatch, full)
    for step in range(1, 100):
        store.write(readings(step))
    assert not store.flush()
    store.close()
    (segment,) = RunReader(path).segments()
    assert steps_in(path) == [0]
    assert segment.cut_off
    assert segment.seen < began < segment.ended
    assert segment.dropped == 3 * 99
    disk = segment.attributes.more[DISK]
    assert disk["full"] is full
    assert began <= disk["since"] <= segment.ended
    assert disk["until"] is None


def test_disk_that_writes_again_leaves_a_note_where_numbers_are_lost(path):
    entry = sum(r.floats.nbytes + r.counts.nbytes for r in readings(0))
    with Store(path, queue_bytes=10 * entry) as store:
        store.write(readings(0))
        assert store.flush()
        with files_no_larger_than(4096):
            for step in range(1, 60):
                store.write(readings(step))
                assert not store.flush()
        assert store.flush()
    (segment,) = RunReader(path).segments()
    assert not segment.cut_off
    disk = segment.attributes.more[DISK]
    assert segment.started <= disk["since"] <= disk["until"] <= segment.ended


def test_full_disk_fills_no_more_memory_than_the_queue(path):
    entry = sum(r.floats.nbytes + r.counts.nbytes for r in readings(0))
    with Store(path, queue_bytes=10 * entry) as store:
        store.write(readings(0))
        assert store.flush()
        with files_no_larger_than(4096):
            for step in range(1, 60):
                store.write(readings(step))
                assert not store.flush()  # an attempt that fails must not make room for more
            # One step is with the thread, ten wait.
            assert store.dropped == 3 * (59 - 11)
        assert store.flush()
    assert steps_in(path) == list(range(12))
    assert RunReader(path).segments()[0].dropped == 3 * (59 - 11)


@pytest.fixture
def read_only_folder():
    with tempfile.TemporaryDirectory(prefix="scaledot-test-") as name:
        folder = Path(name)
        yield folder
        folder.chmod(0o755)


def lock(folder: Path) -> None:
    for file in folder.iterdir():
        file.chmod(0o444)
    folder.chmod(0o555)


def test_run_in_a_read_only_folder_goes_on_without_a_store(read_only_folder, caplog):
    lock(read_only_folder)
    with unprivileged(), Store(read_only_folder / "run.vitals") as store:
        assert store.broken is not None
        for step in range(5):
            store.write(readings(step), scalars(step))
        assert not store.flush()
    assert len(warnings_in(caplog)) == 1
    assert list(read_only_folder.iterdir()) == []


def test_finished_run_is_read_in_a_read_only_folder(read_only_folder):
    path = read_only_folder / "run.vitals"
    with Store(path) as store:
        store.write(readings(0))
    lock(read_only_folder)
    with unprivileged():
        assert steps_in(path) == [0]
    assert list(read_only_folder.iterdir()) == [path]


@pytest.mark.parametrize("kept", [("",), ("", "-wal"), ("", "-wal", "-shm")])
def test_unfinished_run_is_read_in_a_read_only_folder(path, read_only_folder, kept, monkeypatch):
    """As after kill -9, or copied from there with all, some or none of SQLite's other files."""
    monkeypatch.setattr(Store, "_tidy", lambda *_, **__: None)  # killed before
    with Store(path) as store:
        store.write(readings(0))
        assert store.flush()
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.execute("PRAGMA wal_checkpoint")
        store.write(readings(1))
        assert store.flush()
        for end in kept:
            copy = read_only_folder / f"run.vitals{end}"
            copy.write_bytes(Path(f"{path}{end}").read_bytes())
    lock(read_only_folder)
    before = sorted(read_only_folder.iterdir())
    with unprivileged():
        assert steps_in(read_only_folder / "run.vitals") == ([0, 1] if "-wal" in kept else [0])
    assert sorted(read_only_folder.iterdir()) == before


def test_file_that_may_not_be_read_is_named(read_only_folder):
    path = read_only_folder / "run.vitals"
    with Store(path) as store:
        store.write(readings(0))
    path.chmod(0)
    for folder in (0o700, 0o755):
        read_only_folder.chmod(folder)
        with unprivileged(), pytest.raises(StoreError, match="permissions"):
            RunReader(path)


@pytest.mark.parametrize("replacement", [None, "something else"])
def test_store_deleted_or_replaced_under_it(path, caplog, replacement):
    with Store(path) as store:
        store.write(readings(0))
        assert store.flush()
        path.unlink()
        if replacement is not None:
            path.write_text(replacement)
        wait_for(lambda: store.broken is not None)
        assert not store.write(readings(1))
        assert not store.flush()
        assert store.dropped == 3
    assert store.broken is not None
    assert "deleted or replaced" in store.broken
    assert len(warnings_in(caplog)) == 1
    assert (path.read_text() if path.exists() else None) == replacement


def test_stalled_disk_drops_and_counts_and_never_blocks(path, caplog):
    entry = sum(r.floats.nbytes + r.counts.nbytes for r in readings(0))
    with Store(path, queue_bytes=10 * entry) as store:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")  # no commit of another connection gets through
            store.write(readings(0))
            wait_for(lambda: not store._queue)  # the thread has it and waits for the lock
            began = time.monotonic()
            for step in range(1, 100):
                store.write(readings(step))
            took = time.monotonic() - began
            other.execute("ROLLBACK")
        assert took < 5  # SQLite waits 0.2 s for the lock: behind it this would take 20 s
        assert store.dropped == 3 * (99 - 10)
        assert store.flush()
        store.write(readings(100))
    assert steps_in(path) == [*range(11), 100]
    assert RunReader(path).segments()[0].dropped == 3 * (99 - 10)
    assert warnings_in(caplog) == []


def test_lock_that_is_never_released_is_a_failure_not_a_hang(path, caplog, monkeypatch):
    monkeypatch.setattr(writer, "LOCK_TIMEOUT", 0.1)
    with Store(path) as store:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            store.write(readings(0))
            wait_for(lambda: store.broken is not None)
            other.execute("ROLLBACK")
        wait_for(lambda: store.broken is None)
    assert steps_in(path) == [0]
    assert len(warnings_in(caplog)) == 1


def test_file_system_without_shared_memory_gets_a_rollback_journal(path, monkeypatch):
    """SQLite's dot-file locking has no shared memory, as some network file systems."""
    connect = schema.connect
    monkeypatch.setattr(
        schema, "connect", lambda file, options, wait: connect(file, options + DOT_FILE, wait)
    )
    with Store(path) as store:
        store.write(readings(0))
        assert store.flush()
        assert not Path(f"{path}-wal").exists()
        assert steps_in(path) == [0]
        store.write(readings(1))
    assert steps_in(path) == [0, 1]


def test_hot_rollback_journal_is_read_from_a_copy(path):
    """A killed writer without shared memory leaves half a commit, which a reader cannot undo."""
    with Store(path) as store:
        store.write(readings(0))
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("PRAGMA cache_size = 1")
        database.execute("BEGIN IMMEDIATE")
        database.execute("INSERT INTO about VALUES ('long', ?)", ("x" * 500_000,))
        copy = path.with_name("copy.vitals")
        copy.write_bytes(path.read_bytes())
        Path(f"{copy}-journal").write_bytes(Path(f"{path}-journal").read_bytes())
        database.execute("ROLLBACK")
    assert steps_in(copy) == [0]
    assert Path(f"{copy}-journal").exists()  # a look changes nothing


# Forks


@pytest.mark.slow
def test_forked_child_neither_writes_nor_closes_what_the_parent_writes(path):
    """The child ends like any program, with exit handlers, in a process of its own."""
    script = f"""
        import gc, os, sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        from watch.store_cases import readings
        from scaledot.watch.store import RunReader, Store

        store = Store({str(path)!r})
        store.write(readings(0))
        assert store.flush()
        child = os.fork()
        if child == 0:
            assert not store.write(readings(666))
            assert not store.flush()
            store.note("child", True)
            store.close()
            del store
            gc.collect()
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert Path({f"{path}-wal"!r}).exists()
        assert store.broken is None
        store.write(readings(1))
        # No close: the end of the program is enough.
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=600)
    assert steps_in(path) == [0, 1]
    assert list(path.parent.iterdir()) == [path]
    assert RunReader(path).segments()[0].ended is not None
    assert "child" not in RunReader(path).attributes.more


def test_companions_are_those_of_sqlite(path):
    """The names that are looked at are the names SQLite uses."""
    with Store(path) as store:
        store.write(readings(0))
        assert store.flush()
        names = {file.name.removeprefix(path.name) for file in path.parent.iterdir()}
    assert {"-wal", "-shm"} < names - {""} | {"-journal"} == set(schema.COMPANIONS)
