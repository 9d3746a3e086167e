"""Flashcards: their numbers are the experiments', and Anki reads them back."""

import csv
import dataclasses

import pytest

from scaledot.lab import catalogue, experiments, flashcards
from scaledot.lab.experiments import LESSONS
from scaledot.lab.flashcards import Card

LANGUAGES = catalogue.languages()


def _read(anki: str) -> tuple[list[str], list[Card]]:
    """Header lines and notes, as Anki takes the file apart."""
    lines = anki.splitlines(keepends=True)
    header = [line.rstrip("\n") for line in lines if line.startswith("#")]
    notes = csv.reader(lines[len(header) :], delimiter="\t")
    return header, [Card(*fields) for fields in notes]


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_anki_file_gives_every_card_back(lang):
    header, cards = _read(flashcards.anki(lang))
    assert {"#separator:tab", "#html:false"} <= set(header)
    assert cards == flashcards.cards(lang)
    assert len({card.front for card in cards}) == len(cards) > 20  # Anki merges equal fronts


def test_tabs_quotes_and_lines_survive_the_anki_file(monkeypatch):
    nasty = [Card('say "p"', "one\ttwo\nthree"), Card("a, b; c", "")]
    monkeypatch.setattr(flashcards, "cards", lambda lang: nasty)
    assert _read(flashcards.anki("en"))[1] == nasty


def test_every_front_has_a_back_and_a_lesson():
    keys = [key for key in catalogue.load("en") if key.startswith("flashcards.")]
    fronts = {key.removesuffix(".front") for key in keys if key.endswith(".front")}
    assert fronts == {key.removesuffix(".back") for key in keys if key.endswith(".back")}
    lessons = {front.split(".")[1] for front in fronts}
    assert lessons == set(LESSONS) - {"race"}  # a race is too long to run for a card


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_cards_follow_the_lessons_in_order(lang):
    texts = catalogue.load(lang)
    fronts = [key for key in texts if flashcards.FRONT.fullmatch(key)]
    assert len(flashcards.cards(lang)) == len(fronts)
    first = flashcards.cards(lang)[0]
    assert first.front == catalogue.fill(
        texts["flashcards.flow.shape.front"], experiments.as_json(experiments.flow())
    )


@pytest.mark.parametrize("lang", LANGUAGES)
def test_a_card_carries_the_number_of_the_experiment(lang):
    backs = " ".join(card.back for card in flashcards.cards(lang))
    variance, heads = experiments.variance(), experiments.heads()
    gradients, scores = experiments.gradients(), experiments.scores()
    for number in (
        f"{variance.variance:.3g}",
        f"{variance.mean_abs:.3g}",
        f"{heads.sd_wrong:.3g}",
        f"{gradients.p99:.2g}",
        f"{scores.additive.bound:.3g}",
    ):
        assert number in backs


def test_the_two_languages_carry_the_same_numbers():
    for english, hinglish in zip(flashcards.cards("en"), flashcards.cards("hi"), strict=True):
        assert english.back != hinglish.back
        assert set(_numbers(hinglish.back)) >= set(_measured_numbers(english.back))


def test_another_measurement_makes_another_card(monkeypatch):
    before = flashcards.cards("en")
    lesson = LESSONS["variance"]
    other = dataclasses.replace(lesson, run=lambda **given: lesson.run(**{**given, "seed": 1}))
    monkeypatch.setitem(LESSONS, "variance", other)
    after = flashcards.cards("en")
    changed = [new for old, new in zip(before, after, strict=True) if old != new]
    assert any(f"{experiments.variance(seed=1).variance:.3g}" in card.back for card in changed)
    assert len(changed) == 3  # the cards of that lesson, and no other


def _numbers(text: str) -> list[str]:
    return [word.strip(".,;:()[]%") for word in text.split()]


def _measured_numbers(text: str) -> list[str]:
    """Words with a decimal point: none is typed, all are filled in."""
    return [word for word in _numbers(text) if word.replace(".", "", 1).isdigit() and "." in word]
