"""Every panel opens, in both languages, and shows the library's own numbers."""

import itertools
import json
from typing import Any

import pytest
from lab_page import LESSONS, PANELS, PHONE, assert_numbers_of, opened
from playwright.sync_api import expect

from scaledot.lab.catalogue import load
from scaledot.lab.experiments.lesson import Control

STICKS_OUT = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
# Digits wider than their cell, and labels that begin left of their drawing.
OVERLAPS = """() => [...document.querySelectorAll("svg.chart text")].filter((text) => {
    const box = text.getBoundingClientRect();
    const cell = text.classList.contains("digits") && text.previousElementSibling;
    return box.left < text.ownerSVGElement.getBoundingClientRect().left - 2
        || (cell && box.width > cell.getBoundingClientRect().width + 2);
}).map((text) => text.textContent)"""
SLOW = {"race"}  # the panel plays it; test_race.py


@pytest.fixture(scope="module")
def page(chromium, lab):
    with opened(chromium, lab) as page:
        yield page


@pytest.mark.parametrize("lang", ["en", "hi"])
def test_every_panel_opens(page, lang):
    words = load(lang)
    for panel in PANELS:
        page.go(panel, lang=lang)
        key = f"page.{panel}" if panel == "flashcards" else panel
        expect(page.page.locator("h1")).to_have_text(_set(words[f"{key}.question"]))
        expect(page.page.locator("html")).to_have_attribute(
            "lang", {"en": "en", "hi": "hi-Latn"}[lang]
        )
        text = page.page.locator("body").inner_text()
        prefixes = tuple(f"{name}." for name in (*LESSONS, "page"))
        raw = [word for word in text.split() if word.startswith(prefixes) and word in words]
        assert raw == [], "keys of the catalogue, shown instead of their words"
        said = "".join(page.page.locator(".lead, .words").all_inner_texts())
        assert "…" not in said, panel


@pytest.mark.parametrize("lesson", sorted(set(LESSONS) - SLOW))
def test_the_page_shows_the_librarys_numbers(page, lesson):
    arguments = LESSONS[lesson].arguments()
    page.go(lesson)
    page.answered(lesson, arguments)
    assert_numbers_of(lesson, arguments, page.numbers())


@pytest.mark.parametrize("lesson", sorted(set(LESSONS) - SLOW))
def test_each_control_changes_the_right_number(page, lesson):
    for control in LESSONS[lesson].controls:
        page.go(lesson)
        before = LESSONS[lesson].arguments()
        page.answered(lesson, before)
        shown = page.numbers()
        value = _moved(page.page, lesson, control)
        after = LESSONS[lesson].arguments({control.name: value})
        if lesson == "heads" and control.name in ("d_model", "heads"):
            assert after["preset"] == "custom"
        page.answered(lesson, after)
        assert_numbers_of(lesson, after, page.numbers())
        assert page.numbers() != shown, f"{lesson}: {control.name} changes nothing"


def test_every_box_of_the_flow_opens_its_numbers(page):
    arguments = LESSONS["flow"].arguments()
    page.go("flow")
    page.answered("flow", arguments)
    boxes = page.page.locator("[data-box]")
    assert boxes.count() == 15
    for index in range(boxes.count()):
        box = boxes.nth(index)
        box.click()
        expect(box).to_have_attribute("aria-pressed", "true")
        shown = page.numbers()
        name = box.get_attribute("data-box")
        if name not in ("tokens", "softmax"):
            assert f"{name}.0.0" in shown
        assert_numbers_of("flow", arguments, shown)


def test_a_typed_sentence_goes_through_the_flow(page):
    page.go("flow")
    page.page.fill("#flow-sentence", "Attention is all you need")
    arguments = LESSONS["flow"].arguments({"sentence": "Attention is all you need"})
    page.answered("flow", arguments)
    expect(page.page.locator(".chip")).to_have_text(["Attention", "is", "all", "you", "need"])
    assert_numbers_of("flow", arguments, page.numbers())


def test_numbers_are_the_same_in_both_languages(page):
    page.go("divisors")
    page.answered("divisors", LESSONS["divisors"].arguments())
    english = page.numbers()
    page.page.get_by_role("button", name="Hinglish").click()
    expect(page.page.locator("h1")).to_have_text(_set(load("hi")["divisors.question"]))
    hinglish = page.numbers()
    assert set(english) == set(hinglish)
    assert english == hinglish
    page.page.get_by_role("button", name="English").click()
    expect(page.page.locator("h1")).to_have_text(_set(load("en")["divisors.question"]))


def test_a_control_says_when_the_lesson_took_fewer(page):
    page.go("variance", d_k=1024)
    arguments = LESSONS["variance"].arguments({"d_k": 1024})
    page.answered("variance", arguments)
    taken = page.numbers()["samples"]
    assert taken < arguments["samples"]
    shown = page.page.locator('[data-control="samples"]')
    expect(shown).to_have_text(f"{taken} / {arguments['samples']}")
    page.page.locator("#variance-d_k").press("Home")
    expect(shown).to_have_text(str(arguments["samples"]))
    page.go("gradients")
    taken = LESSONS["gradients"].run(**LESSONS["gradients"].arguments()).rows
    expect(page.page.locator('[data-control="rows"]')).to_have_text(f"{taken} / 3000")


def test_a_preset_moves_the_sliders_that_it_sets(page):
    page.go("heads", preset="gpt3")
    for name, value in (("d_model", "12\u202f288"), ("heads", "96")):
        expect(page.page.locator(f'[data-control="{name}"]')).to_have_text(value)
    page.page.locator("#heads-d_model").press("ArrowLeft")
    page.answered("heads", LESSONS["heads"].arguments({"d_model": 6144}))


def test_a_mistake_is_told_in_words(page):
    page.go("vectors")
    page.page.fill("#vectors-q", "1, 2, 3")
    expect(page.page.locator('[role="alert"]')).to_contain_text("q has 3 numbers but k has 2")
    page.page.fill("#vectors-k", "1, two")
    expect(page.page.locator("#vectors-k")).to_have_attribute("aria-invalid", "true")
    page.page.fill("#vectors-k", "1, 2, 4")
    page.answered("vectors", {"q": [1, 2, 3], "k": [1, 2, 4]})
    expect(page.page.locator('[role="alert"]')).to_have_count(0)
    assert page.numbers()["dot"] == 17


def test_what_is_typed_fits_a_phone(chromium, lab):
    """A long word, a wide matrix, powers that no number holds: nothing sticks out or overlaps."""
    with opened(chromium, lab) as page:
        page.page.set_viewport_size(PHONE)
        for lesson, given in (
            ("flow", {"sentence": 60 * "long", "box": "tokens"}),
            ("jacobian", {"scores": list(range(12))}),
            ("saturation", {"scores": [1e6, -1e6]}),
            ("assumption", {}),
        ):
            page.go(lesson, **given)
            assert page.page.evaluate(STICKS_OUT) <= 0, lesson
            assert page.page.evaluate(OVERLAPS) == [], lesson


def _moved(page: Any, lesson: str, control: Control) -> Any:
    """Move a control by hand, and say which value it has then."""
    target = page.locator(f"#{lesson}-{control.name}")
    match control.kind:
        case "steps":
            # To an end: next to the default some widths and counts are capped alike.
            first = control.default != control.values[0]
            target.press("Home" if first else "End")
            return control.values[0 if first else -1]
        case "range" if control.name == "seed":
            target.fill("7")
            return 7
        case "range":
            target.press("ArrowRight")
            return control.default + control.step
        case "toggle":
            target.click()
            return not control.default
        case "choice":
            value = next(value for value in reversed(control.values) if value != control.default)
            page.locator(f"#{lesson}-{control.name}-{value}").check(force=True)
            return value
        case "text":
            target.fill("one two")
            return "one two"
        case "numbers":
            numbers = [float(n + 1) for n in range(len(control.default))]
            target.fill(json.dumps(numbers))
            return numbers
    raise AssertionError(control.kind)


def _set(text: str) -> str:
    """As the page sets it: d_k loses its underscore to a subscript."""
    for letter, below in itertools.product("dWqkpzw", ("k", "model", "Q", "K", "V", "O", "i", "j")):
        text = text.replace(f"{letter}_{below}", f"{letter}{below}")
    return text
