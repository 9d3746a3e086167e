"""One thread for all lessons, so that an answer never fights another one for the cores."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Result = TypeVar("Result")


class Worker:
    def __init__(self) -> None:
        # A lesson's tensors are small: handing them to a second thread costs more than it saves,
        # and on two cores the server and the browser need the other one.
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="scaledot-lessons", initializer=lambda: torch.set_num_threads(1)
        )

    async def do(self, function: Callable[..., Result], *arguments: object) -> Result:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, function, *arguments)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
