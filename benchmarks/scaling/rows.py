"""benchmarks/results/scaling.csv: the model's rows, those of the played ring, and measured ones."""

import csv
import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.scaling.facts import ROOT

CSV = ROOT / "benchmarks" / "results" / "scaling.csv"


@dataclass(frozen=True)
class Row:
    """One call of attention over `ranks`; measured rows name what they were measured on."""

    kind: str  # model, simulated, measured
    question: str  # strong, weak, layout, trouble, call
    direction: str  # forward, backward, both (one after the other)
    form: str  # ring, serial (a ring without overlap), double_ring, all_gather
    layout: str
    tokens: int
    ranks: int
    batch: int
    heads: int
    groups: int
    width: int
    dtype: str
    sent_bytes: int  # of one rank in one call
    seconds: float  # measured: the median
    efficiency: float | None
    case: str = ""  # trouble: what is wrong
    p20: float | None = None  # from here on: measured rows alone
    p80: float | None = None
    repeats: int | None = None
    device: str = ""
    load: float | None = None
    torch: str = ""
    date: str = ""
    commit: str = ""


HEADER = [field.name for field in dataclasses.fields(Row)]


def read(path: Path = CSV) -> list[Row]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames != HEADER:
            raise ValueError(f"{path} has other columns than {', '.join(HEADER)}; move it away")
        return [Row(**{name: _value(name, text) for name, text in line.items()}) for line in reader]


def write(rows: Iterable[Row], path: Path = CSV) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(HEADER)
        writer.writerows([_text(getattr(row, name)) for name in HEADER] for row in rows)


def measured(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.kind == "measured"]


def _text(value: object) -> str:
    """Six digits: more than any clock gives, and the same on every machine."""
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _value(name: str, text: str) -> Any:
    kind = Row.__annotations__[name]
    if kind in (float | None, int | None):
        return (float if kind == float | None else int)(text) if text else None
    return kind(text)
