"""The socket of the lessons: questions come as a slider moves, the latest of each lesson counts."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from scaledot.lab.server import answers, messages
from scaledot.lab.server.plain_json import dumps
from scaledot.lab.server.worker import Worker

LARGEST_SEQUENCE = 2**53  # beyond it JavaScript does not count one by one
QUESTION = {"sequence", "lesson", "arguments"}
log = logging.getLogger("scaledot.lab")


async def ask(socket: WebSocket) -> None:
    await socket.accept()
    conversation = Conversation(socket, socket.app.state.worker)
    try:
        await conversation.listen()
    except WebSocketDisconnect:
        pass  # the page was closed
    finally:
        conversation.end()


class Conversation:
    def __init__(self, socket: WebSocket, worker: Worker) -> None:
        self._socket = socket
        self._worker = worker
        self._waiting: dict[str, tuple[int, Any]] = {}  # by lesson: sequence and arguments
        self._arrived = asyncio.Event()
        self._race: object = None  # stands for the race that may go on
        self._tasks: set[asyncio.Task[None]] = set()
        self._begin(self._answer())

    async def listen(self) -> None:
        while True:
            sequence = None
            try:
                message = await messages.receive(self._socket)
                sequence = _sequence(message)
                self._take(sequence, message)
            except ValueError as error:
                await self._send({"sequence": sequence, "error": str(error)})

    def end(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    def _take(self, sequence: int, message: dict[str, Any]) -> None:
        if set(message) <= QUESTION and "lesson" in message:
            name = message["lesson"]
            answers.find(name)
            # An older question of this lesson that still waits is forgotten.
            self._waiting[name] = sequence, message.get("arguments", {})
            self._arrived.set()
        elif set(message) == {"sequence", "race"}:
            self._race = object()  # whichever ran before stops
            self._begin(self._run_race(sequence, message["race"], self._race))
        elif set(message) == {"sequence", "stop"} and message["stop"] is True:
            self._race = None
        else:
            raise ValueError("expected sequence with lesson and arguments, or race, or stop: true")

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self) -> None:
        while True:
            await self._arrived.wait()
            while self._waiting:
                name = next(iter(self._waiting))  # the lesson that has waited longest
                sequence, given = self._waiting.pop(name)
                answer = await self._computed(sequence, partial(answers.answer, name, given))
                if answer is not None:
                    await self._send({"sequence": sequence, **answer})
            self._arrived.clear()

    async def _run_race(self, sequence: int, given: Any, mark: object) -> None:
        begun = await self._computed(sequence, partial(answers.race, given))
        if begun is None:
            return
        arguments, steps = begun
        await self._send({"sequence": sequence, "arguments": arguments})
        # One step at a time: between two of them the worker answers questions.
        while self._race is mark:
            step = await self._computed(sequence, partial(next, steps, None))
            if step is None:
                break
            await self._send({"sequence": sequence, "step": step})
        await self._send({"sequence": sequence, "done": True})

    async def _computed(self, sequence: int, compute: Callable[[], Any]) -> Any:
        """None where it failed, and the page has been told."""
        try:
            return await self._worker.do(compute)
        except ValueError as error:
            reason = str(error)
        except Exception:  # a bug of ours is for the terminal, not for the page
            log.exception("a lesson failed")
            reason = "the lesson failed; the terminal that runs scaledot lab says why"
        await self._send({"sequence": sequence, "error": reason})
        return None

    async def _send(self, message: dict[str, Any]) -> None:
        # The page may be closed in the middle of an answer; `listen` is told.
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            await self._socket.send_text(dumps(message))


def _sequence(message: dict[str, Any]) -> int:
    sequence = message.get("sequence")
    if type(sequence) is not int or not 0 <= sequence < LARGEST_SEQUENCE:
        raise ValueError("sequence must be a whole number, counted up by the page")
    return sequence
