"""A damaged or hostile file is a StoreError that names it, in time and within memory."""

import contextlib
import json
import os
import random
import resource
import sqlite3
import time
import zlib

import numpy as np
import pytest
from watch.store_cases import readings, scalars

from scaledot import cli
from scaledot.measure import COUNT_FIELDS, FLOAT_FIELDS
from scaledot.watch.store import RunReader, Store, StoreError, looking
from scaledot.watch.store.packing import pack_integers


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bytes of a run with everything in it."""
    path = tmp_path_factory.mktemp("whole") / "run.vitals"
    with Store(path) as store:
        for step in range(40):
            store.write(readings(step), scalars(step))
            if step % 10 == 0:
                assert store.flush()
    return path.read_bytes()


@pytest.fixture
def path(tmp_path, whole):
    path = tmp_path / "run.vitals"
    path.write_bytes(whole)
    return path


def read_all(path) -> None:
    reader = RunReader(path)
    for step in reader.steps():
        assert step.readings
    assert reader.segments()
    reader.alarms()
    reader.latest()
    reader.latest_of_layers()
    for layer in reader.layers():
        reader.heads(layer, "entropy")
    reader.vital("max_logit", most=20)
    reader.timeline()
    for name in reader.scalar_names():
        reader.scalars(name)
    reader.follow().look()


def change(path, *statements) -> None:
    with contextlib.closing(sqlite3.connect(path)) as database:
        for statement in statements:
            database.execute(*((statement,) if isinstance(statement, str) else statement))
        database.commit()


def outcome(path) -> str:
    """The words of the refusal; "" where the run is read, as after most flips of a bit."""
    try:
        read_all(path)
    except StoreError as error:
        return str(error)
    return ""


def refused(path) -> str:
    """The words of the refusal, which comes soon and without much memory."""
    began = time.process_time()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(StoreError) as refusal:
        read_all(path)
    assert time.process_time() - began < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB
    assert str(path) in str(refusal.value)
    return str(refusal.value)


@pytest.mark.parametrize("seed", range(60))
def test_flipped_and_cut_bytes_are_an_error_that_names_the_file(path, whole, seed):
    chance = random.Random(seed)
    broken = bytearray(whole)
    if seed % 5 == 0:
        del broken[chance.randrange(1, len(broken)) :]
    else:
        for _ in range(chance.choice([1, 4, 200])):
            broken[chance.randrange(len(broken))] = chance.randrange(256)
    path.write_bytes(broken)
    words = outcome(path)
    assert not words or str(path) in words


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """The bytes of a run of several chunks."""
    path = tmp_path_factory.mktemp("long") / "run.vitals"
    with Store(path) as store:
        for step in range(300):
            store.write(readings(step), scalars(step))
    return path.read_bytes()


@pytest.mark.parametrize("command", ["top --once", "top --json", "report", "report --json"])
@pytest.mark.parametrize("place", range(6))
def test_every_view_of_damaged_numbers_ends_in_words(path, long, place, command, capsys):
    """Some views read the last chunk alone, some one vital of all."""
    path.write_bytes(long)
    with contextlib.closing(sqlite3.connect(path)) as database:
        parts = [id_ for (id_,) in database.execute("SELECT id FROM part ORDER BY id")]
    numbers = "UPDATE part SET data = zeroblob(length(data)), packing = 'shuffled' WHERE id = ?"
    change(path, (numbers, (parts[place],)))
    status = cli.main([*command.split(), str(path)])
    said = capsys.readouterr()
    assert status == (1 if said.err else 0)
    assert not said.err or (str(path) in said.err and "is damaged" in said.err)


def test_run_refuses_to_continue_damaged_readings_before_it_starts(path, capsys):
    """Where they are refused when attention is first called, nothing of the run is kept."""
    change(path, "UPDATE part SET packing = 'other'")
    assert cli.main(["run", "--store", str(path), "no_such_script.py"]) == 2
    assert "is damaged" in capsys.readouterr().err


def test_words_of_a_broken_schema_are_refused_by_reader_and_writer(path, whole):
    """SQLite quotes the file's own bytes, which are no text and may hold an escape."""
    for name in (b"\xff\x1b[2J (\x07", b"\x1b]52;c;\x07("):
        path.write_bytes(whole.replace(b"TABLE segment (", b"TABLE " + name.ljust(9)[:9]))
        for open_it in (RunReader, Store):
            with pytest.raises(StoreError, match="is damaged") as refusal:
                open_it(path)
            assert str(path) in str(refusal.value)
            assert "\x1b" not in str(refusal.value)


BOMB = zlib.compress(bytes(64_000_000))
DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE chunk SET steps = x'00'",
        "UPDATE chunk SET steps = 7",
        "UPDATE chunk SET times = NULL",
        "UPDATE chunk SET records = -1",
        "UPDATE chunk SET records = 1.5",
        "UPDATE chunk SET records = 9223372036854775807",
        ("UPDATE chunk SET records = 8000000, steps = ?, times = ?", (BOMB, BOMB)),
        "UPDATE chunk SET first = -5",
        "UPDATE chunk SET split = 'x'",
        "UPDATE part SET packing = 'other'",
        "UPDATE part SET packing = 'shuffled', data = x'0102'",
        "UPDATE part SET data = 'text'",
        "DELETE FROM part",
        "UPDATE stream SET kind = 'sleep'",
        "UPDATE stream SET segment = 99",
        "UPDATE stream SET content = 'no JSON'",
        "UPDATE stream SET content = '7'",
        """UPDATE stream SET content = '[["layer", 1000000000000]]' WHERE kind = 'train'""",
        """UPDATE stream SET content = '[["layer", -1]]' WHERE kind = 'train'""",
        """UPDATE stream SET content = '[[7, 7]]' WHERE kind = 'train'""",
        ("UPDATE stream SET content = ?", (DEEP,)),
        ("UPDATE stream SET content = ?", (json.dumps([["a", 1]] * 1_000_000),)),
        "UPDATE segment SET started = 'yesterday'",
        "UPDATE segment SET seen = 9e999",
        "UPDATE segment SET float_fields = 'null'",
        "UPDATE segment SET dropped = 'x'",
        "DELETE FROM segment",
        "DELETE FROM about",
        ("INSERT INTO attribute VALUES (1, 'x', ?)", (DEEP,)),
        "UPDATE attribute SET value = '7'",
        "INSERT INTO attribute VALUES (1, 'loss_calls', '\"many\"')",
        "INSERT INTO attribute VALUES (1, 'remedies', '[1]')",
        "INSERT INTO alarm VALUES (1, 1, 1, 'act', 'growth', 'layer', '{}')",
        "INSERT INTO alarm VALUES (1, 1, 1, 'act', 'growth', 'layer', '[]')",
    ],
)
def test_value_that_scaledot_never_writes_is_refused(path, statement):
    change(path, statement)
    assert "is damaged" in refused(path)


@pytest.mark.parametrize(
    ("statements", "words"),
    [
        (["DROP TABLE part"], "no table part"),
        (["DROP TABLE part", "CREATE VIEW part AS SELECT 1 AS id"], "part is a view"),
        (
            ["CREATE TRIGGER t AFTER INSERT ON chunk BEGIN DELETE FROM chunk; END"],
            "it has a trigger",
        ),
        (
            [
                "ALTER TABLE part RENAME TO old",
                "CREATE TABLE part (id, packing, data AS (zeroblob(900000000)))",
            ],
            "other columns",
        ),
    ],
    ids=["none", "view", "trigger", "computed"],
)
def test_name_that_is_no_plain_table_is_refused_by_reader_and_writer(path, statements, words):
    change(path, *statements)
    before = path.read_bytes()
    assert words in refused(path)
    with pytest.raises(StoreError, match=words):
        Store(path)
    assert path.read_bytes() == before


def test_small_file_that_announces_a_large_run_is_refused(path):
    """Each chunk is within bounds; together they would fill the memory."""
    steps = pack_integers(np.arange(10_000))
    with contextlib.closing(sqlite3.connect(path)) as database:
        (stream,) = database.execute("SELECT id FROM stream WHERE kind = 'train'").fetchone()
        database.execute("DELETE FROM chunk")
        database.execute("DELETE FROM part")
        zeros = bytes(len(FLOAT_FIELDS) * 40), bytes(len(COUNT_FIELDS) * 80)
        for number in range(400):
            database.execute(
                "INSERT INTO chunk VALUES (?, ?, ?, 10000, 10000, 0, ?, ?)",
                (number, stream, number * 10_000, steps, steps),
            )
            for place, data in ((0, zeros[0]), (len(FLOAT_FIELDS), zeros[1])):
                database.execute(
                    "INSERT INTO part VALUES (?, 'same', ?)", (number * 64 + place, data)
                )
        database.commit()
    with pytest.raises(StoreError, match="far more numbers"):
        RunReader(path).vital("max_logit")


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_refused_at_once(tmp_path, make):
    path = tmp_path / "run.vitals"
    make(path)
    for open_it in (RunReader, Store):
        with pytest.raises(StoreError, match="a pipe, a socket or a device"):
            open_it(path)


@pytest.mark.parametrize("end", ["-wal", "-shm", "-journal"])
def test_link_next_to_a_run_is_not_written_through(path, tmp_path, end):
    target = tmp_path / "precious.txt"
    target.write_text("mine")
    path.with_name(f"run.vitals{end}").symlink_to(target)
    for open_it in (RunReader, Store):
        with pytest.raises(StoreError, match="is a link"):
            open_it(path)
    assert target.read_text() == "mine"


def test_journal_that_names_another_file_is_refused(path, tmp_path):
    """SQLite would delete the file that it names."""
    target = tmp_path / "precious.txt"
    target.write_text("mine")
    magic = bytes.fromhex("d9d505f920a163d7")
    path.with_name("run.vitals-journal").write_bytes(magic + bytes(504) + magic)
    for open_it in (RunReader, Store):
        with pytest.raises(StoreError, match="names another file"):
            open_it(path)


def test_half_a_character_in_a_name_can_be_printed(path):
    change(path, ("UPDATE attribute SET value = ? WHERE name = 'model'", ('"a\\ud800b"',)))
    assert RunReader(path).attributes.model.encode()


def test_question_of_the_caller_is_no_damage(path):
    reader = RunReader(path)
    for ask in (
        lambda: reader.heads("nothing", "entropy"),
        lambda: reader.heads("decoder.cross", "nothing"),
        lambda: reader.series("decoder.cross", 99, "entropy"),
        lambda: reader.vital("nothing"),
    ):
        with pytest.raises(ValueError, match=r"there is no vital|no train readings|it has heads"):
            ask()


def test_locked_run_is_named(path, monkeypatch):
    monkeypatch.setattr("scaledot.watch.store.looking.LOCK_TIMEOUT", 0.05)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreError, match="locked by another process"):
            RunReader(path)
        other.execute("ROLLBACK")
    read_all(path)


def test_a_file_that_goes_while_it_is_opened_is_no_run(tmp_path, monkeypatch):
    def gone(path):
        raise FileNotFoundError(2, "No such file or directory", str(path))

    path = tmp_path / "r.vitals"
    path.write_bytes(b"")
    monkeypatch.setattr(looking.schema, "check_files", gone)
    with pytest.raises(StoreError, match="there is no run"), looking.look(path):
        pass
