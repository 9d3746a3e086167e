"""`Store`: readings go to the disk in a thread of their own; the training never waits for it."""

import atexit
import contextlib
import dataclasses
import errno
import json
import logging
import os
import shutil
import sqlite3
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scaledot.fields import COUNT_FIELDS, FLOAT_FIELDS
from scaledot.watch.alarms.alarm import Alarm, as_json
from scaledot.watch.reading import DISK, Reading, RunAttributes, Scalar
from scaledot.watch.store import looking, ownership, schema
from scaledot.watch.store.queue import Queue
from scaledot.watch.store.schema import IDS_A_SEGMENT, PARTS_A_CHUNK, StoreError
from scaledot.watch.store.tail import Rows, Tail

INTERVAL = 0.5  # seconds between commits: a killed run loses less than the last second
RETRY = 2.0  # seconds between attempts while the disk refuses
LOCK_TIMEOUT = 5.0  # how long a commit waits for another process's lock
QUEUE_BYTES = 32 * 2**20
SLOW = 0.2  # seconds: a disk that takes longer to empty the log is asked less often
FORK_PATIENCE = 0.5  # seconds that a fork waits for a commit
FULL = 64 * 2**10  # bytes that are free on a disk that takes nothing more
NO_ROOM = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
LAST_TRIES = 20  # to put the log away at the end, while a viewer looks at it

log = logging.getLogger("scaledot.watch")


class Store:
    """One run's file, opened for writing. A file that already holds the run gets a new segment.

    A file has one writer: where another store writes it, in this or in another process, this one
    makes a file of its own next to it, says so, and `path` is that file. A run that was killed
    writes no more, so its file is continued. Where the file system has no locks, a run that has not
    ended and wrote within the last minute is taken for a living one.

    `write` never blocks and never raises because of the disk. While the disk is slow, readings
    wait in a queue of bounded size; what does not fit is dropped and counted (`dropped`, also in
    the file). When the disk fails, one warning is logged, `broken` says why, and the thread tries
    again every two seconds; a file that was deleted or replaced stays so.

    A process forked from this one holds a copy of this object. There it does nothing: the
    connection belongs to the parent. Open another file in the child.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        attributes: RunAttributes | None = None,
        *,
        queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        """Raises StoreError where the file is something else, or damaged; whatever else fails is
        `broken`."""
        self.path = Path(path).absolute()
        self.segment: int | None = None  # None: the disk has not taken it yet
        self.broken: str | None = None
        self._queue = Queue(queue_bytes)
        self._notes = _as_notes(attributes or RunAttributes.here())
        self._started = time.time()
        self._real = self.path  # without links; SQLite's other files are next to it
        self._file: ownership.Identity | None = None  # that this store holds
        self._companions: dict[Path, ownership.Identity] = {}  # SQLite's files of ours
        self._committed = False  # whether the first readings are on the disk
        self._unwritten = 0  # readings and scalars that the thread has taken
        self._next_tidy = 0.0
        self._logged = False  # whether the log has something in it
        self._gone = False  # the file was deleted or replaced: do not try again
        self._warned = False
        self._trouble: dict[str, Any] = {}  # as reading.DISK keeps it
        self._dropped_written = 0
        self._process = os.getpid()
        self._at_work = threading.Lock()  # the thread is inside SQLite
        self._wake = threading.Event()
        self._settled = threading.Condition()
        self._asked = self._answered = 0  # flushes
        self._ending = self._over = False  # asked to end; has ended
        self._thread = threading.Thread(target=self._work, name="scaledot-store", daemon=True)
        self._begin()
        _stores.add(self)
        self._thread.start()
        atexit.register(self.close)

    def write(self, readings: Sequence[Reading] = (), scalars: Sequence[Scalar] = ()) -> bool:
        """Take a step's readings and scalars; False where they had to be dropped.

        Give all readings of a step in one call: they share one record of the file.
        """
        if self._foreign or self._ending:
            return False
        numbers = [Scalar(int(step), str(name), float(value)) for step, name, value in scalars]
        if self._gone:
            self._queue.drop(readings, numbers)
            return False
        taken = self._queue.put(readings, numbers)
        # The first readings are there at once, however soon the run is killed.
        if (self._queue.half_full or not self._committed) and self.broken is None:
            self._wake.set()
        return taken

    def write_alarms(self, alarms: Sequence[Alarm]) -> None:
        """Keep what the rules said."""
        if not (self._foreign or self._ending or self._gone):
            self._queue.put_alarms(alarms)

    def note(self, name: str, value: Any) -> None:
        """Keep an attribute of the run that was not known at its start; value: as for JSON."""
        if not self._foreign:
            self._queue.put_note(name, json.dumps(value))

    @property
    def dropped(self) -> int:
        """Readings and scalars that were lost because the disk was too slow or failed."""
        return self._queue.dropped

    def flush(self, timeout: float = 10.0) -> bool:
        """Wait until all that was written so far is on the disk; False where it is not."""
        if self._foreign:
            return False
        with self._settled:
            self._asked += 1
            ticket = self._asked
            self._wake.set()
            self._settled.wait_for(lambda: self._over or self._answered >= ticket, timeout)
            return self._answered >= ticket and self.broken is None

    def close(self, timeout: float = 10.0) -> None:
        """Write the rest and end the thread; gives up after the timeout if the disk hangs."""
        if self._foreign:
            return
        atexit.unregister(self.close)
        self._ending = True
        self._wake.set()
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._warn(f"the disk did not answer within {timeout:g} s")

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def _foreign(self) -> bool:
        """Is this a forked process's copy? Its thread and its locks are dead: touch neither."""
        return os.getpid() != self._process

    def _begin(self) -> None:
        """Make the file and the segment now, so that the caller hears of a wrong file at once."""
        try:
            self._connect().close()
        except BaseException as error:
            damage = looking.damage_of(self.path, error)
            if damage is None and isinstance(error, sqlite3.Error | OSError):
                self._fail(error)
                return
            self._release()
            if damage is not None:
                raise damage from error
            raise

    def _work(self) -> None:
        # The connection lives in this frame alone: in a forked child the frame is never left, so
        # nothing there can close what the parent writes.
        database: sqlite3.Connection | None = None
        tail = Tail()
        while True:
            self._wake.wait(INTERVAL if self.broken is None else RETRY)
            self._wake.clear()
            ending, asked = self._ending, self._asked  # before the queue is emptied
            with self._at_work:
                database = self._work_once(database, tail, ending)
                if database is not None and not ending:
                    self._tidy(database)
            last = self._gone or (ending and (self.broken is not None or not self._queue))
            with self._settled:
                self._answered, self._over = asked, last
                self._settled.notify_all()
            if last:
                break
            if ending:  # a last commit that was a repetition has left the queue full
                self._wake.set()
        if database is not None:
            _finish(database)
        self._sweep()
        self._release()

    def _work_once(
        self, database: sqlite3.Connection | None, tail: Tail, ending: bool
    ) -> sqlite3.Connection | None:
        """Write what waits; gives back the connection to use next time."""
        try:
            database = database or self._connect()
            self._write_down(database, tail, ending)
            self._heal()
            return database
        except Exception as error:  # whatever it is, the training goes on
            self._fail(error)
            if database is not None and self._gone:
                self._next_tidy = 0.0
                self._tidy(database)  # our file may live on under another name
            elif database is not None and ending:
                self._write_the_end_in_place(database)
            _closed(database)
            return None

    def _connect(self) -> sqlite3.Connection:
        if self._gone:
            raise StoreError(self.broken or "the file is gone")
        if self._file is None:
            self._hold()
        self._same_file()
        database = schema.connect(self._real, "mode=rw", LOCK_TIMEOUT)
        try:
            schema.prepare(database, self.path)
            _choose_journal(database)
            if self.segment is None:
                self.segment = self._new_segment(database)
            self._same_file()
            self._companions = _companions(self._real)
            self._same_file()
        except BaseException:
            _closed(database)
            raise
        return database

    def _hold(self) -> None:
        """Become the one writer of the file, or of another one where this has a writer."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        schema.check_files(self.path)
        held = ownership.hold(self.path)
        if held is None:
            wanted = self.path
            self.path = ownership.name_of_its_own(wanted)
            log.warning(
                "scaledot: another run writes %s now, so this one goes to %s", wanted, self.path
            )
            held = ownership.hold(self.path)
        self._file, self._real = held, self.path.resolve()

    def _release(self) -> None:
        if self._file is not None:
            ownership.release(self._file)

    def _tidy(self, database: sqlite3.Connection) -> None:
        """Move the log into the file and empty it.

        A log that has something in it is the danger when another file takes the name: whatever
        opens that file with SQLite would write our log into it.
        """
        began = time.monotonic()
        if not self._logged or began < self._next_tidy:
            return
        try:
            database.execute("PRAGMA busy_timeout = 0")  # a viewer looks at it: next time
            try:
                (busy, *_) = database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                self._logged = bool(busy)
            finally:
                database.execute(f"PRAGMA busy_timeout = {round(LOCK_TIMEOUT * 1000)}")
        except sqlite3.Error:
            log.debug("the log of %s is not emptied", self.path, exc_info=True)
        if (took := time.monotonic() - began) > SLOW:
            self._next_tidy = time.monotonic() + 10 * took

    def _sweep(self) -> None:
        """Remove the log of a file that is gone: it does not belong to the one that took its name.

        SQLite keeps it, for it knows that its own file is not there any more.
        """
        with contextlib.suppress(OSError):
            if not self._gone and ownership.identity(self._real) == self._file:
                return
            for name, ours in self._companions.items():
                if _identity_of(name) == ours:
                    name.unlink()

    def _new_segment(self, database: sqlite3.Connection) -> int:
        fields = json.dumps(FLOAT_FIELDS), json.dumps(COUNT_FIELDS)
        with schema.transaction(database):
            (segment,) = database.execute(
                "INSERT INTO segment (started, seen, float_fields, count_fields)"
                " VALUES (?, ?, ?, ?) RETURNING id",
                (self._started, time.time(), *fields),
            ).fetchone()
            _write_notes(database, segment, self._notes)
        return segment

    def _write_down(self, database: sqlite3.Connection, tail: Tail, ending: bool) -> None:
        """One commit: all that waits in the queue, or again what the last attempt did not write."""
        assert self.segment is not None
        self._same_file()
        if self.broken is None or not tail:
            for readings, scalars in self._queue.take():
                tail.add_readings(readings)
                tail.add_scalars(scalars)
                self._unwritten += len(readings) + len(scalars)
        dropped = self._queue.dropped
        if self.broken is not None and dropped > self._dropped_written:
            self._queue.put_note(DISK, json.dumps({**self._trouble, "until": time.time()}))
        notes = self._queue.notes()
        alarms = self._queue.alarms()
        if not (tail or notes or alarms or ending or dropped > self._dropped_written):
            return
        with schema.transaction(database):
            _write_rows(database, tail.rows(self.segment))
            _write_notes(database, self.segment, notes)
            _write_alarms(database, self.segment, alarms)
            now = time.time()
            database.execute(
                "UPDATE segment SET seen = ?, dropped = ?, ended = ? WHERE id = ?",
                (now, dropped, now if ending else None, self.segment),
            )
        self._dropped_written = dropped
        self._committed = self._committed or bool(tail)
        self._logged = True
        self._unwritten = 0
        tail.written()
        self._queue.notes_written(notes)
        self._queue.alarms_written(alarms)

    def _write_the_end_in_place(self, database: sqlite3.Connection) -> None:
        """Keep that the run ended, and how much was lost, on a disk that takes nothing more.

        Without a log: the row has its place in the file, so no byte more is needed. Only a crash of
        the machine in this very moment could harm the file.
        """
        assert self.segment is not None
        self._queue.discard()
        self._queue.lose(self._unwritten)
        try:
            database.execute("PRAGMA journal_mode = MEMORY")
            with schema.transaction(database):
                database.execute(
                    "UPDATE segment SET dropped = ?, ended = ? WHERE id = ?",
                    (self._queue.dropped, time.time(), self.segment),
                )
            with schema.transaction(database):  # mostly its page has room; else this alone fails
                _write_notes(database, self.segment, {DISK: json.dumps(self._trouble)})
        except sqlite3.Error:
            log.debug("the end of %s could not be kept", self.path, exc_info=True)

    def _same_file(self) -> None:
        """Writing into a deleted file succeeds, so it must be looked for."""
        if ownership.identity(self._real) != self._file:
            self._gone = True
            self._queue.discard()
            raise StoreError(f"{self.path} was deleted or replaced")

    def _fail(self, error: Exception) -> None:
        reason = str(error) or type(error).__name__
        full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
        full = full or getattr(error, "errno", None) in NO_ROOM
        with contextlib.suppress(OSError):
            full = full or shutil.disk_usage(self._real.parent).free < FULL
        if full:
            reason = f"its disk is full ({reason})"
        if self.broken is None:
            self._trouble = {"full": full, "since": time.time(), "until": None}
        self._trouble["full"] |= full
        self.broken = reason if str(self.path) in reason else f"{self.path}: {reason}"
        self._warn(reason)

    def _warn(self, reason: str) -> None:
        """Once. A log record and no Python warning: those can be set to raise."""
        if not self._warned:
            self._warned = True
            log.warning(
                "scaledot cannot write %s: %s. The training goes on; its vitals are %s.",
                self.path,
                reason,
                "not kept" if self._gone else "kept in memory while they fit",
            )

    def _heal(self) -> None:
        if self.broken is not None:
            self.broken = None
            log.info("scaledot writes %s again", self.path)


def _choose_journal(database: sqlite3.Connection) -> None:
    """Write-ahead log, or the rollback journal where the file system has no shared memory."""
    try:
        (mode,) = database.execute("PRAGMA journal_mode = WAL").fetchone()
    except sqlite3.OperationalError:
        (mode,) = database.execute("PRAGMA journal_mode = DELETE").fetchone()
    # A log may lose its last commits when the power fails, but stays whole without waiting for the
    # disk; a rollback journal stays whole only if it waits. kill -9 costs neither anything.
    database.execute(f"PRAGMA synchronous = {'NORMAL' if mode == 'wal' else 'FULL'}")


def _finish(database: sqlite3.Connection) -> None:
    """Leave one plain file behind, which viewers can read in a read-only folder."""
    try:
        database.execute("PRAGMA busy_timeout = 200")
        for attempt in range(LAST_TRIES):  # a viewer may look at it right now
            try:
                database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                database.execute("PRAGMA journal_mode = DELETE")
                break
            except sqlite3.OperationalError:
                time.sleep(0.05 if attempt < LAST_TRIES - 1 else 0)
    finally:
        _closed(database)


def _wait_for_stores() -> None:
    """Let every store end its commit: a child forked in the midst of SQLite could not use it."""
    limit = time.monotonic() + FORK_PATIENCE
    for store in list(_stores):
        if store._at_work.acquire(timeout=max(limit - time.monotonic(), 0)):
            _waiting.append(store)


def _go_on() -> None:
    while _waiting:
        _waiting.pop()._at_work.release()


def _forget_stores() -> None:
    """In the child: they are the parent's."""
    _waiting.clear()
    _stores.clear()


_stores: weakref.WeakSet[Store] = weakref.WeakSet()
_waiting: list[Store] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_wait_for_stores, after_in_parent=_go_on, after_in_child=_forget_stores
    )


def _closed(database: sqlite3.Connection | None) -> None:
    if database is not None:
        try:
            database.close()
        except sqlite3.Error:
            log.debug("closing the store failed", exc_info=True)


def _identity_of(name: Path) -> ownership.Identity | None:
    """Of what has this name itself, be it a link."""
    try:
        status = name.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _companions(path: Path) -> dict[Path, ownership.Identity]:
    """The files of SQLite's that are next to it."""
    found = {name: _identity_of(name) for name in schema.companions(path)}
    return {name: one for name, one in found.items() if one is not None}


def _as_notes(attributes: RunAttributes) -> dict[str, str]:
    named = {
        field.name: getattr(attributes, field.name)
        for field in dataclasses.fields(attributes)
        if field.name != "more"
    }
    return {name: json.dumps(value) for name, value in {**attributes.more, **named}.items()}


def _write_rows(database: sqlite3.Connection, rows: Rows) -> None:
    database.executemany("INSERT OR REPLACE INTO stream VALUES (?, ?, ?, ?)", rows.streams)
    database.executemany("DELETE FROM chunk WHERE id = ?", [(chunk,) for chunk in rows.gone])
    database.executemany(
        "DELETE FROM part WHERE id >= ? AND id < ?",
        [(chunk * PARTS_A_CHUNK, (chunk + 1) * PARTS_A_CHUNK) for chunk in rows.gone],
    )
    database.executemany(
        "INSERT OR REPLACE INTO chunk VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows.chunks
    )
    database.executemany("INSERT OR REPLACE INTO part VALUES (?, ?, ?)", rows.parts)


def _write_alarms(database: sqlite3.Connection, segment: int, alarms: dict[int, Alarm]) -> None:
    database.executemany(
        "INSERT OR REPLACE INTO alarm VALUES (?, ?, ?, ?, ?, ?, ?)",
        [
            (
                segment * IDS_A_SEGMENT + number,
                segment,
                alarm.step,
                alarm.grade,
                alarm.kind,
                alarm.layer,
                json.dumps(as_json(alarm), allow_nan=False),
            )
            for number, alarm in alarms.items()
        ],
    )


def _write_notes(database: sqlite3.Connection, segment: int, notes: dict[str, str]) -> None:
    database.executemany(
        "INSERT OR REPLACE INTO attribute VALUES (?, ?, ?)",
        [(segment, name, value) for name, value in notes.items()],
    )
