"""One file with everything in it: nothing is fetched, every answer is the library's."""

import base64
import dataclasses
import hashlib
import json
import re
from html.parser import HTMLParser
from operator import itemgetter

import pytest
from served_lab import write_page

from scaledot.lab import catalogue, flashcards
from scaledot.lab.experiments import LESSONS
from scaledot.lab.experiments.lesson import Control, Lesson
from scaledot.lab.server import answers, export
from scaledot.lab.server.page import PageFile, load_page

FETCHING = {"src", "href", "srcset", "action", "data", "poster", "background", "ping"}


class Document(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.content: dict[str, str] = {}
        self.closed: set[str] = set()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        tag, attributes = self.tags[-1] if self.tags else ("", {})
        name = attributes.get("id") or tag
        if name not in self.closed:
            self.content[name] = self.content.get(name, "") + data

    def handle_endtag(self, tag):
        self.closed.add(tag if not self.tags else self.tags[-1][1].get("id") or tag)


@pytest.fixture(scope="module")
def few():
    """Two lessons and a short race: all of them take a minute."""
    all_in_order = dict(LESSONS)
    for name in all_in_order:
        if name not in ("saturation", "layernorm", "race"):
            del LESSONS[name]
    race = LESSONS["race"]
    controls = [
        dataclasses.replace(control, values=(2, 3), default=2)
        if control.name == "steps"
        else control
        for control in race.controls
        if control.name in ("steps", "seed")
    ]
    short = dataclasses.replace(race, controls=tuple(controls), code=lambda steps, seed: "")
    LESSONS["race"] = short
    yield
    LESSONS.clear()
    LESSONS.update(all_in_order)


@pytest.fixture(scope="module")
def written(few, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("export")
    path = folder / "page.html"
    size = export.write(path, load_page(write_page(folder / "page")), "hi")
    assert path.stat().st_size == size
    assert [one.name for one in folder.iterdir() if one.is_file()] == ["page.html"]
    return path.read_text()


@pytest.fixture(scope="module")
def document(written) -> Document:
    return Document(written)


@pytest.fixture(scope="module")
def canned(document) -> dict:
    return json.loads(document.content["scaledot-canned"])


def test_nothing_is_fetched(document):
    for tag, attributes in document.tags:
        for name in FETCHING & set(attributes):
            assert (attributes[name] or "").startswith("data:"), (tag, name, attributes[name])
    assert not re.search(r"url\(|@import", document.content["style"])


def test_what_the_page_showed_is_still_there(document):
    assert document.content["title"] == "Stub & stand-in"
    assert ("div", {"id": "app"}) in document.tags
    assert document.content["style"] == "body { color: navy }\n"


def test_only_what_was_put_in_may_run(document):
    (policy,) = [
        attributes["content"]
        for tag, attributes in document.tags
        if attributes.get("http-equiv") == "content-security-policy"
    ]
    parts = dict(part.split(" ", 1) for part in policy.split("; "))
    assert parts["default-src"] == "'none'"
    for directive, tag in (("script-src", "script"), ("style-src", "style")):
        digest = hashlib.sha256(document.content[tag].encode()).digest()
        assert parts[directive] == f"'sha256-{base64.b64encode(digest).decode()}'"
    places = [attributes for _, attributes in document.tags]
    before = next(i for i, one in enumerate(places) if "http-equiv" in one)
    assert before < next(
        i for i, (tag, _) in enumerate(document.tags) if tag in ("script", "style")
    )


def test_a_script_cannot_end_its_own_element(document, written):
    assert document.content["script"] == (
        'document.title = "\\x3c!-- " + "\\x3c/script>".length;\n'
    )
    assert written.count("</script>") == 2


def test_data_cannot_end_its_own_element(page):
    text = export.one_file(page, {"evil": "</script><script>alert(1)</script><!--"})
    document = Document(text)
    assert [tag for tag, _ in document.tags].count("script") == 2
    found = json.loads(document.content["scaledot-canned"])
    assert found == {"evil": "</script><script>alert(1)</script><!--"}


def test_words_and_cards_of_both_languages_are_inside(canned):
    for lang in catalogue.languages():
        assert canned["catalogue"][lang] == catalogue.load(lang)
        cards = [{"front": card.front, "back": card.back} for card in flashcards.cards(lang)]
        assert canned["flashcards"][lang] == cards
        assert canned["anki"][lang] == flashcards.anki(lang)
    assert (canned["lessons"]["lang"], canned["lessons"]["run"]) == ("hi", False)


def test_every_place_of_every_control_has_its_answer(canned):
    for name, lesson in LESSONS.items():
        mine = [one["arguments"] for one in canned["answers"] if one["lesson"] == name]
        for control in lesson.controls:
            wanted = (False, True) if control.kind == "toggle" else control.values
            for value in wanted:
                expected = json.loads(json.dumps(lesson.arguments({control.name: value})))
                assert expected in mine


def test_answers_are_those_of_the_server(canned):
    other = [one for one in canned["answers"] if one["lesson"] != "race"]
    assert len(other) > 5
    for one in other[:: len(other) // 5]:
        assert one == answers.answer(one["lesson"], one["arguments"])


def test_a_race_has_the_steps_that_its_socket_sends(canned):
    raced = [one for one in canned["answers"] if one["lesson"] == "race"]
    assert [one["steps"] for one in map(itemgetter("arguments"), raced)] == [2, 3]
    for answer, race in zip(raced, canned["race"], strict=True):
        assert answer["arguments"] == race["arguments"]
        arguments, steps = answers.race(race["arguments"])
        assert race == {"arguments": arguments, "steps": list(steps)}
        assert answer["result"]["finishes"]


def test_a_slider_with_very_many_places_gets_some_of_them():
    fine = Control("x", "range", 1.0, low=0.25, high=64.0, step=0.25)
    lesson = Lesson("one", dict, (fine, Control("seed", "range", 0, low=0, high=9, step=1)), str)
    found = list(export.variations(lesson))
    assert {} in found
    values = [one["x"] for one in found if "x" in one]
    assert (values[0], values[-1]) == (0.25, 64.0)
    assert all(fine.check(value) == value and value % 0.25 == 0 for value in values)
    assert not [one for one in found if "seed" in one]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("assets/index-1.js", 'import { x } from "./other.js"'),
        ("assets/index-1.js", 'const later = import("./other.js")'),
        ("assets/index-1.css", 'body { background: url("./x.png") }'),
        ("assets/index-1.css", '@import "other.css";'),
        ("index.html", '<html><head></head><body><img src="./x.png"></body></html>'),
    ],
)
def test_a_page_that_needs_further_files_is_refused(page, name, content):
    with pytest.raises(ValueError, match="file"):
        export.one_file({**page, name: PageFile(content.encode(), "text/plain")}, {})


def test_a_file_that_cannot_be_written_leaves_nothing_behind(few, page, tmp_path):
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(IsADirectoryError):
        export.write(tmp_path / "folder.html", page, "en")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["folder.html", "page"]
