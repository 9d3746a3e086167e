"""Opening a run to look at it: read-only, for a moment, and without leaving a trace.

Every look is a connection of its own. A viewer that stays open for days holds no lock, keeps no
deleted file alive, and does not hinder the writer from tidying up at its end.
"""

import shutil
import sqlite3
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from scaledot.watch.store import schema
from scaledot.watch.store.schema import StoreError

LOCK_TIMEOUT = 5.0
REFUSALS = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
COMPANIONS = ("-wal", "-journal")  # what SQLite keeps beside a file that is being written


@contextmanager
def look(path: Path) -> Generator[sqlite3.Connection]:
    """The run at one moment: everything read inside belongs together."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StoreError(
            f"there is no run at {path}; `scaledot run --store {path} SCRIPT` writes one"
        ) from error
    except OSError as error:
        raise _unreadable(path, error) from error
    with _opened(path) as database:
        yield database


@contextmanager
def _opened(path: Path) -> Generator[sqlite3.Connection]:
    try:
        database = _begun(path, "mode=ro")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF not in REFUSALS:
            raise
        # SQLite wants to write beside a file that was in use when it was last closed, or when its
        # writer was killed, and may not.
        with _aside(path, error) as database:
            yield database
        return
    try:
        yield database
    finally:
        database.close()


@contextmanager
def _aside(path: Path, error: sqlite3.Error) -> Generator[sqlite3.Connection]:
    """A folder that takes no file: read the file as it is, or with its log from a copy."""
    companions = [name for end in COMPANIONS if (name := Path(f"{path}{end}")).exists()]
    try:
        with tempfile.TemporaryDirectory(prefix="scaledot-") as folder:
            if companions:
                for name in (path, *companions):
                    shutil.copyfile(name, Path(folder, name.name))
                database = _begun(Path(folder, path.name), "mode=rw")
            else:
                database = _begun(path, "mode=ro&immutable=1")
            try:
                yield database
            finally:
                database.close()
    except (sqlite3.OperationalError, PermissionError):
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> StoreError:
    return StoreError(f"{path} cannot be read: {error}; look at its permissions")


def _begun(path: Path, options: str) -> sqlite3.Connection:
    database = schema.connect(path, options, LOCK_TIMEOUT)
    try:
        # A run may come from somebody else: its schema shall call no function with effects.
        database.execute("PRAGMA trusted_schema = OFF")
        database.execute("BEGIN")
        schema.check(database, path)
    except BaseException:
        database.close()
        raise
    return database
