"""`scaledot report`: what happened in a run, for the morning after. Verdict first, then the story.

The way of the numbers: the store -> `history` (arrays) -> `facts` (all that is said; `heads`,
`judged`, `remedy`) -> `verdict` (words) -> `terminal`, `data` or `page` (`figure`, `heat` and their
`scales` and `png`). `compare` puts two runs side by side. All pictures are SVG; the cells of a heat
map are one small PNG inside it.
"""

import argparse
import os
import sqlite3
from pathlib import Path

from scaledot.atomic_file import write_atomically
from scaledot.printable import complain, one_line
from scaledot.terminal import Console, print_json
from scaledot.watch.report import compare, data, facts, page, terminal
from scaledot.watch.report.facts import Facts
from scaledot.watch.report.verdict import Verdict, verdict_of
from scaledot.watch.store import StoreError
from scaledot.watch.top import newest

__all__ = ["Facts", "Verdict", "examine", "write_page"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="the run's file (default: the newest *.vitals here); two of them are compared",
    )
    parser.add_argument("--html", type=Path, metavar="F", help="write one self-contained page to F")
    parser.add_argument("--json", action="store_true", help="print the same facts as data")


def run(args: argparse.Namespace) -> int:
    if len(args.runs) > 2:
        complain("scaledot report", "give one run, or two to compare")
        return 2
    try:
        found = [examine(path) for path in args.runs or [newest(Path())]]
    except (StoreError, sqlite3.Error, OSError, ValueError) as error:
        complain("scaledot report", error)
        return 1
    written = 0
    if args.html is not None:
        try:
            written = write_page(found, args.html)
        except OSError as error:
            complain("scaledot report", f"cannot write {args.html}: {error.strerror}")
            return 1
    if args.json:
        content = data.as_data(*found[0]) if len(found) == 1 else compare.compare_data(*found)
        print_json(content)
        return 0
    console = Console()
    if len(found) == 1:
        terminal.show(*found[0], console, written=bool(written))
    else:
        terminal.show_two(found, compare.rows_of(found[0][0], found[1][0]), console)
    if written:
        console.print(f"Page: {one_line(str(args.html))} ({written / 1000:,.0f} kB)")
    return 0


def examine(path: str | os.PathLike[str]) -> tuple[Facts, Verdict]:
    """Everything that a report says of a run. Raises StoreError where there is none."""
    found = facts.read(path)
    return found, verdict_of(found)


def write_page(runs: list[tuple[Facts, Verdict]], target: Path) -> int:
    """One run's page or two runs' comparison; returns its size in bytes."""
    text = page.page(*runs[0]) if len(runs) == 1 else compare.compare_page(*runs)
    content = text.encode("utf-8", errors="replace")
    write_atomically(target, content)
    return len(content)
