"""`--export`: the page as one file with the numbers of every lesson, for a room without Python.

What a server would answer is inside as JSON: each lesson at its defaults, and with each of its
controls moved to each of its values, one at a time; and the rows that a table has to try.
"""

import base64
import hashlib
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

import scaledot
from scaledot.atomic_file import write_atomically
from scaledot.lab import catalogue, flashcards
from scaledot.lab.experiments.lesson import Control, Lesson
from scaledot.lab.server import answers
from scaledot.lab.server.page import INDEX, PageFile
from scaledot.lab.server.start import block

PLACES = 16  # of a slider that has very many
CANNED = "scaledot-canned"  # the page looks for this id before it asks a server


def write(path: Path, page: dict[str, PageFile], lang: str) -> int:
    """Returns the size in bytes. A file that stands there is replaced when all is ready."""
    content = one_file(page, canned(lang)).encode()
    write_atomically(path, content)
    return len(content)


def canned(lang: str) -> dict[str, Any]:
    languages = catalogue.languages()
    given = [
        answers.answer(name, arguments)
        for name, lesson in answers.LESSONS.items()
        for arguments in variations(lesson)
    ]
    return {
        "version": scaledot.__version__,
        "lessons": answers.listing(lang, run=False),
        "catalogue": {name: catalogue.load(name) for name in languages},
        "flashcards": {name: answers.cards(name) for name in languages},
        "anki": {name: flashcards.anki(name) for name in languages},
        "race": [_steps(one) for one in given if one["lesson"] == answers.RACE],
        "answers": [_without_steps(one) for one in given],
    }


def variations(lesson: Lesson) -> Iterator[dict[str, Any]]:
    """What differs from the defaults: nothing, then one control at a time."""
    yield {}
    for control in lesson.controls:
        for value in _values(control):
            if value != control.default:
                yield {control.name: value}
    yield from _tried(lesson)


def one_file(page: dict[str, PageFile], data: dict[str, Any]) -> str:
    """The page with its script, its style and the data inside."""
    inliner = _Inliner(page)
    inliner.feed(page[INDEX].content.decode())
    inliner.close()
    inliner.parts.insert(
        inliner.head_at,
        _policy(inliner.scripts, inliner.styles) + block(CANNED, data),
    )
    return "".join(inliner.parts)


def _tried(lesson: Lesson) -> Iterator[dict[str, Any]]:
    """What the buttons beside the rows of a lesson's table set, where lists are typed in."""
    if not any(control.kind == "numbers" for control in lesson.controls):
        return
    defaults = lesson.arguments()
    for row in lesson.run(**defaults).table:
        given = {name: getattr(row, name, value) for name, value in defaults.items()}
        if given != defaults:
            yield given


def _values(control: Control) -> list[Any]:
    if control.kind == "toggle":
        return [False, True]
    if control.kind == "range" and control.name != "seed":
        return _spread(control)
    return list(control.values)


def _spread(control: Control) -> list[float]:
    """Some of a slider's places; close together where the numbers are small."""
    low, high, step = control.low, control.high, control.step
    assert low is not None
    assert high is not None
    assert step is not None
    spaced = np.geomspace(low, high, PLACES) if low > 0 else np.linspace(low, high, PLACES)
    places = dict.fromkeys(np.round((spaced - low) / step).astype(int).tolist())
    return [round(min(low + place * step, high), 9) for place in places]


def _steps(answer: dict[str, Any]) -> dict[str, Any]:
    """What the socket of a race sends one by one."""
    return {"arguments": answer["arguments"], "steps": answer["result"]["curves"]}


def _without_steps(answer: dict[str, Any]) -> dict[str, Any]:
    """Most of a race's answer are its steps: once is enough."""
    if answer["lesson"] != answers.RACE:
        return answer
    return {**answer, "result": {**answer["result"], "curves": []}}


class _Inliner(HTMLParser):
    """Copies a document; what it fetches from beside itself is put inside."""

    def __init__(self, page: dict[str, PageFile]) -> None:
        super().__init__(convert_charrefs=False)
        self.parts: list[str] = []
        self.head_at = 0  # where the policy goes: after the charset, before what it is about
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self._page = page

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attrs}
        if tag == "script" and "src" in named:
            self.scripts.append(_script(self._text(named["src"])))
            self.parts.append(f'<script type="module">{self.scripts[-1]}')
        elif tag == "link" and named.get("rel") == "stylesheet":
            self.styles.append(_style(self._text(named["href"])))
            self.parts.append(f"<style>{self.styles[-1]}</style>")
        elif tag == "link" and named.get("rel") == "icon":
            self.parts.append(f'<link rel="icon" href="{self._data(named["href"])}">')
        elif "src" in named or tag == "link":
            raise ValueError(f"<{tag}> of the page has no place in one file")
        else:
            self.parts.append(self.get_starttag_text() or "")
        if tag == "head" or (tag == "meta" and "charset" in named):
            self.head_at = len(self.parts)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        self.parts.append(f"</{tag}>")

    def handle_data(self, data: str) -> None:
        self.parts.append(data)

    def handle_entityref(self, name: str) -> None:
        self.parts.append(f"&{name};")

    def handle_charref(self, name: str) -> None:
        self.parts.append(f"&#{name};")

    def handle_decl(self, decl: str) -> None:
        self.parts.append(f"<!{decl}>")

    def _text(self, address: str) -> str:
        return self._file(address).content.decode().replace("\r\n", "\n")

    def _data(self, address: str) -> str:
        file = self._file(address)
        return f"data:{file.type};base64,{base64.b64encode(file.content).decode()}"

    def _file(self, address: str) -> PageFile:
        return self._page[address.removeprefix("./")]


def _script(text: str) -> str:
    if re.search(r"""\b(from|import)\s*\(?\s*["'`]\.{0,2}/""", text):
        raise ValueError("the page's script is in several files; one file can hold only one")
    # Both would change how a browser reads what follows; \x3c is the same in any string.
    return re.sub(r"<(?=/script|!--)", r"\\x3c", text, flags=re.IGNORECASE)


def _style(text: str) -> str:
    if "</style" in text.lower() or re.search(r"url\((?!\s*[\"']?data:)|@import", text):
        raise ValueError("the page's style fetches other files; one file cannot")
    return text


def _policy(scripts: list[str], styles: list[str]) -> str:
    """Nothing runs and nothing is fetched but what was put here."""
    policy = {
        "default-src": "'none'",
        "script-src": " ".join(map(_hash, scripts)) or "'none'",
        "style-src": " ".join(map(_hash, styles)) or "'none'",
        "img-src": "data: blob:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    content = "; ".join(f"{name} {value}" for name, value in policy.items())
    return f'<meta http-equiv="content-security-policy" content="{content}">'


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
