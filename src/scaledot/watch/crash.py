"""When a run ends badly: the last readings reach the store, and a record says what happened when.

An exception that nobody catches, SIGTERM, SIGHUP, a loss that is no number. The script notices
nothing of it: its traceback, its exit status and its own handlers stay as they are. `kill -9`
leaves no time for words; what survives it is the store's matter.
"""

import contextlib
import ctypes
import dataclasses
import logging
import math
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, get_args

from scaledot.watch.redact import redact_text

log = logging.getLogger("scaledot.watch")

Kind = Literal["exception", "interrupt", "signal", "loss"]
KINDS: tuple[Kind, ...] = get_args(Kind)
# What ends a run from outside; Windows has no SIGHUP, which a closed terminal sends.
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
NOTE = "crash"  # the attribute of a segment that keeps the records
PATIENCE = 5.0  # seconds that a dying process waits for the disk
SIGNAL_PATIENCE = 0.25  # after a signal: without a watch the process would be gone at once
_signals: Any = sys.modules["_signal"]  # what the module signal wraps in enums
OVER = b"\0"  # tells the listener that nothing more will come
LONGEST = 500  # characters of an exception that are kept


@dataclass(frozen=True)
class Crash:
    kind: Kind
    step: int  # that was running; of a loss: whose loss it was
    words: str
    time: float  # seconds since 1970

    @property
    def signal(self) -> str:
        """Its name, of kind signal."""
        return "SIGHUP" if "SIGHUP" in self.words else "SIGTERM"


def as_note(crashes: Iterable[Crash]) -> list[dict[str, Any]]:
    """As JSON takes it: `store.note(crash.NOTE, crash.as_note(...))`."""
    return [dataclasses.asdict(crash) for crash in crashes]


def from_note(note: Any) -> list[Crash]:
    """What a store's segment keeps under NOTE; a foreign value gives none."""
    found = []
    for entry in note if isinstance(note, list) else ():
        try:
            kind, step, words, moment = (entry[name] for name in ("kind", "step", "words", "time"))
            if kind in KINDS:
                found.append(Crash(kind, int(step), str(words), float(moment)))
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
    return found


class _Default(int):
    """Handle a signal, and be its default to everybody who asks for its handler.

    Libraries look: they chain what they find before theirs, and Lightning would so call ours, which
    ends the process, where the default is never called. This is a 0, as signal.SIG_DFL is, and
    Python's enum makes SIG_DFL of it; to Python itself it is a function like any other.
    """

    handle: Callable[[int, FrameType | None], None]

    def __new__(cls, handle: Callable[[int, FrameType | None], None]) -> "_Default":
        made = super().__new__(cls)
        made.handle = handle
        return made

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.handle(number, frame)


class Guard:
    """Waits for the end of a run; `keep(crashes)` gets all records so far, one of each kind.

    keep: hands on all readings that are there, notes the records and flushes the store. It runs in
    a thread of its own: a signal may come while this one holds a lock of the store's.
    step: the number of the step that is running.

    Python calls its handlers in the main thread between two instructions, so a process inside a
    long call would not hear a signal until the call returns. But Python writes the signal's number
    to a descriptor at once: a listening thread reads it, keeps what it can in SIGNAL_PATIENCE, and
    lets the signal do what it does without a watch. A signal that the script handles itself, or
    ignores, is left alone; so are all where the descriptor is taken.
    """

    def __init__(self, keep: Callable[[list[Crash]], None], step: Callable[[], int]) -> None:
        self.crashes: list[Crash] = []
        self._keep, self._step = keep, step
        self._process = os.getpid()
        self._handled: set[int] = set()  # signals whose default we stand before
        self._handler = _Default(self._terminated)
        self._telling: int | None = None  # where Python writes the numbers of signals

    def install(self) -> "Guard":
        """Stand before the end by SIGNALS; in the main thread alone, as Python asks for."""
        if _in_main_thread():
            self._listen()
        return self

    def remove(self) -> None:
        if _in_main_thread():
            self._put_back()
            self._stop_listening()

    def _listen(self) -> None:
        numbers = [one for one in SIGNALS if signal.getsignal(one) is signal.SIG_DFL]
        if not numbers or os.name == "nt":
            return
        listening, telling = os.pipe()
        os.set_blocking(telling, False)
        before = signal.set_wakeup_fd(telling, warn_on_full_buffer=False)
        if before != -1:  # asyncio has it
            signal.set_wakeup_fd(before)
            os.close(listening)
            os.close(telling)
            return
        self._telling = telling
        _installed.add(self)
        thread = threading.Thread(
            target=self._hear, args=(listening,), name="scaledot-signals", daemon=True
        )
        thread.start()
        for number in numbers:
            _signals.signal(number, self._handler)  # signal.signal would make an int of it
            self._handled.add(number)

    def _put_back(self) -> None:
        for number in self._handled:
            if self._is_in_place(number):
                signal.signal(number, signal.SIG_DFL)
        self._handled.clear()

    def _stop_listening(self) -> None:
        if self._telling is None:
            return
        telling, self._telling = self._telling, None
        found = signal.set_wakeup_fd(-1)
        if found not in (-1, telling):
            signal.set_wakeup_fd(found)
        if os.getpid() == self._process:  # else the pipe is the parent's: leave no word in it
            os.write(telling, OVER)
        os.close(telling)

    def _hear(self, listening: int) -> None:
        """In a thread: wait for the number of a signal that ends the process."""
        with open(listening, "rb", buffering=0) as numbers:
            while (told := numbers.read(1)) not in (b"", OVER):
                number = told[0]
                if number in self._handled and self._is_in_place(number):
                    self._end_by(number)

    def _is_in_place(self, number: int) -> bool:
        return _signals.getsignal(number) is self._handler

    def _end_by(self, number: int) -> None:
        """Keep what can be kept soon, then end as if we had never been here."""
        with contextlib.suppress(Exception):
            name = signal.Signals(number).name
            words = f"terminated from outside ({name})"
            self.uncaught(SIGNAL_PATIENCE)  # Python may be waiting for the script's threads
            self._note("signal", self._step(), words, SIGNAL_PATIENCE)
        # signal.signal is for the main thread, which may be inside a long call.
        ctypes.pythonapi.PyOS_setsig(number, None)
        os.kill(os.getpid(), number)

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        """Python's handler: the listener ends the process, unless something stands in its way."""
        if self._telling is not None and os.getpid() == self._process:
            with contextlib.suppress(OSError):
                os.write(self._telling, bytes([number]))  # somebody else took the descriptor
            time.sleep(2 * SIGNAL_PATIENCE)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def uncaught(self, patience: float | None = None) -> None:
        """Note the exception that has ended the script, if one has.

        Python leaves it in the module sys, so nothing has to stand before sys.excepthook. Others
        leave theirs there, too (pytest: that of a failed test), but only an uncaught one has come
        from the outermost frame.
        """
        error = getattr(sys, "last_value", None)
        if error is None or error.__traceback__ is None:
            return
        if error.__traceback__.tb_frame.f_back is None:
            self.exception(error, patience)

    def exception(self, error: BaseException, patience: float | None = None) -> None:
        """An exception is about to leave the watched block. SystemExit is an end like any other."""
        if isinstance(error, SystemExit | GeneratorExit):
            return
        if isinstance(error, KeyboardInterrupt):
            self._note("interrupt", self._step(), "stopped by hand (Ctrl-C)", patience)
            return
        text = redact_text(str(error).strip())
        words = f"{type(error).__name__}: {text}" if text else type(error).__name__
        if len(words) > LONGEST:
            words = f"{words[:LONGEST]}…"
        self._note("exception", self._step(), words, patience)

    def loss(self, step: int, value: float) -> None:
        """A step's loss has arrived; the first that is no number is kept."""
        if not math.isfinite(value):
            self._note("loss", step, f"the loss is {value}")

    def _note(self, kind: Kind, step: int, words: str, patience: float | None = None) -> None:
        if os.getpid() != self._process or any(crash.kind == kind for crash in self.crashes):
            return
        self.crashes.append(Crash(kind, int(step), words, time.time()))
        thread = threading.Thread(target=self._try, name="scaledot-crash", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is closing and starts no thread any more
            self._try()
            return
        thread.join(PATIENCE if patience is None else patience)

    def _try(self) -> None:
        try:
            self._keep(list(self.crashes))
        except Exception:
            log.exception("the last readings could not be kept")


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _forked() -> None:
    """In a forked child: its signals are no news of the parent's end."""
    for guard in list(_installed):
        guard._put_back()
        guard._stop_listening()
    _installed.clear()


_installed: weakref.WeakSet[Guard] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
