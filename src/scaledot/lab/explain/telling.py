"""One lesson, told: heading, text with its plots, claims and measurements, PyTorch, what next."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from scaledot.lab import catalogue
from scaledot.lab.experiments import LESSONS
from scaledot.lab.experiments.lesson import Claim, Control, Lesson, as_json
from scaledot.lab.explain import plots
from scaledot.lab.explain.voice import Voice

WIDEST = 100  # columns: longer lines are hard to read
OF_A_CLAIM = ("folklore", "measured", "theory")  # what its texts may name
MOST_NUMBERS = 6  # of a list in a cell of the table of claims


def whole(
    voice: Voice, lesson: Lesson, arguments: Mapping[str, Any], result: Any
) -> Iterator[RenderableType]:
    """The lesson, part by part, in the order it is told."""
    yield _heading(voice, lesson, _used(arguments, result))
    yield from _body(voice, lesson.name, result)
    yield from _ending(voice, lesson, arguments, result)


def _used(arguments: Mapping[str, Any], result: Any) -> dict[str, Any]:
    """Where an experiment took fewer of something than it was asked for, what it took."""
    took = {name: getattr(result, name, asked) for name, asked in arguments.items()}
    return {
        name: took[name] if type(took[name]) is type(asked) is int else asked
        for name, asked in arguments.items()
    }


def _heading(voice: Voice, lesson: Lesson, arguments: Mapping[str, Any]) -> RenderableType:
    title = Text(voice.say(f"{lesson.name}.title"), "bold")
    question = Text(voice.say(f"{lesson.name}.question"), "italic cyan")
    told = "  ".join(f"{name}={catalogue.written(value)}" for name, value in arguments.items())
    with_what = Text(f"{voice.say('explain.arguments')}: {voice.write(told)}", "dim")
    line = "-" if voice.ascii_only else "─"
    return Group(Rule(title, align="left", style="cyan", characters=line), question, with_what)


def _body(voice: Voice, name: str, result: Any) -> Iterator[RenderableType]:
    """The paragraphs, each with the plots that belong under it."""
    numbers = as_json(result)
    pictures = plots.of(name, result, voice)
    for place, key in enumerate(catalogue.paragraphs(voice.lang, name), 1):
        yield _apart(Text(voice.say(key, **numbers)))
        for picture in pictures.get(place, ()):
            yield _apart(picture)


def _ending(
    voice: Voice, lesson: Lesson, arguments: Mapping[str, Any], result: Any
) -> Iterator[RenderableType]:
    if result.claims:
        yield _apart(claims(voice, lesson.name, result))
    yield _apart(Text(voice.say("explain.python"), "bold"))
    yield Code(lesson.python(arguments))
    yield _apart(_what_next(voice, lesson))


def claims(voice: Voice, name: str, result: Any) -> Table:
    """Claim | measured | theory | agrees, and under each claim what is right."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, header_style="cyan", padding=(0, 1, 0, 0))
    table.add_column(voice.say("explain.claim"), ratio=1)
    for column in ("measured", "theory"):
        table.add_column(voice.say(f"explain.{column}"), justify="right", max_width=14)
    table.add_column(voice.say("explain.agrees"), no_wrap=True)
    numbers = as_json(result)
    for place, claim in enumerate(result.claims):
        if place:
            table.add_row()
        table.add_row(*_cells(voice, name, claim, numbers))
    return table


def _cells(
    voice: Voice, name: str, claim: Claim, numbers: Mapping[str, Any]
) -> tuple[RenderableType, ...]:
    own = {**numbers, **{name: as_json(getattr(claim, name)) for name in OF_A_CLAIM}}
    said = Text(voice.say(f"{name}.claim.{claim.key}", **own), "italic")
    right = Text(voice.say(f"{name}.verdict.{claim.key}", **own), "dim")
    return (
        Group(said, right),
        Text(_short(claim.measured), "bold"),
        _short(claim.theory),
        _mark(voice, claim),
    )


def _mark(voice: Voice, claim: Claim) -> RenderableType:
    if claim.agrees is None:
        return "-"
    if claim.agrees:
        return Text(voice.say("explain.yes"), "bold green")
    return Text(voice.say("explain.no"), "bold red")


def _short(value: Any) -> str:
    """A number in five digits at most; a list with one number a line."""
    if value is None:
        return "-"
    if isinstance(value, tuple):
        shown = [_short(item) for item in value[:MOST_NUMBERS]]
        return "\n".join([*shown, "..."] if len(value) > MOST_NUMBERS else shown)
    if isinstance(value, str):
        return value
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.5g}" if size >= 1e-3 else f"{value:.2e}"


def _what_next(voice: Voice, lesson: Lesson) -> RenderableType:
    names = list(LESSONS)
    after = [*names[names.index(lesson.name) + 1 :], "flashcards"][0]
    language = "" if voice.lang == "en" else f" --lang {voice.lang}"
    this = f"scaledot explain {lesson.name}{language}"
    grid = Table.grid(padding=(0, 1))
    grid.add_row(voice.say("explain.move"), Text(f"{this} {_moved(lesson.controls[0])}", "green"))
    grid.add_row(voice.say("explain.options"), Text(f"{this} --help", "green"))
    grid.add_row(
        voice.say("explain.next"), Text(f"scaledot explain {after}{language}", "bold green")
    )
    return grid


def _moved(control: Control) -> str:
    """A control at another value than its default, as one would type it."""
    name = f"--{control.name.replace('_', '-')}"
    match control.kind:
        case "choice" | "steps":
            others = [value for value in control.values if value != control.default]
            return f"{name} {others[-1]}"
        case "numbers":
            first, *rest = control.default
            return " ".join([name, *(f"{number:g}" for number in (2 * first, *rest))])
        case "text":
            return f'{name} "your own words"'
        case "toggle":
            return name.replace("--", "--no-") if control.default else name
    assert control.high is not None  # a range
    return f"{name} {min(2 * control.default or 1, control.high):g}"


class Code:
    """Lines of Python, never broken: a terminal wraps what is too long, and copies it whole."""

    def __init__(self, code: str) -> None:
        self.text = Syntax("", "python", theme="ansi_dark").highlight(code)
        self.text.rstrip()
        self.text.no_wrap, self.text.overflow = True, "ignore"

    def __rich__(self) -> Text:
        return self.text


def _apart(part: RenderableType) -> Padding:
    return Padding(part, (1, 0, 0, 0))
