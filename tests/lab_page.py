"""The lab's page in a browser, as the tests of tests/browser hold it: opened once, moved by its
address, and asked for every number it shows."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlencode, urlsplit

from playwright.sync_api import Browser, Page

from scaledot.lab.catalogue import at
from scaledot.lab.experiments import LESSONS, as_json

PANELS = (*LESSONS, "flashcards")
PHONE = {"width": 360, "height": 780}
DESKTOP = {"width": 1280, "height": 900}

# One walk over the document: what a test asks of fifty numbers is one message to the browser.
NUMBERS = """() => [...document.querySelectorAll("article [data-field]")].map(
    (element) => [element.dataset.field, element.dataset.value])"""


class LabPage:
    """What went wrong in the browser is kept, and told at the end by `opened`."""

    def __init__(self, page: Page, address: str) -> None:
        self.page = page
        self.address = address
        self.wrong: list[str] = []
        self._visits = 0
        page.on("console", self._heard)
        page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        page.on("request", lambda request: self._requested(request.url))
        page.on("websocket", lambda socket: self._requested(socket.url))
        page.goto(address)
        page.wait_for_selector("article")

    def go(self, lesson: str, **given: Any) -> None:
        """By the address, without loading the page again; returns when the numbers are there."""
        self._visits += 1  # an address that is like the one before would not be a move
        fields = {"v": 1, "lesson": lesson, "visit": self._visits}
        fields |= {name: _written(value) for name, value in given.items()}
        self.page.evaluate("(hash) => { location.hash = hash }", urlencode(fields))
        self.page.wait_for_selector(f'article[data-lesson="{lesson}"]:not([aria-busy])')

    def answered(self, lesson: str, arguments: dict[str, Any]) -> None:
        """Until the page shows the answer to exactly these arguments."""
        self.page.wait_for_function(
            """([lesson, wanted]) => {
                const article = document.querySelector(`article[data-lesson="${lesson}"]`);
                const got = JSON.parse(article?.dataset.arguments ?? "null");
                return got && Object.keys(wanted).every(
                    (name) => JSON.stringify(got[name]) === JSON.stringify(wanted[name]));
            }""",
            arg=[lesson, as_json(arguments)],
        )

    def numbers(self) -> dict[str, Any]:
        """Every number that says where in the result it comes from, by that path."""
        found: dict[str, Any] = {}
        for field, value in self.page.evaluate(NUMBERS):
            number = _number(value)
            assert found.setdefault(field, number) == number or number != number, field
        return found

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.wrong.append(f"{message.type}: {message.text}")

    def _requested(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("blob", "data", "file") and parts.hostname != "127.0.0.1":
            self.wrong.append(f"request: {url}")


@contextmanager
def opened(chromium: Browser, address: str, **options: Any) -> Iterator[LabPage]:
    """A page of its own; errors in its console and requests to elsewhere fail the test."""
    with chromium.new_context(viewport=DESKTOP, **options) as context:
        context.set_default_timeout(15_000)
        lab_page = LabPage(context.new_page(), address)
        yield lab_page
    assert lab_page.wrong == []


def assert_numbers_of(lesson: str, arguments: dict[str, Any], shown: dict[str, Any]) -> None:
    """What the page shows is what the library computes from the same arguments."""
    result = as_json(LESSONS[lesson].run(**arguments))
    assert len(shown) >= 5, f"{lesson} shows hardly a number"
    for field, value in shown.items():
        if "milliseconds" not in field:  # measured anew by whoever asks
            assert _same(value, at(result, field)), f"{lesson} {arguments} {field}"


def _same(shown: Any, computed: Any) -> bool:
    if isinstance(shown, list):
        return len(shown) == len(computed) and all(map(_same, shown, computed))
    if isinstance(shown, float | int) and isinstance(computed, float | int):
        # The server computes in a thread of its own; the last bits may depend on how torch
        # shares the work between threads.
        return math.isclose(shown, computed, rel_tol=1e-6, abs_tol=1e-12)
    return shown == computed


def _number(value: str) -> Any:
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value  # a word, such as the name of a rule


def _written(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(_written, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
