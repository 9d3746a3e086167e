"""The lab's words: two languages, one set of keys, no number typed where one is measured."""

import functools
import json
import re
from importlib import resources

import pytest

from scaledot.lab import catalogue
from scaledot.lab.experiments import LESSONS, as_json
from scaledot.lab.explain.telling import OF_A_CLAIM

ENGLISH, HINGLISH = catalogue.load("en"), catalogue.load("hi")
KINDS = ("title", "question", "text", "claim", "verdict", "control", "value", "step")
OTHERS = ("explain", "flashcards", "page")

# Arguments under which every claim is made: times are measured only when asked for.
ARGUMENTS = {"scores": {"measure": True}, "race": {"steps": 50}}
# And others, where some claims give way to another one.
OTHERWISE = {"race": {"rules": "none", "d_k": 16, "rate": 3.0, "steps": 50}}

# Words that are names and stay what they are; symbols and single letters need no entry.
NAMES = {
    *("d_k", "d_model", "W_Q", "W_K", "W_V", "sd", "ms", "cosine"),
    *("Adam", "SGD", "GPT", "nn", "MultiheadAttention", "LayerNorm"),
    *("float16", "bfloat16", "float32", "float64"),
    *("scaledot", "Python", "Anki", "PNG", "SVG", "CSV", "JSON"),
}
HINDI = re.compile(
    r"\b(hai|hain|ho|hota|hoti|hote|ka|ki|ke|ko|se|mein|par|aur|nahi|kya|kyun|toh|yeh|woh|karo|"
    r"kar|wala|wale|wali|tak|bina|jab|jo|ek|liye|naapa|sahi|galat|chahiye|kitna|kitne|kitni|yaani)\b",
    re.IGNORECASE,
)


@functools.cache
def measured(name: str, otherwise: bool = False) -> tuple:
    """The lesson's result, and the same as JSON."""
    lesson = LESSONS[name]
    given = (OTHERWISE if otherwise else ARGUMENTS).get(name, {})
    result = lesson.run(**lesson.arguments(given))
    return result, as_json(result)


def test_both_languages_have_the_same_keys_in_the_same_order():
    assert list(ENGLISH) == list(HINGLISH)


@pytest.mark.parametrize("lang", catalogue.languages())
def test_the_file_is_sorted_by_lesson_and_then_by_key_and_names_no_key_twice(lang):
    text = resources.files(catalogue).joinpath(f"{lang}.json").read_text(encoding="utf-8")
    keys = [key for key, _ in json.loads(text, object_pairs_hook=list)]
    assert len(keys) == len(set(keys))
    assert keys == sorted(keys, key=_place), "sort it: lessons in teaching order, then the rest"


def test_both_languages_fill_in_the_same_numbers():
    for key, english in ENGLISH.items():
        own, other = (catalogue.placeholders(text) for text in (english, HINGLISH[key]))
        assert sorted(own) == sorted(other), key


def test_every_key_has_a_place_in_the_lab():
    for key in ENGLISH:
        first, kind, *_ = key.split(".")
        assert first in OTHERS or (first in LESSONS and kind in KINDS), key


@pytest.mark.parametrize("lang", catalogue.languages())
@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_is_told_in_four_to_eight_paragraphs_filled_from_its_result(name, lang):
    keys = list(catalogue.paragraphs(lang, name))
    texts = catalogue.load(lang)
    assert 4 <= len(keys) <= 8
    assert len(keys) == sum(key.startswith(f"{name}.text.") for key in texts)  # no gap in between
    for key in (f"{name}.title", f"{name}.question", *keys):
        assert "{" not in catalogue.text(lang, key, **measured(name)[1])


@pytest.mark.parametrize("lang", catalogue.languages())
@pytest.mark.parametrize("name", LESSONS)
def test_every_claim_has_its_sentence_and_its_verdict(name, lang):
    made = [measured(name, otherwise) for otherwise in {False, name in OTHERWISE}]
    keys = {claim.key for result, _ in made for claim in result.claims}
    texts = catalogue.load(lang)
    for kind in ("claim", "verdict"):
        assert {key.split(".")[2] for key in texts if key.startswith(f"{name}.{kind}.")} == keys
    for result, numbers in made:
        for claim in result.claims:
            own = {part: as_json(getattr(claim, part)) for part in OF_A_CLAIM}
            for kind in ("claim", "verdict"):
                said = catalogue.text(lang, f"{name}.{kind}.{claim.key}", **{**numbers, **own})
                assert "None" not in said


@pytest.mark.parametrize("lang", catalogue.languages())
@pytest.mark.parametrize("name", LESSONS)
def test_every_control_and_every_choice_has_a_label(name, lang):
    texts = catalogue.load(lang)
    labels = {key.split(".")[2] for key in texts if key.startswith(f"{name}.control.")}
    assert labels == {control.name for control in LESSONS[name].controls}
    choices = {key.split(".")[2] for key in texts if key.startswith(f"{name}.value.")}
    controls = [control for control in LESSONS[name].controls if control.kind == "choice"]
    assert choices == {value for control in controls for value in control.values}


@pytest.mark.parametrize("lang", catalogue.languages())
def test_a_sentence_is_true_wherever_the_controls_are(lang):
    """Found by moving them: the row it is about, a share of one, no difference at all."""
    vectors = measured("vectors")[1]
    assert "q = [2, -1, 2, -1]" in catalogue.text(lang, "vectors.verdict.cancel", **vectors)
    for name in ("divisors", "heads", "flow"):
        one = as_json(LESSONS[name].run(**LESSONS[name].arguments({"heads": 1})))
        said = [catalogue.text(lang, key, **one) for key in catalogue.paragraphs(lang, name)]
        assert not re.search(r"\b1 heads", " ".join(said))
    assert "0 " in catalogue.text(lang, "scores.verdict.identity", measured=0.0)
    assert "e+00" not in catalogue.text(lang, "scores.verdict.identity", measured=0.0)


def test_no_measured_number_is_typed_into_a_paragraph_or_a_verdict():
    definitions = {"0.001", "0.02"}  # "small", and GPT-2's deviation: said, not measured
    for key, text in {**ENGLISH, **{f"hi {key}": text for key, text in HINGLISH.items()}}.items():
        if {"text", "verdict", "front", "back"} & set(key.split(".")):
            typed = set(re.findall(r"(?<![.\d])\d*\.\d+", _literal(text)))
            assert typed <= definitions, (key, typed)


def test_hinglish_differs_from_english_unless_it_is_names_and_symbols():
    for key, english in ENGLISH.items():
        if english == HINGLISH[key]:
            words = re.findall(r"[^\W\d]\w+", _literal(english))
            assert set(words) <= NAMES, (key, words)


def test_a_hinglish_sentence_has_hindi_in_it_and_an_english_one_has_none():
    for key, english in ENGLISH.items():
        if len(english.split()) > 6:
            assert HINDI.search(_literal(HINGLISH[key])), key
            assert not HINDI.search(_literal(english)), key


def test_hinglish_is_in_latin_letters():
    letters = {letter for text in HINGLISH.values() for letter in text if letter.isalpha()}
    assert not [letter for letter in letters if "\u0900" <= letter <= "\u097f"]


@pytest.mark.parametrize(
    ("template", "filled"),
    [
        ("{a.b.1:.2f}", "2.50"),
        ("{a.b}", "[1, 2.5]"),
        ("{a.b:.1f}", "[1.0, 2.5]"),
        ("{share:.1%}", "12.5%"),
        ("{large:,}", "12,345"),
        ("{large:,.1f}", "12,345.0"),
        ("{tiny:.2e} {tiny:.3g}", "1.23e-10 1.23e-10"),
        ("{word:.2f} {word}", "nan nan"),  # as JSON has it
        ("{{{large}}}", "{12345}"),
        ("{share} {share:g} {large:g}", "0.125 0.125 12345"),
    ],
)
def test_a_placeholder_is_a_path_and_a_specification(template, filled):
    numbers = {
        "a": {"b": [1.0, 2.5]},
        "share": 0.125,
        "large": 12345,
        "tiny": 1.234e-10,
        "word": "nan",
    }
    assert catalogue.fill(template, numbers) == filled


@pytest.mark.parametrize("path", ["missing", "a.missing", "a.b.2", "a.b.x", "a.b.0.c"])
def test_a_path_that_leads_nowhere_is_an_error(path):
    with pytest.raises(KeyError, match=re.escape(repr(path))):
        catalogue.fill("{" + path + "}", {"a": {"b": [1, 2]}})


@pytest.mark.parametrize("specification", ["d", "10.2f", ".2x", "+.2f", "s"])
def test_a_specification_beyond_the_small_language_is_an_error(specification):
    with pytest.raises(ValueError, match="no specification"):
        catalogue.fill("{a:" + specification + "}", {"a": 1})


def test_every_specification_of_the_files_is_of_the_small_language():
    for text in (*ENGLISH.values(), *HINGLISH.values()):
        for _, specification in catalogue.placeholders(text):
            assert catalogue.SPECIFICATION.fullmatch(specification)


def test_an_unknown_language_or_key_is_named():
    with pytest.raises(ValueError, match="lang='fr' is no language of the lab; use en or hi"):
        catalogue.load("fr")
    with pytest.raises(KeyError, match=re.escape("no text 'variance.nothing'")):
        catalogue.text("en", "variance.nothing")


def test_what_is_loaded_may_be_changed_without_harm():
    catalogue.load("en").clear()
    assert catalogue.load("en") == ENGLISH


def _literal(text: str) -> str:
    """The text without its placeholders."""
    return re.sub(r"\{[^{}]*\}", "", text)


def _place(key: str) -> tuple:
    names = [*LESSONS]
    first = key.split(".")[0]
    rank = names.index(first) if first in names else len(names)
    parts = [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in key.split(".")]
    return rank, parts
