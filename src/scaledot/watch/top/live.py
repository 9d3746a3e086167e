"""The view that stays: redrawn for news, for a key, for a window of another size."""

import sqlite3
import time
from collections.abc import Callable

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from scaledot.watch.reading import Phase
from scaledot.watch.store import StoreError
from scaledot.watch.top import health, picture
from scaledot.watch.top.frame import Frame, frame_of
from scaledot.watch.top.history import History
from scaledot.watch.top.keys import Keys, NoKeys

TICK = 0.25  # seconds a key may wait, and a window that has changed its size
LOOK = 1.0  # seconds between two looks at the store


def watch(
    history: History,
    console: Console,
    keys: Keys,
    vital: str,
    phase: Phase = "train",
    clock: Callable[[], float] = time.time,
) -> None:
    """Draw until q or Ctrl-C. Raises StoreError where nothing can be drawn from the first."""
    view = View(history, vital, phase, "Ctrl-C quit" if isinstance(keys, NoKeys) else picture.KEYS)
    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        shown = None
        next_look = clock() + LOOK
        try:
            while not view.ended:
                now = clock()
                if now >= next_look:
                    view.look()
                    next_look = now + LOOK
                # Over a slow line only what differs is worth sending; times are shown in seconds.
                wanted = (console.size, view.version, int(now))
                if wanted != shown:
                    live.update(Group(*view.lines(console, now)), refresh=True)
                    shown = wanted
                if (key := keys.read(TICK)) is not None:
                    view.press(key)
        except KeyboardInterrupt:
            pass  # asked for, as q is


class View:
    """What is looked at: which vital, which phase, of what is known of the run."""

    def __init__(self, history: History, vital: str, phase: Phase, keys: str) -> None:
        self.history, self.vital, self.phase = history, vital, phase
        self.version = 0  # of what there is to see, the clock apart
        self.ended = False
        self._keys = keys
        self._gone = ""
        self._frame: Frame | None = None  # the last that could be read

    def look(self) -> None:
        try:
            self.version += self.history.look()
            self._gone = ""
        except (StoreError, sqlite3.Error) as error:  # deleted under us; it may come again
            self._gone = self._short(error)

    def press(self, key: str) -> None:
        self.version += 1
        if key in ("q", "Q", "\x1b"):
            self.ended = True
        elif key in ("right", "down", "\t", " ", "n"):
            self._turn(1)
        elif key in ("left", "up", "p"):
            self._turn(-1)
        elif key == "e":
            self.phase = "eval" if self.phase == "train" else "train"

    def lines(self, console: Console, now: float) -> list[Text]:
        """Draw what is known; where a curve cannot be read, the last frame, and why."""
        try:
            self._frame = frame_of(self.history, self.vital, self.phase, now)
        except (StoreError, sqlite3.Error) as error:
            self._gone = self._short(error)
            if self._frame is None:
                raise
        keys = self._gone or self._keys
        ascii_only = console.options.ascii_only
        return picture.draw(self._frame, console.width, console.height, keys, ascii_only)

    def _short(self, error: Exception) -> str:
        """One line of the terminal: the path stands above already."""
        return str(error).replace(str(self.history.path), self.history.path.name)

    def _turn(self, places: int) -> None:
        place = health.VITALS.index(self.vital)
        self.vital = health.VITALS[(place + places) % len(health.VITALS)]
