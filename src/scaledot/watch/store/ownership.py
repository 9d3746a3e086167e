"""Which process writes a store: an OS lock on the file itself, which ends with the process.

The lock belongs to the file and not to its name, so it goes with a file that is moved. It is a lock
of the open file description where the system has those (Linux), for the other kind is lost when any
descriptor of the file is closed: SQLite would lose its own locks. A forked child closes its copy.
"""

import contextlib
import os
import struct
import threading
import time
from pathlib import Path

from scaledot.watch.store.looking import look
from scaledot.watch.store.schema import StoreError
from scaledot.watch.store.tables import read_segments

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCKED_BYTE = 2**62  # far behind every byte that is written, and behind those that SQLite locks
# Where the file system has no locks, a run that has not ended and wrote this many seconds ago is
# taken for a living one.
LATELY = 60.0

Identity = tuple[int, int]  # device and inode

_held: dict[Identity, int] = {}  # the descriptors that hold this process's locks
_turn = threading.Lock()


def hold(path: Path) -> Identity | None:
    """Make this process the writer of the file, made if it is not there.

    None: another store writes it, here or in another process. Raises OSError where the file cannot
    be opened for writing.
    """
    with _turn:
        if identity(path) in _held:
            return None
        # The owner alone may read it: a command line may hold a secret.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if not _lock(descriptor, path):
                os.close(descriptor)
                return None
        except BaseException:
            os.close(descriptor)
            raise
        found = _of(os.fstat(descriptor))
        _held[found] = descriptor
        return found


def release(held: Identity) -> None:
    """Let another store write the file. Close the connection before."""
    with _turn:
        descriptor = _held.pop(held, None)
        if descriptor is not None:
            os.close(descriptor)


def identity(path: Path) -> Identity | None:
    """Of the file that has this name now; None: there is none."""
    try:
        return _of(path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return None


def name_of_its_own(path: Path) -> Path:
    """Make a new file: with the name, or with a number at its end where that is taken."""
    number, wanted = 1, path
    while True:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            return path
        except FileExistsError:
            number += 1
            path = wanted.with_name(f"{wanted.stem}-{number}{wanted.suffix}")


def _of(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino


def _lock(descriptor: int, path: Path) -> bool:
    """Whether nobody else has it."""
    try:
        if fcntl is None:
            return not _wrote_lately(path)
        if hasattr(fcntl, "F_OFD_SETLK"):
            kind, start = (fcntl.F_WRLCK, os.SEEK_SET), LOCKED_BYTE
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack("hhqqi0q", *kind, start, 1, 0))
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # a file system without locks
        return not _wrote_lately(path)
    return True


def _wrote_lately(path: Path) -> bool:
    with contextlib.suppress(StoreError), look(path) as database:
        segments = list(read_segments(database).values())
        last = segments[-1] if segments else None
        return last is not None and last.ended is None and time.time() - last.seen < LATELY
    return False


def _forked() -> None:
    """In the child: the locks are the parent's."""
    global _turn
    _turn = threading.Lock()
    for descriptor in _held.values():
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
