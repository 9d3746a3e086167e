"""Read a run in a thread that the end of the lab does not wait for."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


async def aside(function: Callable[..., Result], *arguments: object) -> Result:
    """Await a call in a daemon thread: a file that takes for ever does not outlive Ctrl-C.

    Threads of an executor, asyncio's own among them, are joined when Python ends.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Result] = loop.create_future()

    def settle(how: Callable[[Any], None], what: Any) -> None:
        if not result.done():  # the page was closed meanwhile
            how(what)

    def work() -> None:
        try:
            how, what = result.set_result, function(*arguments)
        except BaseException as error:
            how, what = result.set_exception, error
        with contextlib.suppress(RuntimeError):  # the lab has ended
            loop.call_soon_threadsafe(settle, how, what)

    threading.Thread(target=work, name="scaledot-monitor", daemon=True).start()
    return await result
