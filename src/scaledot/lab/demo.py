"""`scaledot demo`: why attention divides by sqrt(d_k), told with numbers measured on the spot.

It ends with a training under the watch, where the division alone is not enough.
"""

import argparse
import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.panel import Panel
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from scaledot.lab import terminal, training, words
from scaledot.lab.experiments import story
from scaledot.lab.experiments.finding import Finding
from scaledot.lab.training import Size, Training
from scaledot.printable import typed
from scaledot.terminal import Console, print_json

STORE = Path("scaledot-demo.vitals")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the same as data")
    parser.add_argument(
        "--seed", type=_seed, default=0, metavar="N", help="seed of every draw (default 0)"
    )
    parser.add_argument(
        "--steps",
        type=_steps,
        default=Size().steps,
        metavar="N",
        help="steps of the training at the end; 0 leaves it out (default %(default)s)",
    )
    parser.add_argument(
        "--store",
        type=Path,
        default=STORE,
        metavar="FILE",
        help="where the training's vitals go, for scaledot top (default %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    console = Console(stderr=args.json)
    with _one_thread():
        if not args.json:
            play(args.seed, console, args.steps, args.store)
            return 0
        data = as_data(args.seed)
        if args.steps:
            trained = _trained(args.seed, args.steps, args.store, console)
            data["training"] = _as_data(trained)
    print_json(data)
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
    lessons = {lesson.__name__: lesson(seed) for lesson in story.LESSONS}
    return {
        "seed": seed,
        "torch": torch.__version__,
        "lessons": {
            name: {"title": words.title(name), **_plain(lesson, lesson)}
            for name, lesson in lessons.items()
        },
    }


def play(seed: int, console: Console, steps: int, store: Path) -> None:
    """Every lesson in the terminal, each as soon as it is measured; then the training."""
    width = min(console.width, terminal.WIDEST)
    console.print(_welcome(seed), width=width)
    findings: list[Finding] = []
    with _progress(console) as progress:
        task = progress.add_task("", total=len(story.LESSONS))
        for number, lesson in enumerate(story.LESSONS, 1):
            name = lesson.__name__
            progress.update(task, description=words.title(name))
            record = lesson(seed)
            console.print(terminal.draw(number, name, record, width), width=width)
            findings += _findings(record)
            progress.advance(task)
    trained = _trained(seed, steps, store, console) if steps else None
    if trained is not None:
        number = len(story.LESSONS) + 1
        console.print(terminal.draw_training(number, trained), width=width)
    console.print(_farewell(findings, trained), width=width)


def _trained(seed: int, steps: int, store: Path, console: Console) -> Training:
    with _progress(console) as progress:
        task = progress.add_task(words.TRAINING, total=steps)
        return training.train(seed, Size(steps=steps), store, lambda: progress.advance(task))


def _welcome(seed: int) -> Panel:
    text = Text.assemble(
        ("Why attention divides by √d_k\n", "bold"),
        "softmax(Q Kᵀ / √d_k) V, and what happens without the division. Claims are those of the "
        "usual notes and videos; every measured number was computed by scaledot just now ",
        (f"(torch {torch.__version__}, seed {seed}).", "dim"),
    )
    return Panel(text, title="scaledot", border_style="cyan")


def _farewell(findings: list[Finding], trained: Training | None) -> Panel:
    claims = [finding for finding in findings if finding.claim is not None]
    agreeing = sum(finding.agree for finding in claims)
    text = Text.assemble(
        (
            f"{len(claims)} claims tested: {agreeing} agree, {len(claims) - agreeing} do not.\n",
            "bold",
        ),
        *_where_to_look(trained),
        "Your own training, without editing it:\n",
        ("  scaledot run train.py\n", "green"),
        "In your own code:\n",
        ("  out, vitals = scaledot.attention_with_vitals(q, k, v)\n", "green"),
        ("  print(vitals)\n", "green"),
        "The same story as data: ",
        ("scaledot demo --json", "green"),
    )
    return Panel(text, border_style="cyan")


def _where_to_look(trained: Training | None) -> list[str | tuple[str, str]]:
    if trained is None:
        return []
    if trained.store is None:
        return [(f"The training left no file: {trained.no_store}\n", "yellow")]
    path = os.path.relpath(trained.store)
    path = trained.store if path.startswith(os.pardir) else path
    return [
        f"Every head of the training, step by step, is in {path}; type next:\n",
        (f"  scaledot top {typed(path)}\n", "green"),
    ]


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


def _as_data(trained: Training) -> dict[str, Any]:
    vitals, loss = words.training_verdicts(trained)
    said = {"title": words.TRAINING, "vitals_say": vitals, "loss_says": loss}
    return {**said, **_finite(dataclasses.asdict(trained))}


def _finite(value: Any) -> Any:
    """JSON knows no infinity and no NaN; a training that has broken has both."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _steps(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of steps; use 0 or more")
    return int(text)


def _seed(text: str) -> int:
    try:
        seed = int(text)
    except ValueError:
        seed = -1
    if not 0 <= seed < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is no seed; use a whole number from 0 on")
    return seed
