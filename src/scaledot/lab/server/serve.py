"""Starting the server: a port, a token, the browser."""

import asyncio
import contextlib
import logging
import secrets
import socket
import sys
from pathlib import Path

import uvicorn

from scaledot.lab.server.app import make_app
from scaledot.lab.server.connections import Connection
from scaledot.lab.server.gate import Gate
from scaledot.lab.server.messages import LARGEST
from scaledot.lab.server.open_page import opened
from scaledot.lab.server.page import PageFile
from scaledot.printable import complain, make_visible
from scaledot.watch.store import StoreError
from scaledot.watch.top.opening import open_run

LOOPBACK = "127.0.0.1"


class CannotServe(Exception):
    """The message says what to type next."""


def serve(
    page: dict[str, PageFile],
    lang: str,
    *,
    port: int | None = None,
    run: str | None = None,
    browser: bool = True,
) -> int:
    """Until Ctrl-C."""
    path = None if run is None else _run(Path(run))
    token = secrets.token_urlsafe(24)
    with listening(port) as listener:
        number = listener.getsockname()[1]
        server = uvicorn.Server(configuration(make_app(page, token, number, lang=lang, run=path)))
        address = f"http://{LOOPBACK}:{number}/{token}/{_state(lang, path)}"
        print(address)
        print("This address is for you alone. Ctrl-C stops the lab.", flush=True)
        with opened(address) if browser else contextlib.nullcontext():
            server.run(sockets=[listener])
    return 0


def _state(lang: str, run: Path | None) -> str:
    """Of the page as it opens, see frontend/src/lib/hash.ts."""
    parts = [] if run is None else ["lesson=monitor"]
    parts += [] if lang == "en" else [f"lang={lang}"]
    return "&".join(["#v=1", *parts]) if parts else ""


def configuration(app: Gate) -> uvicorn.Config:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    for handler in logging.getLogger().handlers:  # uvicorn's lines pass them, too
        make_visible(handler)
    logging.getLogger("uvicorn.error").addFilter(_is_news)
    return uvicorn.Config(
        app,
        http=Connection,
        ws="websockets-sansio",
        ws_max_size=LARGEST,
        ws_per_message_deflate=False,  # a loopback address is faster than zlib
        lifespan="on",
        timeout_graceful_shutdown=1,
        server_header=False,
        date_header=False,
        access_log=False,  # its lines would show the token
        log_config=None,
        log_level="warning",
    )


def _is_news(record: logging.LogRecord) -> bool:
    """Leave out tracebacks of what is no fault of the server's: an end that is forced by a second
    Ctrl-C, and a message that is not UTF-8.
    """
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, UnicodeDecodeError):
        record.exc_info = None
    cancelled = isinstance(error, asyncio.CancelledError)
    return not cancelled and "CancelledError" not in record.getMessage()


def listening(port: int | None) -> socket.socket:
    """Bound to the loopback address, and already queueing who comes before the server is up."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port or 0))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise CannotServe(
            f"port {port} cannot be used ({error.strerror}); leave --port out and a free one is "
            "chosen"
        ) from error
    return listener


def _run(path: Path) -> Path:
    """A run that does not exist yet may come; what exists must be one."""
    path = path.absolute()
    if not path.exists():
        complain("scaledot lab", f"no run at {path} yet; the monitor waits for it")
        return path
    try:
        return open_run(path).path
    except StoreError as error:
        raise CannotServe(str(error)) from error
