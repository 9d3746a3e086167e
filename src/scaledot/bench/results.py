"""Results as CSV: one row a case, only ever appended; tables are made from it."""

import csv
import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaledot.bench.bars import Bar
from scaledot.bench.outcome import Outcome
from scaledot.bench.provenance import Origin


@dataclass(frozen=True)
class Row:
    """Medians and quantiles in `unit`; `measured` is the `quantity` that bar and goal speak of."""

    date: str
    commit: str
    case: str
    shape: str
    causal: bool
    dtype: str
    device: str
    threads: int
    unit: str
    ours: str
    ours_median: float
    ours_p20: float
    ours_p80: float
    peer: str
    peer_median: float
    peer_p20: float
    peer_p80: float
    ratio: float
    paired_ratio: float
    quantity: str
    measured: float
    bar: Bar | None
    goal: Bar | None
    holds: bool | None
    repeats: int
    machine: str
    cores: int
    load: float
    python: str
    torch: str
    scaledot: str

    def as_data(self) -> dict[str, Any]:
        """For JSON: bars as they are written in the CSV."""
        return {
            name: str(value) if isinstance(value, Bar) else value
            for name, value in vars(self).items()
        }


HEADER = [field.name for field in dataclasses.fields(Row)]


def row(outcome: Outcome, origin: Origin) -> Row:
    case, ours, peer = outcome.case, outcome.ours, outcome.peer
    return Row(
        case=case.name,
        shape=case.workload.shape,
        causal=case.workload.causal,
        dtype=case.workload.dtype,
        device=case.workload.device,
        unit=outcome.unit,
        ours=case.ours.name,
        ours_median=_rounded(ours.median),
        ours_p20=_rounded(ours.p20),
        ours_p80=_rounded(ours.p80),
        peer=case.peer.name,
        peer_median=_rounded(peer.median),
        peer_p20=_rounded(peer.p20),
        peer_p80=_rounded(peer.p80),
        ratio=_rounded(outcome.ratio),
        paired_ratio=_rounded(outcome.paired_ratio),
        quantity=str(case.quantity),
        measured=_rounded(outcome.measured),
        bar=case.bar,
        goal=case.goal,
        holds=outcome.holds,
        repeats=len(ours.values),
        **dataclasses.asdict(origin),
    )


def append(path: Path, rows: Iterable[Row]) -> None:
    """Below what is there; the header first where the file is new."""
    check_header(path)
    fresh = not path.exists() or path.stat().st_size == 0
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if fresh:
            writer.writerow(HEADER)
        writer.writerows([_text(value) for value in vars(row).values()] for row in rows)


def read(path: Path) -> list[Row]:
    check_header(path)
    with path.open(newline="", encoding="utf-8") as file:
        return [_parse(record) for record in csv.DictReader(file)]


def check_header(path: Path) -> None:
    """A file with other columns is not ours to append to."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open(newline="", encoding="utf-8") as file:
        found = next(csv.reader(file), [])
    if found != HEADER:
        missing = [name for name in HEADER if name not in found]
        foreign = [name for name in found if name not in HEADER]
        raise ValueError(
            f"{path} has another header (missing: {', '.join(missing) or 'none'}; unknown: "
            f"{', '.join(foreign) or 'none'}); move it away or choose another file with --out"
        )


def latest(rows: Iterable[Row]) -> list[Row]:
    """The last row of each case, in the order in which the cases first came."""
    newest: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        newest[row.case, row.shape, row.causal, row.dtype, row.device, row.peer] = row
    return list(newest.values())


def _rounded(value: float) -> float:
    """Six digits: more than any clock gives."""
    return float(f"{value:.6g}")


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _parse(record: dict[str, str]) -> Row:
    return Row(**{name: _value(name, record[name]) for name in HEADER})


def _value(name: str, text: str) -> Any:
    kind = Row.__annotations__[name]
    if kind in (bool, bool | None):
        return {"yes": True, "no": False, "": None}[text]
    if kind == Bar | None:
        return Bar.parse(text) if text else None
    return kind(text)
