"""Read a run in a thread that the end of the lab does not wait for."""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

Result = TypeVar("Result")


class _Call(NamedTuple):
    loop: asyncio.AbstractEventLoop
    result: asyncio.Future[Any]
    function: Callable[..., Any]
    arguments: tuple[object, ...]


class Aside:
    """Do one call after the other in a daemon thread: a file that takes for ever does not outlive
    Ctrl-C.

    Threads of an executor, asyncio's own among them, are joined when Python ends. One thread, since
    the C library keeps the memory that a thread has freed for that thread.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="scaledot-monitor", daemon=True).start()

    async def do(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Await the call; what it raises is raised here."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Result] = loop.create_future()
        self._calls.put(_Call(loop, result, function, arguments))
        return await result

    def close(self) -> None:
        """End the thread after the call that it is in."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            self._answer(call)
            del call  # and with it what was read, before the next call comes

    @staticmethod
    def _answer(call: _Call) -> None:
        if call.result.done():  # the page was closed meanwhile
            return
        try:
            how, what = call.result.set_result, call.function(*call.arguments)
        except BaseException as error:
            how, what = call.result.set_exception, error

        def settle() -> None:
            if not call.result.done():
                how(what)

        with contextlib.suppress(RuntimeError):  # the lab has ended
            call.loop.call_soon_threadsafe(settle)
