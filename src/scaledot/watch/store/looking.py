"""Opening a run to look at it: read-only, for a moment, and without leaving a trace.

Every look is a connection of its own. A viewer that stays open for days holds no lock, keeps no
deleted file alive, and does not hinder the writer from tidying up at its end.

A run may be damaged, or come from somebody else: whatever goes wrong inside a look is a StoreError
that names the file, and `allowance` limits what a look may cost.
"""

import contextlib
import shutil
import sqlite3
import tempfile
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from scaledot.printable import one_line, typed
from scaledot.watch.store import schema
from scaledot.watch.store.allowance import Allowance, Excess
from scaledot.watch.store.schema import Database, StoreError

LOCK_TIMEOUT = 5.0
REFUSALS = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
CORRUPT = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
TROUBLE = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_PERM, *REFUSALS)
# What reading of flipped or missing bytes raises.
DAMAGE = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
    AssertionError,
    zlib.error,
)
LONGEST = 200  # characters of a reason
# SQLite's own limits, far above what a run needs.
LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 32 * 2**20,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 64 * 2**10,
    sqlite3.SQLITE_LIMIT_COLUMN: 100,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 50,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 1,
}
LOGGED = b"\2\2"  # in the header of a file that is written with a log
INSTRUCTIONS = 20_000  # of SQLite's between two looks at the clock


class NoSuchSeries(ValueError):
    """The caller asks for a layer, a head or a vital that the run does not have."""


@contextmanager
def look(path: Path) -> Generator[Database]:
    """Open the run at one moment: everything read inside belongs together.

    Raises StoreError for whatever is wrong with the file.
    """
    try:
        path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        schema.check_files(path)
        with _opened(path) as database:
            yield database
    except NoSuchSeries:
        raise
    except Excess as error:
        raise _damaged(path, str(error)) from error
    except sqlite3.Error as error:
        raise _in_words(path, error) from error
    except OSError as error:
        raise _unreadable(path, error) from error
    except DAMAGE as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error


def damage_of(path: Path, error: BaseException) -> StoreError | None:
    """Say in words that the file is damaged, where SQLite says so; None for any other error."""
    # The bytes of a broken schema stand in SQLite's own message, which Python cannot decode then.
    corrupt = isinstance(error, sqlite3.Error) and _code(error) in CORRUPT
    return _damaged(path, str(error)) if corrupt or isinstance(error, UnicodeError) else None


@contextmanager
def _opened(path: Path) -> Generator[Database]:
    try:
        database = _begun(path, "mode=ro&immutable=1" if _lost_its_log(path) else "mode=ro")
    except sqlite3.OperationalError as error:
        if _code(error) not in REFUSALS:
            raise
        # SQLite wants to write next to a file that was in use when it was last closed, or when its
        # writer was killed, and may not.
        with _aside(path) as database:
            yield database
        return
    with contextlib.closing(database):
        yield database


def _lost_its_log(path: Path) -> bool:
    """Whether it was copied or moved without its log: SQLite would make a new one next to it.

    A file that is written has one.
    """
    if schema.companions(path):
        return False
    with path.open("rb") as file:
        return file.read(20)[18:] == LOGGED


@contextmanager
def _aside(path: Path) -> Generator[Database]:
    """Open a file in a folder that takes none: as it is, or with its log from a copy."""
    companions = [name for name in schema.companions(path) if not name.name.endswith("-shm")]
    if not companions:
        with contextlib.closing(_begun(path, "mode=ro&immutable=1")) as database:
            yield database
        return
    with tempfile.TemporaryDirectory(prefix="scaledot-") as folder:
        real = path.resolve()
        for name in (real, *companions):
            shutil.copyfile(name, Path(folder, name.name))
        with contextlib.closing(_begun(Path(folder, real.name), "mode=rw", path)) as database:
            yield database


def _begun(path: Path, options: str, shown: Path | None = None) -> Database:
    """shown: the path that the user knows, where this one is a copy."""
    database = schema.connect(path, options, LOCK_TIMEOUT)
    try:
        allowance = database.allowance = Allowance(_size(path))
        database.set_progress_handler(allowance.out_of_time, INSTRUCTIONS)
        for limit, value in LIMITS.items():
            database.setlimit(limit, value)
        # A run may come from somebody else: its schema shall call no function with effects.
        database.execute("PRAGMA trusted_schema = OFF")
        database.execute("PRAGMA cell_size_check = ON")
        database.execute("BEGIN")
        schema.check(database, shown or path)
    except BaseException:
        database.close()
        raise
    return database


def _size(path: Path) -> int:
    """Bytes on the disk: a file with holes announces more."""
    found = [name.stat() for name in (path, *schema.companions(path))]
    return sum(min(one.st_size, getattr(one, "st_blocks", 2**62) * 512) for one in found)


def _code(error: sqlite3.Error) -> int:
    """SQLite's primary result code; -1 where Python itself raised."""
    code = getattr(error, "sqlite_errorcode", None)
    return -1 if code is None else code & 0xFF


def _in_words(path: Path, error: sqlite3.Error) -> StoreError:
    code = _code(error)
    if code in BUSY:
        return StoreError(f"{path} is locked by another process ({error}); try again in a moment")
    if code in TROUBLE:
        return _unreadable(path, error)
    if code == sqlite3.SQLITE_INTERRUPT:
        return _damaged(path, "to read it takes far longer than a file of its size should")
    return _damaged(path, str(error))


def _unreadable(path: Path, error: Exception) -> StoreError:
    if isinstance(error, FileNotFoundError | NotADirectoryError):  # also if it goes meanwhile
        return StoreError(
            f"there is no run at {path}; `scaledot run --store {typed(path)} SCRIPT` writes one"
        )
    return StoreError(f"{path} cannot be read: {error}; look at its permissions and at its disk")


def _damaged(path: Path, reason: str) -> StoreError:
    reason = one_line(reason if len(reason) <= LONGEST else f"{reason[:LONGEST]}…")
    return StoreError(
        f"{path} is damaged ({reason}); give another copy of it, or save what is left: "
        f"sqlite3 {typed(path)} .recover"
    )
