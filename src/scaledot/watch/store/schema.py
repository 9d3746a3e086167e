"""The file of a run: an SQLite database that says itself what it holds.

The comments inside the CREATE statements are kept by SQLite: `sqlite3 run.vitals .schema` prints
this documentation, and the table `about` says how the packed columns are read.

Records of one make (the vitals of the same layers in the same phase, or scalars of the same names)
form a *stream*. A stream is cut into *chunks*, and a chunk's numbers lie in *parts*. A commit adds
its records as a small chunk; when enough are there, one full chunk takes the place of the small
ones (`tail`). So little of SQLite's pages is wasted, whatever the model's size; one row a step
would waste up to half of the file. In a full chunk of a large model each field is a part by itself:
who looks at one vital of a long run reads a small part of the file.
"""

import contextlib
import os
import sqlite3
import stat
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from scaledot.watch.store.allowance import Allowance

APPLICATION_ID = int.from_bytes(b"Sdot")
VERSION = 2  # raised when an older scaledot could no longer read the file; new vitals do not
OLDEST = 2  # that is still read; format 1 was never part of a release

COMPANIONS = ("-wal", "-shm", "-journal")  # what SQLite keeps next to a file while it is written
MOST_TABLES = 100  # every look reads what tables there are
JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")

SCALARS = "scalars"  # the kind of a stream that is not a phase

# Ids are made by the writer, so that what a failed commit tried can simply be tried again:
# id = segment * IDS_A_SEGMENT + number.
IDS_A_SEGMENT = 1 << 32
PARTS_A_CHUNK = 64  # id of a part = chunk * PARTS_A_CHUNK + place

ABOUT = """\
The vital signs of a training run's attention heads, written by scaledot. Open it with
`scaledot top FILE`, or in Python with scaledot.watch.store.RunReader.

To read it without scaledot: a chunk of vitals holds n = chunk.records steps of the layers listed
in its stream; H is the sum of their heads. Its fields are those of segment.float_fields (float32)
followed by those of segment.count_fields (int64), all little-endian; a field is an array [n, H],
the heads of the first layer first. Where chunk.split is 1, the field at place p is the part
chunk.id * 64 + p. Where it is 0, part chunk.id * 64 holds all float fields, [fields, n, H], and
part chunk.id * 64 + (number of float fields) all counts. A chunk of scalars has one part,
chunk.id * 64: float64 [names, n]. part.packing: `raw`, the array; `same`, all n records are equal
and one is kept; `shuffled`, zlib of the first byte of every number, then the second byte of every
number, and so on; `deltas`, each record less the one before it, the first less zero, then shuffled.
chunk.steps and chunk.times (microseconds since 1970; scalars have none) are int64 [n], packed as
deltas.
"""

TABLES = """
CREATE TABLE about (
    -- What this file is, for whoever opens it without scaledot.
    name TEXT PRIMARY KEY,
    text TEXT NOT NULL
);
CREATE TABLE segment (
    -- One row for each process that wrote here: the run, then every continuation of it, whose
    -- steps may overlap.
    id INTEGER PRIMARY KEY,
    started REAL NOT NULL,  -- seconds since 1970
    seen REAL NOT NULL,  -- time of the last commit
    ended REAL,  -- NULL: still writing, or killed
    dropped INTEGER NOT NULL DEFAULT 0,  -- readings and scalars that the disk did not take
    float_fields TEXT NOT NULL,  -- JSON array: the vitals in chunk.data, in this order
    count_fields TEXT NOT NULL  -- JSON array: the vitals in chunk.counts, in this order
);
CREATE TABLE attribute (
    -- What is known of a segment: command, versions, model, and more.
    segment INTEGER NOT NULL REFERENCES segment(id),
    name TEXT NOT NULL,
    value TEXT NOT NULL,  -- JSON
    PRIMARY KEY (segment, name)
) WITHOUT ROWID;
CREATE TABLE stream (
    -- A sequence of records of one make.
    id INTEGER PRIMARY KEY,  -- segment * 2^32 + number
    segment INTEGER NOT NULL REFERENCES segment(id),
    kind TEXT NOT NULL,  -- 'train' or 'eval': vitals of that phase; 'scalars'
    content TEXT NOT NULL  -- JSON array: of [module path, number of heads]; of the scalars' names
);
CREATE TABLE chunk (
    -- Consecutive records of a stream; the table `about` says how the blobs are packed.
    id INTEGER PRIMARY KEY,  -- segment * 2^32 + number
    stream INTEGER NOT NULL REFERENCES stream(id),
    first INTEGER NOT NULL,  -- how many records of the stream came before
    records INTEGER NOT NULL,
    last_step INTEGER NOT NULL,  -- the largest of its steps
    split INTEGER NOT NULL,  -- 1: each field is a part by itself
    steps BLOB NOT NULL,
    times BLOB
);
CREATE INDEX chunk_stream ON chunk(stream, first);
CREATE TABLE part (
    -- The numbers of a chunk, or of one field of it.
    id INTEGER PRIMARY KEY,  -- chunk * 64 + place of its first field
    packing TEXT NOT NULL,  -- 'raw', 'same', 'shuffled' or 'deltas'
    data BLOB NOT NULL
);
"""
# Came later, within format 2: a file without it has no alarms, and gets the table when it is
# continued. An older scaledot reads a file that has it, and does not look at it.
ALARMS = """
CREATE TABLE IF NOT EXISTS alarm (
    -- What the rules of scaledot.watch.alarms said while the run was trained, in order.
    id INTEGER PRIMARY KEY,  -- segment * 2^32 + number
    segment INTEGER NOT NULL REFERENCES segment(id),
    step INTEGER NOT NULL,
    grade TEXT NOT NULL,  -- 'note', 'warn' or 'act'
    kind TEXT NOT NULL,
    layer TEXT NOT NULL,
    alarm TEXT NOT NULL  -- JSON: all of it, also value, threshold, heads, words and advice
)
"""


ANOTHER = "Give the file that `scaledot run --store FILE` wrote"


class StoreError(Exception):
    """The file is not a run that can be read or continued; the message says what to do."""


class Database(sqlite3.Connection):
    """A connection; that of a reader has an allowance, for a run may come from somebody else."""

    allowance: Allowance | None = None

    def spend(self, what: str, amount: int) -> None:
        """Raise Excess where a reader needs more than the file's size justifies."""
        if self.allowance is not None:
            self.allowance.spend(what, amount)


def connect(path: Path, options: str, timeout: float) -> Database:
    """Open the file. Transactions are begun by hand. options: of SQLite's URI, as `mode=ro`."""
    check_files(path)
    # as_uri quotes what has a meaning in a URI: a run may be called «50% dropout?.vitals».
    uri = f"{path.absolute().as_uri()}?{options}"
    return sqlite3.connect(uri, uri=True, timeout=timeout, isolation_level=None, factory=Database)


def check_files(path: Path) -> None:
    """Raise StoreError unless the run and the files that SQLite keeps next to it are files.

    Opening a pipe would wait forever, and SQLite would write through a link.
    """
    if path.is_dir():
        raise StoreError(f"{path} is a folder; a run is one file, such as {path / 'run.vitals'}")
    if path.exists() and not path.is_file():
        raise StoreError(f"{path} is a pipe, a socket or a device; give the file of a run")
    for name in companions(path):
        if not stat.S_ISREG(os.lstat(name).st_mode):
            raise StoreError(f"{name} is a link or no file; remove it, then {path} can be opened")
    journal = Path(f"{os.path.realpath(path)}-journal")
    if journal.exists() and _names_another(journal):
        raise StoreError(
            f"{journal} names another file, as no journal of scaledot does; remove it, then {path} "
            "can be opened"
        )


def companions(path: Path) -> list[Path]:
    """The files that SQLite keeps next to a database; of a link, next to what it points to."""
    real = os.path.realpath(path)
    return [name for end in COMPANIONS if os.path.lexists(name := Path(f"{real}{end}"))]


def _names_another(journal: Path) -> bool:
    """Whether it ends with the name of a super-journal, a file that SQLite would delete."""
    with journal.open("rb") as file:
        file.seek(max(journal.stat().st_size - len(JOURNAL_MAGIC), 0))
        return file.read() == JOURNAL_MAGIC


@contextmanager
def transaction(database: sqlite3.Connection) -> Generator[None]:
    """All of the block or nothing of it."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:  # SQLite has already rolled back where the disk failed
            database.execute("ROLLBACK")
        raise


def prepare(database: sqlite3.Connection, path: Path) -> None:
    """Make an empty file a store; refuse whatever is neither empty nor a store."""
    if not _is_empty(database, path):
        check(database, path)
        if not has_alarms(database):
            with transaction(database):
                database.execute(ALARMS)
        return
    database.execute("PRAGMA page_size = 4096")
    # An empty file has nothing to lose: do not wait for the disk until it is a store.
    database.execute("PRAGMA synchronous = OFF")
    with transaction(database):
        if _is_empty(database, path):  # another process may have been faster
            for statement in TABLES.split(";\n"):
                database.execute(statement)
            database.execute(ALARMS)
            about = [("format", ABOUT), ("run", uuid.uuid4().hex)]
            database.executemany("INSERT INTO about VALUES (?, ?)", about)
            database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            database.execute(f"PRAGMA user_version = {VERSION}")
    check(database, path)


def has_alarms(database: sqlite3.Connection) -> bool:
    """Whether the file has the table of alarms."""
    found = database.execute("SELECT count(*) FROM sqlite_master WHERE name = 'alarm'").fetchone()
    return bool(found[0])


def check(database: sqlite3.Connection, path: Path) -> None:
    """Raise StoreError unless this is a store that this version of scaledot understands."""
    if _pragma(database, path, "application_id") != APPLICATION_ID:
        empty = _is_empty(database, path)
        what = "holds no run yet" if empty else "is an SQLite database, but not a run of scaledot"
        raise StoreError(f"{path} {what}; give the file that `scaledot run --store FILE` wrote")
    version = _pragma(database, path, "user_version")
    if version > VERSION:
        raise StoreError(
            f"{path} was written by a newer scaledot (format {version}, this one knows {VERSION}); "
            "type: pip install --upgrade scaledot"
        )
    if version < OLDEST:
        raise StoreError(
            f"{path} was written by a scaledot from before its first release (format {version}, "
            f"this one reads {OLDEST} to {VERSION}); choose another file name and run again"
        )
    _check_tables(database, path)


def _check_tables(database: sqlite3.Connection, path: Path) -> None:
    """Raise StoreError where a name is no plain table: a view, a computed column or a trigger
    could run anything that its author wished, whenever the file is read or continued.
    """
    expected = _expected()
    made = dict(database.execute("SELECT name, type FROM sqlite_master WHERE type != 'index'"))
    if len(made) > MOST_TABLES:
        raise StoreError(
            f"{path} is no run that scaledot wrote: it has {len(made)} tables. {ANOTHER}"
        )
    for name, columns in expected.items():
        kind = made.get(name)
        if kind is None and name == "alarm":
            continue
        if kind != "table":
            what = f"{name} is a {kind}" if kind else f"it has no table {name}"
            raise StoreError(f"{path} is no run that scaledot wrote: {what}. {ANOTHER}")
        found = _columns_of(database, name)
        if not set(columns) <= set(found) or any(computed for _, computed in found):
            raise StoreError(
                f"{path} is no run that scaledot wrote: table {name} has other columns. {ANOTHER}"
            )
    if "trigger" in made.values():
        raise StoreError(f"{path} is no run that scaledot wrote: it has a trigger. {ANOTHER}")


@cache
def _expected() -> dict[str, list[tuple[str, int]]]:
    """The columns of every table of this version."""
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        database.executescript(TABLES + ALARMS)
        names = [name for (name,) in database.execute("SELECT name FROM sqlite_master")]
        return {name: found for name in names if (found := _columns_of(database, name))}


def _columns_of(database: sqlite3.Connection, table: str) -> list[tuple[str, int]]:
    """Names, and whether they are computed; [] where SQLite knows no such table."""
    rows = database.execute("SELECT name, hidden FROM pragma_table_xinfo(?)", (table,))
    return rows.fetchall()


def _is_empty(database: sqlite3.Connection, path: Path) -> bool:
    return (
        _pragma(database, path, "application_id") == 0
        and _pragma(database, path, "user_version") == 0
        and database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
    )


def _pragma(database: sqlite3.Connection, path: Path, name: str) -> int:
    try:
        return database.execute(f"PRAGMA {name}").fetchone()[0]
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_NOTADB:
            raise
        raise StoreError(
            f"{path} is not a run of scaledot (not an SQLite file); choose another file name"
        ) from error
