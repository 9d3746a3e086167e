"""When a run ends badly: the last readings reach the store, and a record says what happened when.

An exception that nobody catches, SIGTERM, SIGHUP, a loss that is no number. The script notices
nothing of it: its traceback, its exit status and its own handlers stay as they are. `kill -9`
leaves no time for words; what survives it is the store's matter.
"""

import dataclasses
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Literal, get_args

from scaledot.watch.redact import redact_text

log = logging.getLogger("scaledot.watch")

Kind = Literal["exception", "interrupt", "signal", "loss"]
KINDS: tuple[Kind, ...] = get_args(Kind)
# What ends a run from outside; Windows has no SIGHUP, which a closed terminal sends.
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
NOTE = "crash"  # the attribute of a segment that keeps the records
PATIENCE = 5.0  # seconds that a dying process waits for the disk
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
        except (KeyError, TypeError, ValueError):
            continue
    return found


class Guard:
    """Waits for the end of a run; `keep(crashes)` gets all records so far, one of each kind.

    keep: hands on all readings that are there, notes the records and flushes the store. It runs in
    a thread of its own: a signal may come while this one holds a lock of the store's. Python calls
    handlers between two instructions, so a process that hangs inside a call does not hear SIGTERM
    or SIGHUP until the call returns.
    step: the number of the step that is running.
    """

    def __init__(self, keep: Callable[[list[Crash]], None], step: Callable[[], int]) -> None:
        self.crashes: list[Crash] = []
        self._keep, self._step = keep, step
        self._process = os.getpid()
        self._hook: Callable[..., Any] | None = None
        self._handlers: dict[int, Any] = {}  # those before ours
        self._listening = False

    def install(self) -> "Guard":
        """Stand before sys.excepthook and, in the main thread, before the handlers of SIGNALS."""
        self._hook, sys.excepthook = sys.excepthook, self._excepthook
        for number in SIGNALS if _in_main_thread() else ():
            # None: C code has set it, and Python could not put it back. An ignored signal (nohup)
            # ends nothing.
            if signal.getsignal(number) not in (None, signal.SIG_IGN):
                self._handlers[number] = signal.signal(number, self._terminated)
        self._listening = True
        return self

    def remove(self) -> None:
        """Put both back. Whoever has wrapped ours in the meantime keeps it; it only passes on."""
        self._listening = False
        if self._hook is not None and _same(sys.excepthook, self._excepthook):
            sys.excepthook = self._hook
        for number, before in self._handlers.items() if _in_main_thread() else ():
            if _same(signal.getsignal(number), self._terminated):
                signal.signal(number, before)

    def exception(self, error: BaseException) -> None:
        """An exception is about to leave the watched block. SystemExit is an end like any other."""
        if isinstance(error, SystemExit | GeneratorExit):
            return
        if isinstance(error, KeyboardInterrupt):
            self._note("interrupt", self._step(), "stopped by hand (Ctrl-C)")
            return
        text = redact_text(str(error).strip())
        words = f"{type(error).__name__}: {text}" if text else type(error).__name__
        if len(words) > LONGEST:
            words = f"{words[:LONGEST]}…"
        self._note("exception", self._step(), words)

    def loss(self, step: int, value: float) -> None:
        """A step's loss has arrived; the first that is no number is kept."""
        if not math.isfinite(value):
            self._note("loss", step, f"the loss is {value}")

    def _note(self, kind: Kind, step: int, words: str) -> None:
        if os.getpid() != self._process or any(crash.kind == kind for crash in self.crashes):
            return
        self.crashes.append(Crash(kind, int(step), words, time.time()))
        thread = threading.Thread(target=self._try, name="scaledot-crash", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is closing and starts no thread any more
            self._try()
            return
        thread.join(PATIENCE)

    def _try(self) -> None:
        try:
            self._keep(list(self.crashes))
        except Exception:
            log.exception("the last readings could not be kept")

    def _excepthook(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if self._listening:
            self.exception(error)
        assert self._hook is not None
        self._hook(kind, error, traceback)

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        if self._listening:
            name = signal.Signals(number).name
            self._note("signal", self._step(), f"terminated from outside ({name})")
        before = self._handlers.get(number)
        if callable(before):
            before(number, frame)
            return
        # As if we had never been here: the signal itself ends the process, and its parent sees it.
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _same(found: Any, ours: Callable[..., Any]) -> bool:
    return found == ours  # bound methods are made anew at each look: equal, not identical
