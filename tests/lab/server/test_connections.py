"""What others on this machine do with the port takes nothing from the person at the page."""

import contextlib
import http.client
import logging
import re
import socket
import time

import pytest
from served_lab import serving
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from scaledot.lab.server import connections, gate


def _port(address: str) -> int:
    return int(re.findall(r":(\d+)/", address)[0])


def _status(address: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", _port(address), timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", "/" + address.partition("/")[2] + "/")
        return connection.getresponse().status


def test_two_hundred_half_open_requests_do_not_lock_the_owner_out(page):
    with serving(page) as address, contextlib.ExitStack() as opened:
        for _ in range(200):
            half = socket.create_connection(("127.0.0.1", _port(address)), 10)
            opened.enter_context(half)
            with contextlib.suppress(ConnectionError):  # made room for a newer one
                half.sendall(b"GET /" + b"x" * 10)
        begun = time.monotonic()
        assert _status(address) == 200
        assert time.monotonic() - begun < 5


@pytest.mark.nightly
def test_a_request_that_does_not_come_is_not_waited_for(page, monkeypatch):
    monkeypatch.setattr(connections, "REQUEST_WITHIN", 0.2)
    with serving(page) as address:
        for beginning in (b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET / HT"):
            with socket.create_connection(("127.0.0.1", _port(address)), 10) as half:
                half.sendall(beginning)
                with contextlib.suppress(ConnectionResetError):
                    while half.recv(4096):
                        pass


def test_more_sockets_than_anybody_has_tabs_are_refused_and_the_page_is_served(page, monkeypatch):
    monkeypatch.setattr(gate, "MOST_SOCKETS", 3)
    monkeypatch.setattr(connections, "REQUEST_WITHIN", 0.2)
    with serving(page) as address, contextlib.ExitStack() as opened:
        ask = lambda: connect(  # noqa: E731
            f"ws://{address}/api/ask", origin=f"http://127.0.0.1:{_port(address)}"
        )
        first = [opened.enter_context(ask()) for _ in range(3)]
        time.sleep(5 * connections.REQUEST_WITHIN)  # of a socket that is open nothing is awaited
        for _ in range(20):
            with pytest.raises(InvalidStatus):
                ask()
        assert _status(address) == 200
        first[0].close()
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:  # the place is free again
            with contextlib.suppress(InvalidStatus):
                opened.enter_context(ask())
                return
            time.sleep(0.02)
        raise AssertionError("a closed socket still takes a place")


def test_a_message_that_is_not_utf_8_is_one_line_without_a_traceback(page, caplog):
    with serving(page) as address:
        origin = f"http://127.0.0.1:{_port(address)}"
        with connect(f"ws://{address}/api/ask", origin=origin) as ask:
            ask.send(b"\xff\xfe", text=True)
            ask.recv_bufsize = 1
            with contextlib.suppress(Exception):
                while True:
                    ask.recv(5)
    said = [record for record in caplog.records if "UTF-8" in record.getMessage()]
    assert len(said) == 1
    assert logging.Formatter().format(said[0]).count("\n") == 0
