"""Flashcards whose numbers come from the experiments, so that a card cannot drift from them.

The words are in the catalogue: `flashcards.{lesson}.{name}.front` and `.back`, filled from the
lesson's result at its defaults.
"""

import csv
import io
import re
from dataclasses import dataclass
from typing import Any

from scaledot.lab import catalogue
from scaledot.lab.experiments import LESSONS
from scaledot.lab.experiments.lesson import as_json

FRONT = re.compile(r"flashcards\.(?P<lesson>\w+)\.(?P<name>\w+)\.front")
HEADER = ("#separator:tab", "#html:false", "#tags:scaledot")  # what Anki reads before the cards


@dataclass(frozen=True)
class Card:
    front: str
    back: str


def cards(lang: str) -> list[Card]:
    """Every card, in the order of the lessons."""
    texts = catalogue.load(lang)
    found = [match for key in texts if (match := FRONT.fullmatch(key))]
    made = []
    for name in LESSONS:
        own = [match for match in found if match["lesson"] == name]
        numbers = _measured(name) if own else {}
        for match in own:
            back = texts[match[0].removesuffix("front") + "back"]
            made.append(
                Card(catalogue.fill(texts[match[0]], numbers), catalogue.fill(back, numbers))
            )
    return made


def anki(lang: str) -> str:
    """The text file that Anki imports: one note a line, front, tab, back."""
    file = io.StringIO()
    file.writelines(f"{line}\n" for line in HEADER)
    writer = csv.writer(file, delimiter="\t", lineterminator="\n")
    writer.writerows((card.front, card.back) for card in cards(lang))
    return file.getvalue()


def _measured(name: str) -> dict[str, Any]:
    lesson = LESSONS[name]
    return as_json(lesson.run(**lesson.arguments({})))
