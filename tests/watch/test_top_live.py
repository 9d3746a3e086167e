"""`scaledot top` in a terminal: keys, news, sizes, and the end."""

import contextlib
import fcntl
import io
import os
import pty
import re
import select
import sqlite3
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import scaledot
from scaledot.measure import COUNT_FIELDS, FLOAT_FIELDS
from scaledot.watch.reading import Reading, RunAttributes
from scaledot.watch.store import Store
from scaledot.watch.top import live
from scaledot.watch.top.history import History
from scaledot.watch.top.keys import Keyboard

SCREEN = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def _reading(step: int, max_logit: float) -> Reading:
    floats = np.full((len(FLOAT_FIELDS), 3), 0.5)
    floats[FLOAT_FIELDS.index("max_logit")] = max_logit
    return Reading(step, "train", time.time(), "attn", floats, np.ones((len(COUNT_FIELDS), 3)))


@pytest.fixture
def store(tmp_path) -> Iterator[Store]:
    with Store(tmp_path / "r.vitals", RunAttributes()) as store:
        store.write([_reading(0, 41.0)])
        assert store.flush()
        yield store


class Script:
    """Keys that a person would press, and what happens between them; then q."""

    def __init__(self, *events: str | Callable[[], None] | None) -> None:
        self._events = [*events, "q"]

    def read(self, seconds: float) -> str | None:
        event = self._events.pop(0)
        if callable(event):
            event()
            return None
        return event


def _play(store: Store, *events) -> list[str]:
    """The screens that were shown, without their colours."""
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=24)
    moments = iter(range(1_000_000_000))  # every look at the clock is a second later
    live.watch(
        History(store.path), console, Script(*events, None), "passes", clock=lambda: next(moments)
    )
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "\x1b[?1049h" in shown
    assert shown.rstrip().endswith(("\x1b[?1049l", "\x1b[?25h"))
    screens = [SCREEN.sub("", screen) for screen in shown.split("\x1b[H")]
    return [screen for screen in screens if screen.strip()]


def test_arrows_go_through_the_vitals_and_back(store):
    screens = _play(store, "right", "left", "left")
    titles = [re.search(r" (\w+)   healthy| (\w+)   no band", screen) for screen in screens]
    names = [found[1] or found[2] for found in titles if found]
    assert list(dict.fromkeys(names)) == ["passes", "max_logit", "nonfinite"]


def test_e_changes_to_evaluation_and_back(store):
    screens = _play(store, "e", None, "e")
    assert any("no evaluation has been read" in screen for screen in screens)
    assert "h2" in screens[-1]


def test_a_new_reading_is_drawn(store):
    def train() -> None:
        store.write([_reading(77, 63.0)])
        assert store.flush()

    screens = _play(store, "right", train, None, None)
    assert "step 0" in screens[0]
    assert "step 77" in screens[-1]
    assert " 63 " in screens[-1]


def test_a_deleted_run_is_said_to_be_gone_and_the_view_stays(store):
    screens = _play(store, lambda: os.remove(store.path), None, None)
    assert "there is no run at" in screens[-1]
    assert "h2" in screens[-1]


def test_a_curve_that_cannot_be_read_is_said_to_be_damaged_and_the_view_stays(store):
    def damage() -> None:
        assert store.flush()
        with contextlib.closing(sqlite3.connect(store.path)) as database:
            database.execute("UPDATE part SET packing = 'other'")
            database.commit()

    screens = _play(store, damage, "right", None, None)
    assert "r.vitals is damaged" in screens[-1]
    assert "h2" in screens[-1]


def test_nothing_is_drawn_again_while_nothing_changes(store):
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=24)
    live.watch(History(store.path), console, Script(*[None] * 9), "passes", clock=lambda: 5.0)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().count("healthy") == 1


@pytest.mark.parametrize(
    ("typed", "keys"),
    [(b"q", ["q"]), (b"\x1b[C\x1b[D", ["right", "left"]), (b"\x1bOAe", ["up", "e"])],
)
def test_keys_are_read_one_by_one(typed, keys):
    reading, writing = os.pipe()
    os.write(writing, typed)
    keyboard = Keyboard(reading)
    assert [keyboard.read(0.0) for _ in keys] == keys
    assert keyboard.read(0.0) is None
    os.close(writing)
    assert keyboard.read(0.0) == "q"
    os.close(reading)


@pytest.mark.slow
def test_in_a_terminal_it_follows_the_size_and_leaves_it_as_it_was(store):
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    _resize(ours, 24, 80)
    source = str(Path(scaledot.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "TERM": "xterm-256color"}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "scaledot", "top", str(store.path)]
    with subprocess.Popen(
        command, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        first = _shown_until(ours, "q quit")
        _resize(ours, 30, 132)
        second = _shown_until(ours, "q quit")
        os.write(ours, b"q")
        rest = _shown_until(ours, "\x1b[?1049l")
        assert process.wait(timeout=60) == 0
    assert _longest(first) <= 80 < _longest(second) <= 132
    assert "\x1b[?1049l" in rest, "the terminal's own screen is back"
    assert termios.tcgetattr(theirs) == before
    os.close(ours)
    os.close(theirs)


def _resize(terminal: int, rows: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def _shown_until(terminal: int, text: str) -> str:
    shown, deadline = b"", time.monotonic() + 60
    while text.encode() not in shown:
        assert time.monotonic() < deadline, shown.decode(errors="replace")
        if select.select([terminal], [], [], 0.1)[0]:
            shown += os.read(terminal, 65536)
    return shown.decode(errors="replace")


def _longest(shown: str) -> int:
    last = shown.rpartition("\x1b[H")[2]
    return max(len(SCREEN.sub("", line).rstrip("\r")) for line in last.split("\n"))
