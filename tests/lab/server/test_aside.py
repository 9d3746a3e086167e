"""What reads a run does not hold the lab up."""

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from scaledot.lab.server.aside import aside

STUCK = """
import asyncio, os, signal, threading, time
from scaledot.lab.server.aside import aside
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
asyncio.run(aside(time.sleep, 600))
"""


def test_it_gives_the_result_or_raises_the_error():
    assert asyncio.run(aside(int, "12")) == 12
    with pytest.raises(ValueError, match="invalid literal"):
        asyncio.run(aside(int, "x"))


def test_ctrl_c_ends_a_lab_whose_file_takes_for_ever():
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, timeout=60)
    assert b"KeyboardInterrupt" in done.stderr
    assert time.monotonic() - begun < 40


def test_a_page_that_was_closed_meanwhile_hears_of_nothing():
    go_on = threading.Event()

    async def close() -> None:
        task = asyncio.create_task(aside(go_on.wait, 10))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        await asyncio.sleep(0.05)

    asyncio.run(close())
