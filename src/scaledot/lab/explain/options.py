"""The command line of a lesson: its controls are its options, and nothing else is."""

import argparse
import difflib
from collections.abc import Sequence
from typing import Any

from scaledot.lab import catalogue
from scaledot.lab.experiments import LESSONS
from scaledot.lab.experiments.lesson import Control, Lesson
from scaledot.lab.explain.voice import spelled

FLASHCARDS = "flashcards"


class LessonAction(argparse.Action):
    """Everything after the lesson's name is parsed by the lesson's own parser.

    So each lesson has its own --help, and a wrong option is compared with the right ones.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        assert values
        name, *rest = values
        known = [*LESSONS, FLASHCARDS]
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(known)}"
            raise argparse.ArgumentError(None, f"there is no lesson {name!r}{hint}")
        namespace.lesson = name
        own = type(parser)(prog=f"{parser.prog} {name}")
        add_common(own)
        if name == FLASHCARDS:
            own.description = catalogue.text("en", "flashcards.title")
            own.add_argument("--anki", metavar="FILE", help="write the file that Anki imports")
            own.parse_args(rest, namespace)
        else:
            _parse_lesson(own, LESSONS[name], rest, namespace)


def add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lang",
        choices=catalogue.languages(),
        default="en",
        help="en: English (the default), hi: Hinglish",
    )
    parser.add_argument("--json", action="store_true", help="print the same as data")


def _parse_lesson(
    parser: argparse.ArgumentParser,
    lesson: Lesson,
    rest: list[str],
    namespace: argparse.Namespace,
) -> None:
    parser.description = spelled(catalogue.text("en", f"{lesson.name}.question"))
    given = parser.add_argument_group("what you can move")
    for control in lesson.controls:
        label = catalogue.text("en", f"{lesson.name}.control.{control.name}")
        _add_option(given, control, spelled(label).replace("%", "%%"))  # argparse fills in %
    parser.parse_args(rest, namespace)
    moved = {
        control.name: vars(namespace)[control.name]
        for control in lesson.controls
        if vars(namespace)[control.name] is not None
    }
    try:
        namespace.arguments = lesson.arguments(moved)
    except ValueError as wrong:
        parser.error(str(wrong))
    namespace.refuse = parser.error  # for what only the experiment can find wrong


def _add_option(group: argparse._ArgumentGroup, control: Control, label: str) -> None:
    name = f"--{control.name.replace('_', '-')}"
    plain: dict[str, Any] = {"dest": control.name, "default": None}
    shown = catalogue.written(control.default)
    described = f"{label}{_allowed(control)} (default {shown})"
    if control.kind == "toggle":
        group.add_argument(name, action=argparse.BooleanOptionalAction, help=label, **plain)
    elif control.kind == "numbers":
        group.add_argument(
            name, nargs="+", action=_Flat, type=_numbers, metavar="X", help=described, **plain
        )
    elif control.kind in ("steps", "range"):
        group.add_argument(name, type=_number, metavar="N", help=described, **plain)
    else:
        group.add_argument(name, metavar=control.kind.upper(), help=described, **plain)


def _allowed(control: Control) -> str:
    if control.kind == "range":
        return f": {_plain(control.low)} to {_plain(control.high)}"
    return f": {', '.join(map(str, control.values))}" if control.values else ""


def _plain(number: float | None) -> str:
    """2147483647, where g would write 2.14748e+09."""
    assert number is not None  # a range has both ends
    return str(int(number)) if number == int(number) else f"{number:g}"


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None


def _numbers(text: str) -> list[int | float]:
    return [_number(part) for part in text.split(",") if part.strip()]


class _Flat(argparse.Action):
    """`--scores 12 2 -1`, `--scores 12,2,-1` and `--scores=12,2,-1` are the same."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, [number for part in values or () for number in part])
