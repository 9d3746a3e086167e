"""`BackgroundSink`: what every sink has in common. The training hands over and goes on."""

import atexit
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence

from scaledot.watch.reading import Reading, Scalar

INTERVAL = 0.5  # seconds between two looks at the queue: a step costs the training one append
MOST_WAITING = 8192  # readings and scalars; some 30 MB at 32 heads

log = logging.getLogger("scaledot.watch")


class BackgroundSink(ABC):
    """Takes readings at once, passes them on in a thread of its own.

    Nothing here blocks or raises in the training. What does not fit into the queue is dropped and
    counted in `dropped`. If the library behind the sink raises, the sink is switched off with one
    warning, and `off` says why. A forked process's copy of a sink does nothing.

    A sink implements `_take`, `_flush` and `_close`; all run in the thread, one at a time. Its
    `__init__` opens what it writes to, where an error still reaches the caller, and calls
    `super().__init__()` last.
    """

    def __init__(self) -> None:
        self.off: str | None = None
        self.dropped = 0
        self._queue: list[tuple[tuple[Reading, ...], tuple[Scalar, ...]]] = []
        self._waiting = 0  # of readings and scalars in the queue
        self._asked = self._answered = 0  # flushes
        self._ending = False
        self._told = False  # that it is closed
        self._process = os.getpid()
        self._changed = threading.Condition()
        name = f"scaledot-{type(self).__name__}"
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def write(self, readings: Sequence[Reading] = (), scalars: Sequence[Scalar] = ()) -> bool:
        """Take a step's readings and scalars; False where they had to be dropped."""
        if self._foreign:
            return False
        number = len(readings) + len(scalars)
        with self._changed:
            gone = self.off is not None or self._ending
            if gone or self._waiting + number > MOST_WAITING:
                self.dropped += number
                self._tell_that_it_is_closed()
                return False
            self._queue.append((tuple(readings), tuple(scalars)))
            self._waiting += number
        return True

    def put(self, reading: Reading) -> None:
        self.write((reading,))

    def scalar(self, step: int, name: str, value: float) -> None:
        self.write((), (Scalar(int(step), str(name), float(value)),))

    def flush(self, timeout: float = 10.0) -> bool:
        """Wait until all that was taken is passed on; False where it is not."""
        if self._foreign or not self._thread.is_alive():
            return False
        with self._changed:
            self._asked += 1
            ticket = self._asked
            self._changed.notify_all()
            answered = self._changed.wait_for(lambda: self._answered >= ticket, timeout)
        return answered and self.off is None

    def close(self, timeout: float = 30.0) -> None:
        """Pass on the rest and end; more than once is fine."""
        if self._foreign:
            return
        atexit.unregister(self.close)
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._switch_off(f"it did not end within {timeout:g} s")

    def __enter__(self) -> "BackgroundSink":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @abstractmethod
    def _take(self, readings: Sequence[Reading], scalars: Sequence[Scalar]) -> None:
        """Pass on; a step may come in several calls, in order."""

    def _tick(self) -> None:
        """Twice a second."""
        self._flush()

    @abstractmethod
    def _flush(self) -> None:
        """All that was taken must be where readers find it."""

    @abstractmethod
    def _close(self) -> None:
        """After the last flush, and after a failure."""

    @property
    def _foreign(self) -> bool:
        """Is this a forked process's copy? Its thread and its lock are dead: touch neither."""
        return os.getpid() != self._process

    def _work(self) -> None:
        ending = False
        while not ending and self.off is None:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._ending or self._asked > self._answered, INTERVAL
                )
                steps, self._queue, self._waiting = self._queue, [], 0
                ending, asked = self._ending, self._asked
            try:
                while steps:
                    self._take(*steps[0])
                    del steps[0]
                if ending or asked > self._answered:
                    self._flush()
                else:
                    self._tick()
            except Exception as error:  # whatever it is, the training goes on
                self.dropped += sum(len(part) for step in steps for part in step)
                self._switch_off(str(error) or type(error).__name__)
            with self._changed:
                self._answered = asked
                self._changed.notify_all()
        try:
            self._close()
        except Exception as error:
            self._switch_off(str(error) or type(error).__name__)

    def _tell_that_it_is_closed(self) -> None:
        if self._ending and not self._told:
            self._told = True
            log.warning(
                "scaledot's sink %s is closed and takes nothing more; to use one sink for several "
                "watches: Watch(..., close_sinks=False)",
                type(self).__name__,
            )

    def _switch_off(self, reason: str) -> None:
        """One warning, as a log record: Python's own warnings can be set to raise."""
        with self._changed:
            if self.off is not None:
                return
            self.off = reason
            self.dropped += self._waiting
            self._queue, self._waiting = [], 0
        log.warning(
            "scaledot's sink %s is switched off: %s. The training and the other sinks go on.",
            type(self).__name__,
            reason,
        )
