"""`scaledot bench`: time and memory against PyTorch, after a correctness gate.

The way of a number: cases (what, against whom, which bar) -> gate (is it right?) -> clock or
memory (samples of both sides, in turn) -> outcome (ratio, verdict) -> results (CSV) -> table.
An engine walks the middle of it, one for a CPU and one for a GPU.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from scaledot.backends.cpu import native
from scaledot.bench import cases, gpu, provenance, results, table, watch
from scaledot.bench.cases import Case
from scaledot.bench.engine import Engine, OnCpu
from scaledot.bench.gate import Check
from scaledot.bench.gpu import cases as gpu_cases
from scaledot.bench.gpu.engine import OnGpu
from scaledot.bench.outcome import Outcome
from scaledot.bench.provenance import Origin
from scaledot.bench.results import Row
from scaledot.bench.watch import rows as watch_rows

RESULTS = Path("benchmarks/results")
EVERY_BAR_HOLDS, ONE_FALLS_SHORT, NOTHING_MEASURED = 0, 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    on_cpu, on_gpu = _names(cases.on_cpu()), _names(gpu_cases.on_gpu())
    parser.add_argument(
        "--gpu", action="store_true", help="the bars of a GPU, against cuDNN and FlashAttention"
    )
    parser.add_argument(
        "--watch", action="store_true", help="what the watch adds to a training step"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="with --watch: where to train (default: cpu)"
    )
    parser.add_argument("--quick", action="store_true", help="a small try: few shapes, few repeats")
    parser.add_argument(
        "--only",
        action="append",
        choices=list(dict.fromkeys([*on_cpu, *on_gpu])),
        metavar="NAME",
        help=f"one kind of case, may be repeated: {', '.join(on_cpu)}; "
        f"with --gpu: {', '.join(on_gpu)}",
    )
    for name, known in (("--width", gpu_cases.WIDTHS), ("--length", gpu_cases.LENGTHS)):
        words = ", ".join(map(str, known))
        parser.add_argument(
            name,
            action="append",
            type=int,
            choices=known,
            metavar="N",
            help=f"with --gpu: of the shapes only these, may be repeated: {words}",
        )
    parser.add_argument(
        "--repeats", type=_repeats, metavar="N", help="samples of each side (default: by case)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"append the rows to this CSV (default: cpu.csv, gpu.csv or watch.csv in {RESULTS} "
        "where that folder exists, else scaledot-bench.csv or scaledot-bench-gpu.csv or -watch.csv "
        "here; with --quick no file)",
    )
    parser.add_argument(
        "--commit",
        metavar="NAME",
        help="what the rows call the commit, where the source that runs has no history",
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
            print(_as_markdown(args.table))
            return EVERY_BAR_HOLDS
        plans = _plans(args) if args.watch else []
        chosen = [] if args.watch else _chosen(args)
        file = args.out or (None if args.quick else _default_file(args))
        if file is not None and args.watch:
            watch_rows.check_header(file)
        elif file is not None:
            results.check_header(file, for_gpu=args.gpu)
    except (OSError, ValueError) as error:
        print(f"scaledot bench: {error}", file=sys.stderr)
        return NOTHING_MEASURED
    on_gpu = args.gpu or args.device == "cuda"
    origin = provenance.collect(on_gpu=on_gpu, named=args.commit)
    if plans:
        return bench_watch(plans, origin, file, as_json=args.json)
    with OnGpu(chosen) if args.gpu else OnCpu(chosen) as engine:
        return bench(engine, origin, args.repeats, file, as_json=args.json)


def _chosen(args: argparse.Namespace) -> list[Case]:
    """The cases that were asked for; ValueError where there are none."""
    if args.device:
        raise ValueError("--device is for --watch; the bars of a GPU are under --gpu")
    if args.gpu:
        reason = gpu.missing()
        if reason is not None:
            raise ValueError(reason)
        every = gpu_cases.on_gpu(quick=args.quick, widths=args.width, lengths=args.length)
    else:
        if args.width or args.length:
            raise ValueError("--width and --length choose among the shapes of --gpu")
        every = cases.on_cpu(quick=args.quick)
    unknown = [name for name in args.only or () if name not in _names(every)]
    if unknown:
        with_or_without = "with" if args.gpu else "without"
        raise ValueError(f"--only {unknown[0]} is no case {with_or_without} --gpu")
    return [case for case in every if not args.only or case.name in args.only]


def _plans(args: argparse.Namespace) -> list[watch.Plan]:
    for name in ("gpu", "only", "width", "length"):
        if getattr(args, name):
            raise ValueError(f"--watch times whole trainings; leave out --{name}")
    device = args.device or "cpu"
    if device == "cuda" and (reason := gpu.missing()) is not None:
        raise ValueError(reason)
    return watch.plans(device, quick=args.quick, rounds=args.repeats)


def bench_watch(
    plans: list[watch.Plan], origin: Origin, file: Path | None, *, as_json: bool
) -> int:
    """Gate, clock, file, table."""
    console = _console(stderr=as_json, width=table.ROOMY)
    console.print(table.heading(origin))
    red: list[str] = []
    rows: list[watch_rows.Row] = []
    for plan in plans:
        red += watch.red(plan)
    if not red:
        same = "to the bit, " if plans[0].device == "cpu" else ""
        console.print(f"gate: losses are the same with the watch, {same}and no layer is missed")
        with _progress(console) as progress:
            for plan in plans:
                words = f"{plan.shape.name}: steps with and without the watch"
                task = progress.add_task(words, total=plan.rounds)
                found = watch.measure(plan, lambda task=task: _advance(progress, task))
                shape = plan.shape
                given = shape.name, shape.words, shape.dtype, plan.device
                rows += [watch_rows.row(finding, *given, origin) for finding in found]
    if file is not None and rows:
        watch_rows.append(file, rows)
    if as_json:
        print(json.dumps({"red": red, "rows": [row.as_data() for row in rows]}, indent=2))
    if red:
        console.print(f"The gate is red, nothing is timed: {'; '.join(red)}")
        return NOTHING_MEASURED
    if not as_json:
        console.print(watch_rows.as_rich(rows))
        for words in dict.fromkeys(f"{row.case}: {row.meaning}" for row in rows):
            console.print(words, style="dim")
    if file is not None:
        console.print(f"{len(rows)} rows appended to {file}")
    if any(row.verdict == "undecided" for row in rows):
        console.print("undecided: the interval crosses the bar; more --repeats", style="yellow")
    return ONE_FALLS_SHORT if any(row.verdict == "falls short" for row in rows) else EVERY_BAR_HOLDS


def _as_markdown(file: Path) -> str:
    if watch_rows.is_ours(file):
        return watch_rows.as_markdown(watch_rows.latest(watch_rows.read(file)))
    return table.as_markdown(results.latest(results.read(file)))


def _advance(progress: Progress, task: TaskID) -> None:
    progress.advance(task)
    progress.refresh()


def bench(
    engine: Engine, origin: Origin, repeats: int | None, file: Path | None, *, as_json: bool
) -> int:
    """Gate, clock, file, table."""
    console = _console(stderr=as_json, width=table.ROOMY_ON_GPU if origin.gpu else table.ROOMY)
    console.print(table.heading(origin))
    if not origin.gpu and (reason := native.fault()) is not None:
        console.print(f"{reason}; without it the bars are not meant to hold", style="yellow")
    begun = perf_counter()
    checks = _examine(engine, console)
    gated = perf_counter()
    console.print(table.gate_verdict(checks))
    red = [check._asdict() for check in checks if not check.holds]
    rows: list[Row] = []
    for measured in [] if red else _measure(engine, repeats, console):
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
    if origin.gpu:
        console.print(table.summary(rows))
        console.print(f"gate {gated - begun:.0f} s, clock {perf_counter() - gated:.0f} s")
    return ONE_FALLS_SHORT if any(row.holds is False for row in rows) else EVERY_BAR_HOLDS


def _examine(engine: Engine, console: Console) -> list[Check]:
    checks = []
    with _progress(console) as progress:
        subjects = engine.subjects()
        task = progress.add_task("", total=len(subjects))
        for subject in subjects:
            words = f"gate: {subject.contender.name} {subject.workload.shape}"
            progress.update(task, description=words, refresh=True)
            checks += engine.examine(subject)
            progress.advance(task)
    return checks


def _measure(engine: Engine, repeats: int | None, console: Console) -> Iterator[Outcome]:
    with _progress(console) as progress:
        groups = engine.groups()
        rounds = [_rounds(group[0], repeats) for group in groups]
        task = progress.add_task("", total=sum(rounds))

        for group, number in zip(groups, rounds, strict=True):
            words = " ".join(["+".join(case.name for case in group), group[0].workload.shape])
            progress.update(task, description=words, refresh=True)
            yield from engine.measure(group, number, lambda: _advance(progress, task))


def _rounds(case: Case, asked: int | None) -> int:
    """A peak of memory hardly varies and costs a process: never more of them than the case says."""
    if asked is None:
        return case.repeats
    return asked if case.measures == "time" else min(asked, case.repeats)


def _console(*, stderr: bool, width: int) -> Console:
    console = Console(stderr=stderr, markup=False, emoji=False, highlight=False)
    if not console.is_terminal:  # a file or a pipe: as wide as the table wants to be
        console.width = width
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


def _default_file(args: argparse.Namespace) -> Path:
    kind = "watch" if args.watch else "gpu" if args.gpu else "cpu"
    if RESULTS.is_dir():
        return RESULTS / f"{kind}.csv"
    return Path("scaledot-bench.csv" if kind == "cpu" else f"scaledot-bench-{kind}.csv")


def _names(every: list[Case]) -> list[str]:
    return list(dict.fromkeys(case.name for case in every))


def _repeats(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of repeats; use 1 or more")
    return int(text)
