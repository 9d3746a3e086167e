"""The queue between the training and the disk: bounded in bytes, and honest about what it drops."""

import threading
from collections.abc import Sequence

from scaledot.watch.alarms.alarm import Alarm
from scaledot.watch.reading import Reading, Scalar

SCALAR_BYTES = 128  # what a tuple of an int, a name and a float takes in memory, roughly
MOST_ALARMS = 10_000  # that may wait for the disk; alarms are rare

Entry = tuple[Sequence[Reading], Sequence[Scalar]]


class Queue:
    """The lock is held for the time of an append or a swap, never while the disk works."""

    def __init__(self, limit: int) -> None:
        self.dropped = 0
        self._limit = limit
        self._size = 0
        self._entries: list[Entry] = []
        self._notes: dict[str, str] = {}
        self._alarms: dict[int, Alarm] = {}  # by number
        self._numbers = 0
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._entries)

    @property
    def half_full(self) -> bool:
        return self._size > self._limit // 2

    def put(self, readings: Sequence[Reading], scalars: Sequence[Scalar]) -> bool:
        size = sum(reading.floats.nbytes + reading.counts.nbytes for reading in readings)
        size += SCALAR_BYTES * len(scalars)
        with self._lock:
            # One entry always fits: a model larger than the queue is no reason to see nothing.
            if self._entries and self._size + size > self._limit:
                self.dropped += len(readings) + len(scalars)
                return False
            self._entries.append((tuple(readings), tuple(scalars)))
            self._size += size
            return True

    def drop(self, readings: Sequence[Reading], scalars: Sequence[Scalar]) -> None:
        self.lose(len(readings) + len(scalars))

    def lose(self, number: int) -> None:
        with self._lock:
            self.dropped += number

    def take(self) -> list[Entry]:
        with self._lock:
            entries, self._entries, self._size = self._entries, [], 0
        return entries

    def discard(self) -> None:
        for readings, scalars in self.take():
            self.drop(readings, scalars)

    def put_alarms(self, alarms: Sequence[Alarm]) -> None:
        with self._lock:
            for alarm in alarms[: MOST_ALARMS - len(self._alarms)]:
                self._alarms[self._numbers] = alarm
                self._numbers += 1

    def alarms(self) -> dict[int, Alarm]:
        with self._lock:
            return dict(self._alarms)

    def alarms_written(self, alarms: dict[int, Alarm]) -> None:
        with self._lock:
            for number in alarms:
                del self._alarms[number]

    def put_note(self, name: str, value: str) -> None:
        with self._lock:
            self._notes[name] = value

    def notes(self) -> dict[str, str]:
        with self._lock:
            return dict(self._notes)

    def notes_written(self, notes: dict[str, str]) -> None:
        """Forget them, unless a newer value came while they were written."""
        with self._lock:
            for name, value in notes.items():
                if self._notes.get(name) == value:
                    del self._notes[name]
