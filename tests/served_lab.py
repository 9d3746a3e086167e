"""A lab without its page: two small files stand for it. Everything else is the real thing."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import uvicorn
from starlette.testclient import TestClient

from scaledot.lab.server.app import make_app
from scaledot.lab.server.page import PageFile
from scaledot.lab.server.serve import configuration, listening
from scaledot.measure import COUNT_FIELDS, FLOAT_FIELDS
from scaledot.watch.reading import Reading

TOKEN = "a-token-of-the-tests"
PORT = 8123  # of the TestClient, which opens none
ORIGIN = f"http://127.0.0.1:{PORT}"
LARGEST_MESSAGE = 64 * 1024

INDEX = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Stub &amp; stand-in</title>
<link rel="icon" type="image/svg+xml" href="./assets/icon.svg" />
<script type="module" crossorigin src="./assets/index-1.js"></script>
<link rel="stylesheet" crossorigin href="./assets/index-1.css">
</head><body><div id="app"></div></body></html>
"""
SCRIPT = 'document.title = "<!-- " + "</script>".length;\n'


def write_page(folder: Path) -> Path:
    """The files that stand for a built page."""
    (folder / "assets").mkdir(parents=True)
    (folder / "index.html").write_text(INDEX)
    (folder / "assets/index-1.js").write_text(SCRIPT)
    (folder / "assets/index-1.css").write_text("body { color: navy }\n")
    (folder / "assets/icon.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
    (folder / "sources.sha256").write_text("0\n")
    return folder


def connect(client: TestClient, path: str, origin: str | None = ORIGIN, token: str = TOKEN):
    headers = {} if origin is None else {"origin": origin}
    return client.websocket_connect(f"ws://127.0.0.1:{PORT}/{token}{path}", headers=headers)


@contextmanager
def serving(page: dict[str, PageFile], run: Path | None = None) -> Iterator[str]:
    """A real server on a real port, as `scaledot lab` starts it; gives its address."""
    with listening(None) as listener:
        port = listener.getsockname()[1]
        server = uvicorn.Server(configuration(make_app(page, TOKEN, port, run=run)))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_for(lambda: server.started)
            yield f"127.0.0.1:{port}/{TOKEN}"
        finally:
            server.should_exit = True
            thread.join(20)
    assert not thread.is_alive()


def wait_for(true, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def reading(step: int, layer: str, heads: int, base: float, phase="train") -> Reading:
    """Numbers that say where they come from: field f of head h is base + f + h / 100."""
    fields, columns = np.arange(len(FLOAT_FIELDS))[:, None], np.arange(heads)[None]
    counts = np.ones((len(COUNT_FIELDS), heads), np.int64)
    return Reading(step, phase, time.time(), layer, base + fields + columns / 100, counts)


class Frames:
    """What a page knows: headers and frames taken as the contract of monitor.py says."""

    def __init__(self) -> None:
        self.header: dict = {}
        self.texts: list[dict] = []
        self.field = -1
        self.steps: list[int] = []
        self.numbers = np.empty((0, 0), np.float32)

    def take(self, message: str | bytes) -> None:
        if isinstance(message, str):
            found = json.loads(message)
            self.texts.append(found)
            if "columns" in found:
                self.header = found
                self.steps, self.numbers = [], np.empty((0, len(found["columns"])), np.float32)
            return
        self.field, start, rows, columns = np.frombuffer(message, "<i4", 4).tolist()
        steps = np.frombuffer(message, "<i4", rows, 16).tolist()
        numbers = np.frombuffer(message, "<f4", rows * columns, 16 + 4 * rows)
        assert len(message) == 16 + 4 * rows * (1 + columns)
        assert start <= len(self.steps)
        self.steps = self.steps[:start] + steps
        self.numbers = np.concatenate([self.numbers[:start], numbers.reshape(rows, columns)])
