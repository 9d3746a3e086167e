"""What reads a run does not hold the lab up."""

import asyncio
import contextlib
import subprocess
import sys
import threading
import time

import pytest

from scaledot.lab.server.aside import Aside

STUCK = """
import asyncio, os, signal, threading, time
from scaledot.lab.server.aside import Aside
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()

async def read():
    await Aside().do(time.sleep, 600)

asyncio.run(read())
"""


def test_it_gives_the_result_or_raises_the_error():
    async def read(text: str) -> int:
        with contextlib.closing(Aside()) as aside:
            return await aside.do(int, text)

    assert asyncio.run(read("12")) == 12
    with pytest.raises(ValueError, match="invalid literal"):
        asyncio.run(read("x"))


def test_one_thread_does_all_calls_and_ends():
    """The memory that a thread has freed stays with it: threads after threads would add it up."""

    async def read() -> set[threading.Thread]:
        with contextlib.closing(Aside()) as aside:
            return {await aside.do(threading.current_thread) for _ in range(5)}

    (thread,) = asyncio.run(read())
    thread.join(10)
    assert not thread.is_alive()


def test_ctrl_c_ends_a_lab_whose_file_takes_for_ever():
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, timeout=60)
    assert b"KeyboardInterrupt" in done.stderr
    assert time.monotonic() - begun < 40


def test_a_page_that_was_closed_meanwhile_hears_of_nothing():
    go_on = threading.Event()

    async def close() -> None:
        aside = Aside()
        task = asyncio.create_task(aside.do(go_on.wait, 10))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        assert await aside.do(int, "12") == 12
        aside.close()

    asyncio.run(close())
