"""Rows of results, and the CSV files they live in."""

import csv
import dataclasses
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from scaledot.lab.experiments.recall import Run

Record = TypeVar("Record")


@dataclasses.dataclass(frozen=True)
class RaceRow:
    """One run of the sweep. Final numbers are means over the last 20 steps; steps_to_90: the first
    step whose last 20 have a mean accuracy of 90 %, None: never; held-out: fresh sequences."""

    rule: str
    d_k: int
    optimizer: str
    rate: float
    seed: int
    steps: int
    steps_to_90: int | None
    loss: float
    accuracy: float
    entropy_ratio: float
    saturated: float
    dead: float
    start_entropy_ratio: float
    start_saturated: float
    heldout_loss: float
    heldout_accuracy: float
    device: str
    torch: str

    @property
    def run(self) -> Run:
        return Run(self.rule, self.d_k, self.optimizer, self.rate, self.seed)


@dataclasses.dataclass(frozen=True)
class HeldOutRow:
    """Training on a fixed pool of sequences, and what is left of it on others.

    kept: share of the pool's sequences that look most at the same pair at the end as at the start;
    kept_wrong: of all sequences, those that do so and the pair is not the one asked for.
    """

    rule: str
    d_k: int
    optimizer: str
    rate: float
    seed: int
    pool: int
    steps: int
    start_saturated: float
    early_saturated: float  # mean over the first EARLY steps
    early_accuracy: float
    kept: float
    kept_wrong: float
    train_loss: float
    train_accuracy: float
    heldout_loss: float
    heldout_accuracy: float
    gap: float  # held-out loss minus training loss
    device: str
    torch: str


@dataclasses.dataclass(frozen=True)
class DepthRow:
    rule: str
    layers: int
    d_k: int
    optimizer: str
    rate: float
    seed: int
    steps: int
    steps_to_90: int | None
    loss: float
    accuracy: float
    entropy_ratio: float  # of the last layer's question row
    saturated: float
    device: str
    torch: str


@dataclasses.dataclass(frozen=True)
class UpdateRow:
    """Shares of gradients below 1 % of what is typical under sqrt_dk at step 0, same seed.

    rows: of dL/dq, root mean square over entries; weights: single entries of dL/dW_q and dL/dW_k.
    """

    rule: str
    d_k: int
    seed: int
    step: int
    rows_negligible: float
    query_weights_negligible: float
    key_weights_negligible: float
    row_median: float
    row_p99: float
    device: str
    torch: str


def write(path: Path, rows: Sequence[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(field.name for field in dataclasses.fields(rows[0]))
        table.writerows([_written(value) for value in dataclasses.astuple(row)] for row in rows)


def read(path: Path, kind: type[Record]) -> list[Record]:
    with path.open(newline="", encoding="utf-8") as file:
        return [_parsed(line, kind) for line in csv.DictReader(file)]


def _written(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _parsed(line: dict[str, str], kind: type[Record]) -> Record:
    readers: dict[Any, Any] = {
        str: str,
        int: int,
        float: float,
        bool: lambda text: text == "True",
        int | None: lambda text: int(text) if text else None,
        float | None: lambda text: float(text) if text else None,
    }
    fields = dataclasses.fields(kind)  # pyrefly: ignore[bad-argument-type]
    return kind(**{field.name: readers[field.type](line[field.name]) for field in fields})


def median(numbers: Iterable[float]) -> float:
    """Of numbers that may be inf or NaN (a run that blew up): NaN counts as inf."""
    ordered = sorted(math.inf if math.isnan(number) else number for number in numbers)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2
