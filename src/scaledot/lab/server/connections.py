"""Connections that send no request, or half of one, take no place from the person at the page.

Anybody on this machine can connect to the port; only a request shows the token. So a connection
has some seconds for its request, and of those that wait the oldest makes room for a new one.
"""

import asyncio
import itertools

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_WAITING = 64  # connections without a request in progress
REQUEST_WITHIN = 5.0  # seconds

_numbers = itertools.count()


class Connection(H11Protocol):
    """HTTP of uvicorn with a limit in time and in number before a request has arrived."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._number = next(_numbers)
        self._deadline: asyncio.TimerHandle | None = None
        self._wait()
        waiting = [one for one in self.connections if isinstance(one, Connection) and one.waiting]
        if len(waiting) > MOST_WAITING:
            min(waiting, key=lambda one: one._number)._drop()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.waiting or self.transport.get_protocol() is not self:  # a WebSocket by now
            self._ready()
        elif self.timeout_keep_alive_task is None and self._deadline is None:
            self._wait()  # the beginning of a further request

    def connection_lost(self, exc: Exception | None) -> None:
        self._ready()
        super().connection_lost(exc)

    @property
    def waiting(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _wait(self) -> None:
        self._deadline = self.loop.call_later(REQUEST_WITHIN, self._give_up)

    def _ready(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        if self.waiting:
            self._drop()

    def _drop(self) -> None:
        self.connections.discard(self)
        self.transport.abort()
