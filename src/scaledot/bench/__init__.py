"""`scaledot bench`: time and memory against PyTorch, after a correctness gate.

The way of a number: cases (what, against whom, which bar) -> gate (is it right?) -> clock or
memory (samples of both sides, in turn) -> outcome (ratio, verdict) -> results (CSV) -> table.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from scaledot.bench import cases, gate, outcome, provenance, results, table
from scaledot.bench.cases import Case
from scaledot.bench.gate import Check
from scaledot.bench.outcome import Outcome
from scaledot.bench.results import Row

RESULTS = Path("benchmarks/results")
EVERY_BAR_HOLDS, ONE_FALLS_SHORT, NOTHING_MEASURED = 0, 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = list(dict.fromkeys(case.name for case in cases.on_cpu()))
    parser.add_argument(
        "--quick", action="store_true", help="a small try: short sequences, few repeats"
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=names,
        metavar="NAME",
        help=f"one kind of case, may be repeated: {', '.join(names)}",
    )
    parser.add_argument(
        "--repeats", type=_repeats, metavar="N", help="samples of each side (default: by case)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"append the rows to this CSV (default: {RESULTS}/cpu.csv where that folder exists, "
        "else scaledot-bench.csv; with --quick no file)",
    )
    parser.add_argument("--json", action="store_true", help="print the rows as data")
    parser.add_argument(
        "--table",
        type=Path,
        metavar="FILE",
        help="measure nothing; print the latest row of each case in FILE as markdown",
    )


def run(args: argparse.Namespace) -> int:
    """0: every bar holds; 1: one falls short; 2: nothing was measured, the gate is red."""
    try:
        if args.table is not None:
            print(table.as_markdown(results.latest(results.read(args.table))))
            return EVERY_BAR_HOLDS
        file = args.out or (None if args.quick else _default_file())
        if file is not None:
            results.check_header(file)
    except (OSError, ValueError) as error:
        print(f"scaledot bench: {error}", file=sys.stderr)
        return NOTHING_MEASURED
    every = cases.on_cpu(quick=args.quick)
    chosen = [case for case in every if not args.only or case.name in args.only]
    return bench(chosen, args.repeats, file, as_json=args.json)


def bench(chosen: list[Case], repeats: int | None, file: Path | None, *, as_json: bool) -> int:
    """Gate, clock, file, table."""
    console = _console(stderr=as_json)
    origin = provenance.collect()
    console.print(table.heading(origin))
    checks = _examine(chosen, console)
    console.print(table.gate_verdict(checks))
    red = [check._asdict() for check in checks if not check.holds]
    rows: list[Row] = []
    for measured in [] if red else _measure(chosen, repeats, console):
        rows.append(results.row(measured, origin))
        if file is not None:
            results.append(file, rows[-1:])  # at once: what was measured outlives a Ctrl-C
    if as_json:
        print(json.dumps({"red": red, "rows": [row.as_data() for row in rows]}, indent=2))
    elif not red:
        console.print(table.as_rich(rows, console.width))
    if red:
        return NOTHING_MEASURED
    if file is not None:
        console.print(f"{len(rows)} rows appended to {file}")
    return ONE_FALLS_SHORT if any(row.holds is False for row in rows) else EVERY_BAR_HOLDS


def _examine(chosen: list[Case], console: Console) -> list[Check]:
    checks = []
    with _progress(console) as progress:
        subjects = gate.subjects(chosen)
        task = progress.add_task("", total=len(subjects))
        for subject in subjects:
            words = f"gate: {subject.contender.name} {subject.workload.shape}"
            progress.update(task, description=words, refresh=True)
            checks += gate.examine(subject)
            progress.advance(task)
    return checks


def _measure(chosen: list[Case], repeats: int | None, console: Console) -> Iterator[Outcome]:
    with _progress(console) as progress:
        rounds = [_rounds(case, repeats) for case in chosen]
        task = progress.add_task("", total=sum(rounds))

        def after_round() -> None:
            progress.advance(task)
            progress.refresh()

        for case, number in zip(chosen, rounds, strict=True):
            progress.update(task, description=f"{case.name} {case.workload.shape}", refresh=True)
            yield outcome.measure(case, number, after_round)


def _rounds(case: Case, asked: int | None) -> int:
    """A peak of memory hardly varies and costs a process: never more of them than the case says."""
    if asked is None:
        return case.repeats
    return min(asked, case.repeats) if case.measures == "memory" else asked


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr, markup=False, emoji=False, highlight=False)
    if not console.is_terminal:  # a file or a pipe: as wide as the table wants to be
        console.width = table.ROOMY
    return console


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        auto_refresh=False,  # its thread would take time from what is being timed
        disable=not console.is_terminal,
    )


def _default_file() -> Path:
    return RESULTS / "cpu.csv" if RESULTS.is_dir() else Path("scaledot-bench.csv")


def _repeats(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of repeats; use 1 or more")
    return int(text)
