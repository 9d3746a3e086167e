"""What the page asks for, as plain JSON values: nothing here knows of the web."""

from collections.abc import Iterator, Mapping
from typing import Any

import scaledot
from scaledot.lab import catalogue, flashcards
from scaledot.lab.experiments import LESSONS, race_steps
from scaledot.lab.experiments.lesson import Lesson, as_json
from scaledot.lab.experiments.studied import study

RACE = "race"


def listing(lang: str, run: bool) -> dict[str, Any]:
    """Lessons in teaching order with their controls, and what this server can show."""
    return {
        "version": scaledot.__version__,
        "lessons": [
            {"name": name, "controls": as_json(lesson.controls)} for name, lesson in LESSONS.items()
        ],
        "languages": list(catalogue.languages()),
        "lang": lang,
        "run": run,
        "study": as_json(study()),  # told before a race is run
    }


def answer(name: str, given: Any) -> dict[str, Any]:
    """Raises ValueError, worded for a person, where the lesson or an argument is wrong."""
    lesson = find(name)
    arguments = checked(lesson, given)
    return {
        "lesson": name,
        "arguments": as_json(arguments),
        "result": as_json(lesson.run(**arguments)),
        "python": lesson.python(arguments),
    }


def race(given: Any) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    """The complete arguments, and the steps, each computed when it is asked for."""
    arguments = checked(find(RACE), given)
    return as_json(arguments), map(as_json, race_steps(**arguments))


def cards(lang: str) -> list[dict[str, Any]]:
    return [{"front": card.front, "back": card.back} for card in flashcards.cards(lang)]


def find(name: Any) -> Lesson:
    if not isinstance(name, str) or name not in LESSONS:
        raise ValueError(f"there is no lesson {_short(name)}; there are {', '.join(LESSONS)}")
    return LESSONS[name]


def checked(lesson: Lesson, given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise ValueError(f"arguments are {_short(given)}; expected names with values")
    return lesson.arguments(given)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
