"""What the page reads by HTTP."""

import threading

import pytest
from served_lab import TOKEN
from starlette.testclient import TestClient

import scaledot
from scaledot.lab import catalogue, flashcards
from scaledot.lab.experiments import LESSONS, as_json
from scaledot.lab.experiments.studied import study
from scaledot.lab.server import answers, app


def test_lessons_are_listed_with_every_control(client):
    found = client.get(f"/{TOKEN}/api/lessons").json()
    assert [lesson["name"] for lesson in found["lessons"]] == list(LESSONS)
    assert found["study"] == as_json(study())  # told before a race is run
    assert (found["version"], found["run"], found["lang"]) == (scaledot.__version__, False, "en")
    assert found["languages"] == ["en", "hi"]
    for listed in found["lessons"]:
        controls = LESSONS[listed["name"]].controls
        assert [one["name"] for one in listed["controls"]] == [one.name for one in controls]
        for shown, control in zip(listed["controls"], controls, strict=True):
            assert shown["kind"] == control.kind
            assert shown["values"] == list(control.values)
            default = control.default
            assert shown["default"] == (list(default) if isinstance(default, tuple) else default)


@pytest.mark.parametrize("lang", ["en", "hi"])
def test_the_catalogue_is_that_of_the_library(client, lang):
    assert client.get(f"/{TOKEN}/api/catalogue/{lang}").json() == catalogue.load(lang)


@pytest.mark.parametrize("path", ["catalogue/de", "flashcards/de", "flashcards/de.txt", "nothing"])
def test_what_does_not_exist_is_said_in_one_line(client, path):
    answer = client.get(f"/{TOKEN}/api/{path}")
    assert answer.status_code == 404
    assert answer.text.count("\n") == 1


@pytest.mark.parametrize("lang", ["en", "hi"])
def test_flashcards_come_as_json_and_for_anki(client, lang):
    found = client.get(f"/{TOKEN}/api/flashcards/{lang}").json()
    made = flashcards.cards(lang)
    assert found == [{"front": card.front, "back": card.back} for card in made]
    text = client.get(f"/{TOKEN}/api/flashcards/{lang}.txt")
    assert text.text == flashcards.anki(lang)
    assert "attachment" in text.headers["content-disposition"]


def test_a_bug_of_ours_is_not_shown_to_the_page(client, monkeypatch, caplog):
    def broken(lang):
        raise KeyError("a secret of the inside")

    monkeypatch.setattr(answers, "cards", broken)
    answer = client.get(f"/{TOKEN}/api/flashcards/en")
    assert answer.status_code == 500
    assert "secret" not in answer.text


def test_every_file_of_the_page_has_its_type(client):
    for path, kind in (
        ("assets/index-1.js", "text/javascript"),
        ("assets/index-1.css", "text/css"),
        ("assets/icon.svg", "image/svg+xml"),
    ):
        assert client.get(f"/{TOKEN}/{path}").headers["content-type"].startswith(kind)


def test_the_language_and_the_run_are_passed_on(page, tmp_path):
    made = app.make_app(page, TOKEN, 8123, lang="hi", run=tmp_path / "run.vitals")
    with TestClient(made, base_url="http://127.0.0.1:8123") as client:
        found = client.get(f"/{TOKEN}/api/lessons").json()
    assert (found["lang"], found["run"]) == ("hi", True)


@pytest.mark.parametrize("shows_run", [False, True])
def test_the_first_lesson_is_computed_ahead_only_where_lessons_are_shown(
    page, tmp_path, monkeypatch, shows_run
):
    asked = threading.Event()
    monkeypatch.setattr(answers, "answer", lambda *_: asked.set())
    run = tmp_path / "run.vitals" if shows_run else None
    with TestClient(app.make_app(page, TOKEN, 8123, run=run), base_url="http://127.0.0.1:8123"):
        assert asked.wait(0.2 if shows_run else 60.0) != shows_run
