"""`scaledot explain`: the lessons of the lab in a terminal, in English or Hinglish.

Without a lesson it lists them; with one it tells it: text, plots, the folklore's claims beside the
measured values, and the lines of PyTorch to repeat it. Options are the lesson's controls.
"""

import argparse
import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from scaledot.atomic_file import write_atomically
from scaledot.lab import flashcards
from scaledot.lab.experiments import LESSONS
from scaledot.lab.experiments.lesson import as_json
from scaledot.lab.explain import cards, listing, options, race, telling
from scaledot.lab.explain.voice import Voice
from scaledot.printable import complain, one_line
from scaledot.terminal import Console, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    lesson = parser.add_argument(
        "lesson",
        nargs=argparse.PARSER,
        action=options.LessonAction,
        metavar="LESSON",
        help=f"{', '.join([*LESSONS, options.FLASHCARDS])}; without one, the list. "
        "`scaledot explain LESSON --help` has the options of one",
    )
    lesson.required = False  # nargs=PARSER alone would demand one
    parser.usage = "%(prog)s [LESSON] [options]"
    options.add_common(parser)


def run(args: argparse.Namespace) -> int:
    if args.lesson is None:
        return _list(args)
    if args.lesson == options.FLASHCARDS:
        return _flashcards(args)
    return _tell(args)


def _list(args: argparse.Namespace) -> int:
    if args.json:
        return _print_json({"lessons": listing.as_data(args.lang)})
    console = Console()
    return _print(console, listing.whole(Voice.of(args.lang, console)))


def _flashcards(args: argparse.Namespace) -> int:
    if args.anki is not None:
        return _write_anki(Path(args.anki), args.lang)
    made = flashcards.cards(args.lang)
    if args.json:
        return _print_json({"flashcards": [dataclasses.asdict(card) for card in made]})
    console = Console()
    return _print(console, cards.whole(Voice.of(args.lang, console), made))


def _write_anki(path: Path, lang: str) -> int:
    try:
        write_atomically(path, flashcards.anki(lang).encode())
    except OSError as wrong:
        complain("scaledot explain", f"cannot write {path}: {wrong.strerror}")
        return 1
    print(f"{one_line(str(path))}: in Anki, File > Import")
    return 0


def _tell(args: argparse.Namespace) -> int:
    lesson = LESSONS[args.lesson]
    console = Console()
    voice = Voice.of(args.lang, console)
    if lesson.name == "race" and console.is_terminal and not args.json:
        race.play(console, voice, args.arguments)
    try:
        result = lesson.run(**args.arguments)
    except ValueError as wrong:  # two arguments that do not go together
        return args.refuse(str(wrong))
    if args.json:
        return _print_json(
            {
                "lesson": lesson.name,
                "arguments": as_json(args.arguments),
                "result": as_json(result),
                "python": lesson.python(args.arguments),
            }
        )
    return _print(console, telling.whole(voice, lesson, args.arguments, result))


def _width(console: Console) -> int:
    return min(console.width, telling.WIDEST)


def _print(console: Console, parts: Iterable[RenderableType]) -> int:
    for part in parts:
        code = isinstance(part, telling.Code)
        console.print(part, width=None if code else _width(console), soft_wrap=code)
    return 0


def _print_json(data: Any) -> int:
    print_json(data)
    return 0
