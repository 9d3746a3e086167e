"""Keys of the terminal, one at a time and without waiting for Enter."""

import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

ARROWS = {"A": "up", "B": "down", "C": "right", "D": "left"}


class Keys(Protocol):
    def read(self, seconds: float) -> str | None:
        """The next key, or None when none was pressed in this time."""
        ...


@contextmanager
def keyboard() -> Iterator[Keys]:
    """The keys of standard input; none where that is no terminal."""
    if not sys.stdin.isatty():
        yield NoKeys()
        return
    try:
        import termios
        import tty
    except ImportError:  # Windows
        yield NoKeys()
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal)
        yield Keyboard(terminal)
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


class NoKeys:
    def read(self, seconds: float) -> str | None:
        time.sleep(seconds)
        return None


class Keyboard:
    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self._waiting = ""

    def read(self, seconds: float) -> str | None:
        if not self._waiting:
            ready, _, _ = select.select([self._terminal], [], [], seconds)
            if not ready:
                return None
            pressed = os.read(self._terminal, 64)
            if not pressed:
                return "q"  # the terminal has gone
            self._waiting = pressed.decode(errors="replace")
        return self._next()

    def _next(self) -> str:
        """An arrow arrives as three characters: escape, [ or O, a letter."""
        typed = self._waiting
        if typed[0] == "\x1b" and typed[1:2] in ("[", "O") and typed[2:3] in ARROWS:
            self._waiting = typed[3:]
            return ARROWS[typed[2]]
        self._waiting = typed[1:]
        return typed[0]
