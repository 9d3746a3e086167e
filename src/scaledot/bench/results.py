"""Results as CSV: one row a case, only ever appended; tables are made from it."""

import csv
import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaledot.bench.bars import Bar
from scaledot.bench.clock import Samples
from scaledot.bench.outcome import Outcome
from scaledot.bench.provenance import Origin


@dataclass(frozen=True)
class Row:
    """Medians and quantiles in `unit`; `measured` is the `quantity` that bar and goal speak of.

    None where a side is not there; `note` says why.
    """

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
    ours_median: float | None
    ours_p20: float | None
    ours_p80: float | None
    peer: str
    peer_median: float | None
    peer_p20: float | None
    peer_p80: float | None
    ratio: float | None
    paired_ratio: float | None
    quantity: str
    measured: float | None
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
    gpu: str = ""  # this and what follows: columns of GPU_HEADER alone
    driver: str = ""
    cuda: str = ""
    cudnn: str = ""
    triton: str = ""
    flash_attn_4: str = ""
    ours_tflops: float | None = None
    peer_tflops: float | None = None
    note: str = ""

    @property
    def header(self) -> list[str]:
        return GPU_HEADER if self.gpu else HEADER

    def as_data(self) -> dict[str, Any]:
        """For JSON: bars as they are written in the CSV."""
        values = {name: getattr(self, name) for name in self.header}
        return {
            name: str(value) if isinstance(value, Bar) else value for name, value in values.items()
        }


GPU_HEADER = [field.name for field in dataclasses.fields(Row)]
HEADER = GPU_HEADER[: GPU_HEADER.index("gpu")]


def row(outcome: Outcome, origin: Origin) -> Row:
    case, ours, peer = outcome.case, outcome.ours, outcome.peer
    ours_median, ours_p20, ours_p80 = _spread(ours)
    peer_median, peer_p20, peer_p80 = _spread(peer)
    samples = ours or peer
    return Row(
        case=case.name,
        shape=case.workload.shape,
        causal=case.workload.causal,
        dtype=case.workload.dtype,
        device=case.workload.device,
        unit=outcome.unit,
        ours=case.ours.name,
        ours_median=ours_median,
        ours_p20=ours_p20,
        ours_p80=ours_p80,
        peer=case.peer.name,
        peer_median=peer_median,
        peer_p20=peer_p20,
        peer_p80=peer_p80,
        ratio=_rounded(outcome.ratio),
        paired_ratio=_rounded(outcome.paired_ratio),
        quantity=str(case.quantity),
        measured=_rounded(outcome.measured),
        bar=case.bar,
        goal=case.goal,
        holds=outcome.holds,
        repeats=len(samples.values) if samples else 0,
        ours_tflops=_rounded(outcome.tflops(case.ours, ours)),
        peer_tflops=_rounded(outcome.tflops(case.peer, peer)),
        note=outcome.note,
        **dataclasses.asdict(origin),
    )


def append(path: Path, rows: Iterable[Row]) -> None:
    """Below what is there; the header first where the file is new."""
    rows = list(rows)
    for_gpu = any(row.header == GPU_HEADER for row in rows)
    header = check_header(path, for_gpu=for_gpu)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if not header:
            header = GPU_HEADER if for_gpu else HEADER
            writer.writerow(header)
        writer.writerows([_text(getattr(row, name)) for name in header] for row in rows)


def read(path: Path) -> list[Row]:
    check_header(path)
    with path.open(newline="", encoding="utf-8") as file:
        return [_parse(record) for record in csv.DictReader(file)]


def check_header(path: Path, *, for_gpu: bool = False) -> list[str]:
    """The columns that are there, none in a new file. Other columns are not ours to append to."""
    if not path.exists() or path.stat().st_size == 0:
        return []
    with path.open(newline="", encoding="utf-8") as file:
        found = next(csv.reader(file), [])
    if found != GPU_HEADER and (for_gpu or found != HEADER):
        expected = GPU_HEADER if for_gpu else HEADER
        missing = [name for name in expected if name not in found]
        foreign = [name for name in found if name not in expected]
        raise ValueError(
            f"{path} has another header (missing: {', '.join(missing) or 'none'}; unknown: "
            f"{', '.join(foreign) or 'none'}); move it away or choose another file with --out"
        )
    return found


def latest(rows: Iterable[Row]) -> list[Row]:
    """The last row of each case, in the order in which the cases first came."""
    newest: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        newest[row.case, row.shape, row.causal, row.dtype, row.device, row.peer] = row
    return list(newest.values())


def _spread(samples: Samples | None) -> tuple[float | None, float | None, float | None]:
    if samples is None:
        return None, None, None
    return _rounded(samples.median), _rounded(samples.p20), _rounded(samples.p80)


def _rounded(value: float | None) -> float | None:
    """Six digits: more than any clock gives."""
    return None if value is None else float(f"{value:.6g}")


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _parse(record: dict[str, str]) -> Row:
    return Row(**{name: _value(name, text) for name, text in record.items()})


def _value(name: str, text: str) -> Any:
    kind = Row.__annotations__[name]
    if kind in (bool, bool | None):
        return {"yes": True, "no": False, "": None}[text]
    if kind == Bar | None:
        return Bar.parse(text) if text else None
    if kind == float | None:
        return float(text) if text else None
    return kind(text)
