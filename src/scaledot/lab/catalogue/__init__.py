"""What the lab says, in English (`en.json`) and Hinglish (`hi.json`: Hindi in Latin letters).

One flat file a language, the same keys and the same placeholders in both:

    {lesson}.title, .question, .text.1 ...      the lesson's words, a paragraph each
    {lesson}.claim.{key}, .verdict.{key}        the folklore's sentence; what is right
    {lesson}.control.{name}, .value.{choice}    labels of what a person can move
    page.*, explain.*, flashcards.*             the words of the page, the terminal, the cards

No measured number is typed into a text. A placeholder names a field of the experiment's result as
JSON, by a path of names and places with dots between: `{sd:.2f}`, `{rules.0.top:.3f}`. Claims and
verdicts may also name `folklore`, `measured` and `theory` of their own claim. A list is written
[a, b, c], each item by the same specification. The specifications, small enough to be repeated in
another language: `.2f` `.3g` `.1e` `.1%`, each with a comma in front for thousands (`,.0f`), and
`,` alone; `g` is what a number gets without one, and text is written as it is.
"""

import functools
import json
import re
import string
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

SPECIFICATION = re.compile(r",?(\.\d+[fge%]|g)?")


def languages() -> tuple[str, ...]:
    """English first: it is what every other language is compared with."""
    return ("en", "hi")


def load(lang: str) -> dict[str, str]:
    """Every text of a language, in the order of its file."""
    return dict(_texts(lang))


def text(lang: str, key: str, /, **numbers: Any) -> str:
    """One text, its placeholders filled from `numbers`: the result of an experiment as JSON."""
    texts = _texts(lang)
    if key not in texts:
        raise KeyError(f"{lang}.json has no text {key!r}")
    return fill(texts[key], numbers)


def paragraphs(lang: str, name: str) -> Iterator[str]:
    """The keys of a lesson's paragraphs, in order."""
    texts = _texts(lang)
    number = 1
    while (key := f"{name}.text.{number}") in texts:
        yield key
        number += 1


def fill(template: str, numbers: Mapping[str, Any]) -> str:
    """The template with every placeholder replaced; a name that is not there is a KeyError."""
    return _Filler().vformat(template, (), numbers)


def placeholders(template: str) -> list[tuple[str, str]]:
    """(path, specification) of each, in order."""
    parts = string.Formatter().parse(template)
    return [(name, spec or "") for _, name, spec, _ in parts if name is not None]


def at(numbers: Any, path: str) -> Any:
    """What lies at a path of names and places: `rules.0.top`."""
    value = numbers
    for step in path.split("."):
        try:
            value = value[int(step)] if isinstance(value, (list, tuple)) else value[step]
        except (KeyError, IndexError, TypeError, ValueError):
            raise KeyError(f"there is no {path!r} to fill in: nothing at {step!r}") from None
    return value


class _Filler(string.Formatter):
    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        return at(kwargs, field_name), field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        return written(value, format_spec)


def written(value: Any, specification: str = "") -> str:
    """A number, a list of them or a text, as the specification says."""
    if not SPECIFICATION.fullmatch(specification):
        raise ValueError(f"{specification!r} is no specification of the catalogue")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(written(item, specification) for item in value)}]"
    if isinstance(value, (str, bool)) or value is None:
        return str(value)  # "nan" and "inf" are text in JSON
    return format(value, specification or "g" if isinstance(value, float) else specification)


@functools.cache
def _texts(lang: str) -> dict[str, str]:
    if lang not in languages():
        raise ValueError(f"lang={lang!r} is no language of the lab; use {' or '.join(languages())}")
    file = resources.files(__name__).joinpath(f"{lang}.json")
    return json.loads(file.read_text(encoding="utf-8"))
