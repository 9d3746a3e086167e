"""`scaledot bench`: time and memory against PyTorch, after a correctness gate.

The way of a measurement: cases (what, against whom, which bar) -> gate (is it right?) -> clock or
memory (samples of both sides, in turn) -> outcome (ratio, verdict) -> results (CSV) -> table.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from scaledot.bench import cases, clock, gate, memory, provenance, results, table
from scaledot.bench.cases import Case
from scaledot.bench.outcome import Outcome
from scaledot.bench.results import Row

RESULTS = Path("benchmarks/results")
MEMORY_REPEATS = 3  # a peak hardly varies, and every sample costs a new process

ALL_HOLD, FALLS_SHORT, NOTHING_MEASURED = 0, 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = sorted({case.name for case in cases.on_cpu()})
    parser.add_argument(
        "--quick", action="store_true", help="a small try: short sequences, few repeats"
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=names,
        metavar="NAME",
        help=f"one kind of case; may be repeated: {', '.join(names)}",
    )
    parser.add_argument(
        "--repeats", type=_repeats, metavar="N", help="samples of each side (default: by case)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"append the rows to this CSV (default: {RESULTS}/cpu.csv where that folder exists, "
        "else scaledot-bench.csv; with --quick: no file)",
    )
    parser.add_argument("--json", action="store_true", help="print the rows as data")
    parser.add_argument(
        "--table",
        type=Path,
        metavar="FILE",
        help="measure nothing: print the latest row of each case in FILE as a markdown table",
    )


def run(args: argparse.Namespace) -> int:
    """0: every bar holds; 1: one falls short; 2: nothing measured (wrong call, or a red gate)."""
    try:
        if args.table is not None:
            print(table.as_markdown(results.latest(results.read(args.table))))
            return ALL_HOLD
        out = args.out or (None if args.quick else _default_file())
        if out is not None:
            results.check_header(out)
    except (OSError, ValueError) as error:
        print(f"scaledot bench: {error}", file=sys.stderr)
        return NOTHING_MEASURED
    selected = [
        case for case in cases.on_cpu(quick=args.quick) if not args.only or case.name in args.only
    ]
    return _bench(selected, args.repeats, out, as_json=args.json)


def _bench(selected: list[Case], repeats: int | None, out: Path | None, *, as_json: bool) -> int:
    console = Console(stderr=as_json, markup=False, emoji=False, highlight=False)
    origin = provenance.collect()
    console.print(table.heading(origin))

    checks = with_progress(console, "gate", gate.subjects(selected), gate.examine_case)
    red = [check for check in checks if not check.holds]
    console.print(table.gate_verdict(checks))
    if red:
        if as_json:
            print(json.dumps({"gate": [check._asdict() for check in red], "rows": []}, indent=2))
        return NOTHING_MEASURED

    outcomes = _measure(console, selected, repeats)
    rows = [results.row(outcome, origin) for outcome in outcomes]
    if as_json:
        print(json.dumps({"gate": [], "rows": [row.as_data() for row in rows]}, indent=2))
    else:
        console.print(table.as_rich(rows), width=table.width(console))
    if out is not None:
        results.append(out, rows)
        console.print(f"{len(rows)} rows appended to {out}")
    return FALLS_SHORT if any(row.holds is False for row in rows) else ALL_HOLD
