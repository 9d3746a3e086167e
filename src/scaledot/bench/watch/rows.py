"""What was found, as rows of a CSV that is only ever appended to, and as a table."""

import csv
import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from scaledot.bench.bars import Bar
from scaledot.bench.provenance import Origin
from scaledot.bench.watch.interval import Interval

VERDICTS = {True: "holds", False: "falls short", None: "undecided"}
STYLES = {"holds": "green", "falls short": "bold red", "undecided": "yellow", "reported": "dim"}


@dataclass(frozen=True)
class Row:
    """`value` with its interval of 95 %, by one clock; `meaning` says what is divided by what."""

    date: str
    commit: str
    model: str
    shape: str
    dtype: str
    device: str
    case: str
    clock: str  # cpu: processor time; wall; device: a GPU's events
    value: float
    low: float
    high: float
    bar: str
    verdict: str  # holds and falls short: with the whole interval; reported: no bar
    step_ms: float  # of a step without the watch
    attention_ms: float  # of the attention in it, forward and backward
    added_ms: float  # by the watch to a step that it looks at
    cadence: float  # N: it looks at one step in N
    rounds: int
    meaning: str
    threads: int
    machine: str
    cores: int
    load: float
    python: str
    torch: str
    scaledot: str
    gpu: str
    driver: str
    cuda: str
    cudnn: str
    triton: str

    def as_data(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


HEADER = [field.name for field in dataclasses.fields(Row)]


@dataclass(frozen=True)
class Finding:
    """A row without its origin."""

    case: str
    clock: str
    found: Interval
    bar: Bar | None
    meaning: str
    step_ms: float
    attention_ms: float
    added_ms: float
    cadence: float
    rounds: int

    @property
    def verdict(self) -> str:
        return "reported" if self.bar is None else VERDICTS[self.found.holds(self.bar.limit)]


def row(finding: Finding, model: str, shape: str, dtype: str, device: str, origin: Origin) -> Row:
    given: dict[str, Any] = dataclasses.asdict(origin)
    given.pop("flash_attn_4")  # is not part of a training here
    for name in ("step_ms", "attention_ms", "added_ms", "cadence"):
        given[name] = float(f"{getattr(finding, name):.6g}")
    for name, value in finding.found._asdict().items():
        given[name] = float(f"{value:.6g}")
    return Row(
        model=model,
        shape=shape,
        dtype=dtype,
        device=device,
        case=finding.case,
        clock=finding.clock,
        bar=str(finding.bar or ""),
        verdict=finding.verdict,
        rounds=finding.rounds,
        meaning=finding.meaning,
        **given,
    )


def append(path: Path, rows: Iterable[Row]) -> None:
    """Below what is there; the header first where the file is new."""
    new = not check_header(path)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(HEADER)
        writer.writerows([getattr(row, name) for name in HEADER] for row in rows)


def read(path: Path) -> list[Row]:
    check_header(path)
    kinds = Row.__annotations__
    with path.open(newline="", encoding="utf-8") as file:
        return [
            Row(**{name: kinds[name](text) for name, text in record.items()})
            for record in csv.DictReader(file)
        ]


def is_ours(path: Path) -> bool:
    with path.open(newline="", encoding="utf-8") as file:
        return next(csv.reader(file), []) == HEADER


def check_header(path: Path) -> bool:
    """Is anything there? Other columns are not ours to append to."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    if not is_ours(path):
        raise ValueError(
            f"{path} has another header than `scaledot bench --watch` writes; move it away or "
            "choose another file with --out"
        )
    return True


def latest(rows: Iterable[Row]) -> list[Row]:
    newest = {(r.model, r.shape, r.dtype, r.device, r.gpu, r.case, r.clock): r for r in rows}
    return list(newest.values())


COLUMNS = ("model", "case", "clock", "found", "95 % interval", "bar", "verdict", "step", "looks at")


def as_rich(rows: Sequence[Row]) -> Table:
    table = Table(*COLUMNS, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for one in rows:
        *cells, _, _, _ = found = _cells(one)
        table.add_row(*cells, Text(one.verdict, STYLES[one.verdict]), *found[-2:])
    return table


def as_markdown(rows: Sequence[Row]) -> str:
    lines = [COLUMNS, ["---"] * len(COLUMNS), *map(_cells, rows)]
    origins = dict.fromkeys(
        f"{r.date}, commit {r.commit}, {r.gpu or r.machine}, torch {r.torch}, Python {r.python}."
        for r in rows
    )
    meanings = dict.fromkeys(f"{r.case}: {r.meaning}." for r in rows)
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", *meanings, *origins])


def _cells(one: Row) -> list[str]:
    amount = (
        (lambda x: f"{x:.2%}") if one.meaning.endswith("of a step") else (lambda x: f"{x:.2f}x")
    )
    return [
        one.model,
        one.case,
        one.clock,
        amount(one.value),
        f"{amount(one.low)} to {amount(one.high)}",
        one.bar,
        one.verdict,
        f"{one.step_ms:.1f} ms",
        f"1 step in {one.cadence:.3g}",
    ]
