"""The list of lessons: name and question, in the order they build on each other."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from scaledot.lab import catalogue
from scaledot.lab.experiments import LESSONS
from scaledot.lab.explain.voice import Voice


def whole(voice: Voice) -> Iterator[RenderableType]:
    yield Text(voice.say("explain.list"), "bold")
    yield Text(voice.say("explain.intro"), "dim")
    yield Padding(_lessons(voice), (1, 0))
    yield _commands(voice)


def as_data(lang: str) -> list[dict[str, str]]:
    texts = catalogue.load(lang)
    return [
        {"name": name, "title": texts[f"{name}.title"], "question": texts[f"{name}.question"]}
        for name in LESSONS
    ]


def _lessons(voice: Voice) -> Table:
    """Two columns; in another language the English question stands below, to find one's way."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold green")
    table.add_column()
    for name in LESSONS:
        question = Text(voice.say(f"{name}.question"))
        if voice.lang != "en":
            english = voice.write(catalogue.text("en", f"{name}.question"))
            question.append(f"\n{english}", "dim")
        table.add_row(name, question)
    return table


def _commands(voice: Voice) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(style="green")
    language = "" if voice.lang == "en" else f" --lang {voice.lang}"
    other = " --lang hi" if voice.lang == "en" else ""
    table.add_row(voice.say("explain.tell"), f"scaledot explain {next(iter(LESSONS))}{language}")
    table.add_row(voice.say("explain.other_language"), f"scaledot explain{other}")
    table.add_row(voice.say("explain.cards"), f"scaledot explain flashcards{language}")
    return table
