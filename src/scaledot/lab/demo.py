"""`scaledot demo`: why attention divides by sqrt(d_k), told with numbers measured on the spot."""

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from scaledot.lab import experiments, terminal, words
from scaledot.lab.experiments import Finding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the same as data")
    parser.add_argument(
        "--seed", type=_seed, default=0, metavar="N", help="seed of every draw (default 0)"
    )


def run(args: argparse.Namespace) -> int:
    with _one_thread():
        if args.json:
            json.dump(as_data(args.seed), sys.stdout, indent=2, allow_nan=False)
            print()
        else:
            play(args.seed, Console(markup=False, emoji=False, highlight=False))
    return 0


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Sums come out the same however many cores there are, and a busy machine hardly slows it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def as_data(seed: int) -> dict[str, Any]:
    """Every lesson as plain data: the experiments' records, with the words of each finding."""
    lessons = {lesson.__name__: lesson(seed) for lesson in experiments.LESSONS}
    return {
        "seed": seed,
        "torch": torch.__version__,
        "lessons": {
            name: {"title": words.title(name), **_plain(lesson, lesson)}
            for name, lesson in lessons.items()
        },
    }


def play(seed: int, console: Console) -> None:
    """Every lesson in the terminal, each as soon as it is measured."""
    width = min(console.width, terminal.WIDEST)
    console.print(_welcome(seed), width=width)
    findings: list[Finding] = []
    with _progress(console) as progress:
        task = progress.add_task("", total=len(experiments.LESSONS))
        for number, lesson in enumerate(experiments.LESSONS, 1):
            name = lesson.__name__
            progress.update(task, description=words.title(name))
            record = lesson(seed)
            console.print(terminal.draw(number, name, record, width), width=width)
            findings += _findings(record)
            progress.advance(task)
    console.print(_farewell(findings), width=width)


def _welcome(seed: int) -> Panel:
    text = Text.assemble(
        ("Why attention divides by √d_k\n", "bold"),
        "softmax(Q Kᵀ / √d_k) V, and what happens without the division. Claims are those of the "
        "usual notes and videos; every measured number was computed by scaledot just now ",
        (f"(torch {torch.__version__}, seed {seed}).", "dim"),
    )
    return Panel(text, title="scaledot", border_style="cyan")


def _farewell(findings: list[Finding]) -> Panel:
    claims = [finding for finding in findings if finding.claim is not None]
    agreeing = sum(finding.agree for finding in claims)
    text = Text.assemble(
        (
            f"{len(claims)} claims tested: {agreeing} agree, {len(claims) - agreeing} do not.\n",
            "bold",
        ),
        "In your own code:\n",
        ("  out, vitals = scaledot.attention_with_vitals(q, k, v)\n", "green"),
        ("  print(vitals)\n", "green"),
        "The same story as data: ",
        ("scaledot demo --json", "green"),
    )
    return Panel(text, border_style="cyan")


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("measuring: {task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _plain(value: Any, lesson: Any) -> Any:
    if isinstance(value, Finding):
        said = {}
        if value.claim is not None:
            said = {
                "says": words.claim(value, lesson),
                "verdict": words.verdict(value),
                "why": words.why(value, lesson),
            }
        return {**dataclasses.asdict(value), **said}
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {field.name: _plain(getattr(value, field.name), lesson) for field in fields}
    if isinstance(value, tuple):
        return [_plain(item, lesson) for item in value]
    return value


def _findings(value: Any) -> Iterator[Finding]:
    """Every finding inside a record, wherever it lies."""
    if isinstance(value, Finding):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _findings(getattr(value, field.name))
    elif isinstance(value, tuple):
        for item in value:
            yield from _findings(item)


def _seed(text: str) -> int:
    try:
        seed = int(text)
    except ValueError:
        seed = -1
    if not 0 <= seed < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is no seed; use a whole number from 0 on")
    return seed
