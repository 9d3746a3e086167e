"""The socket of the monitor: a run's heads while it is written.

Text frames are JSON. The table goes as binary frames, in little-endian units of four bytes:

    int32 field, start, N, C; int32 steps [N]; float32 numbers [N, C], step by step

field is the place in the header's "fields", C the number of its "columns", NaN means not measured.
The N rows take the places from start on in the list of steps; what stood there or after is void.
"""

import asyncio
import contextlib
import logging
import math
import sqlite3
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from starlette.websockets import WebSocket, WebSocketDisconnect

from scaledot.fields import BANDS
from scaledot.lab.server import messages
from scaledot.lab.server.aside import Aside
from scaledot.lab.server.plain_json import dumps
from scaledot.lab.server.run_feed import FIELDS, RunFeed, Table
from scaledot.printable import one_line
from scaledot.watch.alarms import as_json
from scaledot.watch.reading import PHASES, Phase, RunAttributes
from scaledot.watch.store import RunReader, StoreError
from scaledot.watch.top.words import brief

INTERVAL = 0.25  # seconds between two looks at the file
FRAME_BYTES = 2**20
COMMANDS = ("field", "phase", "history")
NO_RUN, FAILED = 1008, 1011  # codes of the WebSocket protocol
# What reading a file can raise that is gone, replaced, locked or damaged.
UNREADABLE = (StoreError, sqlite3.Error, OSError, ValueError, zlib.error)
log = logging.getLogger("scaledot.lab")


async def monitor(socket: WebSocket) -> None:
    path: Path | None = socket.app.state.run
    if path is None:
        await socket.close(NO_RUN, "start it with: scaledot lab --run FILE")
        return
    await socket.accept()
    with contextlib.closing(Viewer(socket, path)) as viewer:
        tasks = [asyncio.create_task(viewer.show()), asyncio.create_task(viewer.listen())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    if not isinstance(results[1], WebSocketDisconnect):  # the page is still there: a bug of ours
        log.error("the monitor failed", exc_info=results[0])
        await socket.close(FAILED, "the terminal that runs scaledot lab says why")


class Viewer:
    """One open page."""

    def __init__(self, socket: WebSocket, path: Path) -> None:
        self._socket = socket
        self._path = path
        self._aside = Aside()
        self._feed: RunFeed | None = None  # None: there is nothing to read yet, or no more
        self._reader: RunReader | None = None  # of the alarms
        self._phase: Phase | None = None  # None: whatever there is
        self._field = FIELDS[0]
        self._number = 0  # steps that the page holds
        self._alarms = 0  # that the page holds
        self._status: dict[str, Any] = {}
        self._missing = ""
        self._asked: dict[str, Any] = {}  # the latest command of each kind
        self._arrived = asyncio.Event()

    def close(self) -> None:
        self._aside.close()

    async def listen(self) -> None:
        while True:
            try:
                message = await messages.receive(self._socket)
                if len(message) != 1 or not set(message) <= set(COMMANDS):
                    raise ValueError(f"expected one of {', '.join(COMMANDS)}")
                self._asked |= message
                self._arrived.set()
            except ValueError as error:
                await self._send({"error": str(error)})

    async def show(self) -> None:
        """For ever: four looks a second, and at once when the page asks for something."""
        while True:
            self._arrived.clear()
            try:
                await self._look()
                self._missing = ""
            except UNREADABLE as error:
                self._feed = None
                await self._tell_missing(str(error))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), INTERVAL)

    async def _look(self) -> None:
        if self._feed is None:
            await self._begin()
        assert self._feed is not None
        await self._obey(self._feed)
        change = await self._aside.do(self._feed.look, self._field)
        grown = self._number + len(change.rows.steps) > 2 * self._feed.most_steps
        if change.anew or grown:
            await self._begin()
            return
        await self._send_rows(change.rows)
        await self._send_alarms()
        status = _lasting(self._feed.status())
        if status != self._status or change.losses.steps:
            self._status = status
            told = {"status": self._feed.status(), "losses": change.losses._asdict()}
            await self._send(told)

    async def _begin(self) -> None:
        """The header, then the whole table."""
        feed = await self._aside.do(RunFeed, self._path, self._phase)
        rows = await self._aside.do(feed.table, self._field)
        losses = await self._aside.do(feed.losses)
        self._reader = await self._aside.do(RunReader, self._path)
        alarms = await self._aside.do(self._reader.alarms)
        self._alarms = len(alarms)
        self._feed, self._number = feed, 0
        status = feed.status()
        self._status = _lasting(status)
        attributes = feed.segments[-1].attributes if feed.segments else RunAttributes()
        await self._send(
            {
                "columns": feed.columns,
                "layers": [{"name": name, "heads": n} for name, n in feed.layers.items()],
                "fields": FIELDS,
                "field": self._field,
                "phase": feed.phase,
                "phases": feed.phases,
                "steps": rows.steps,
                "bands": {name: BANDS[name]._asdict() for name in FIELDS},
                "losses": losses._asdict(),
                "run": {
                    "path": str(feed.path),
                    "command": " ".join(attributes.command),
                    "model": attributes.model,
                },
                "coverage": status["coverage"],
                "cost": status["cost"],
                "status": status,
                "alarms": [as_json(alarm) for alarm in alarms],
            }
        )
        await self._send_rows(rows)

    async def _send_rows(self, rows: Table) -> None:
        """In frames of about a megabyte."""
        field = FIELDS.index(self._field)
        most = max(1, FRAME_BYTES // (4 * max(rows.numbers.shape[1], 1)))
        for at in range(0, len(rows.steps), most):
            steps, numbers = rows.steps[at : at + most], rows.numbers[at : at + most]
            await self._send(frame(field, self._number, steps, numbers))
            self._number += len(steps)

    async def _send_alarms(self) -> None:
        """Those that came since the last look."""
        assert self._reader is not None
        alarms = await self._aside.do(self._reader.alarms)
        news = alarms[self._alarms :]
        self._alarms = len(alarms)
        if news:
            await self._send({"alarms": [as_json(alarm) for alarm in news]})

    async def _obey(self, feed: RunFeed) -> None:
        asked, self._asked = self._asked, {}
        for name, value in asked.items():
            try:
                match name:
                    case "field":
                        self._field = _known(value, FIELDS, "field")
                        self._number = 0
                        await self._send_rows(await self._aside.do(feed.table, self._field))
                    case "phase":
                        self._phase = _known(value, PHASES, "phase")
                        await self._begin()
                    case "history":
                        await self._send({"history": await self._history(feed, value)})
            except _Wrong as error:
                await self._send({"error": str(error)})

    async def _history(self, feed: RunFeed, asked: Any) -> dict[str, Any]:
        if not isinstance(asked, dict) or set(asked) != {"layer", "head"}:
            raise _Wrong("history: expected layer and head")
        layer = feed.shown.get(asked["layer"]) if isinstance(asked["layer"], str) else None
        if not feed.has(layer, asked["head"]):
            raise _Wrong("history: there is no such layer and head")
        return await self._aside.do(feed.history, layer, asked["head"])

    async def _tell_missing(self, why: str) -> None:
        if why != self._missing:
            self._missing = why
            await self._send({"missing": why})

    async def _send(self, message: dict[str, Any] | bytes) -> None:
        # The page may be closed in the middle; `listen` is told.
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            if isinstance(message, bytes):
                await self._socket.send_bytes(message)
            else:
                await self._socket.send_text(dumps(_plain(message)))


class _Wrong(Exception):
    """What the page asked for does not exist."""


def frame(field: int, start: int, steps: list[int], numbers: np.ndarray) -> bytes:
    head = np.array([field, start, *numbers.shape, *steps], "<i4")
    return head.tobytes() + numbers.astype("<f4").tobytes()


def _known(value: Any, known: tuple[Any, ...], what: str) -> Any:
    if value not in known:
        raise _Wrong(f"there is no such {what}; there are {', '.join(known)}")
    return value


def _lasting(status: dict[str, Any]) -> dict[str, Any]:
    """Without what changes by itself."""
    return {name: value for name, value in status.items() if name != "quiet"}


def _plain(value: Any) -> Any:
    """null for a number that is not finite; a text of the file without invisible characters."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return one_line(brief(value))
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value
