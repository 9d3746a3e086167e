"""Parquet: for data frames. A folder with two tables, each a folder of parts.

    run/vitals/    one row a head: step, phase, time, layer, head, the vitals, the counts
    run/scalars/   step, name, value

`pyarrow.parquet.read_table("run/vitals")`, `polars.read_parquet("run/vitals/*.parquet")`, DuckDB
and pandas read them, also while they grow: a part appears whole or not at all.
"""

import io
import itertools
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scaledot.atomic_file import write_atomically
from scaledot.fields import COUNT_FIELDS, FLOAT_FIELDS
from scaledot.watch.reading import Reading, Scalar
from scaledot.watch.sinks.background import BackgroundSink
from scaledot.watch.sinks.extra import required

PART_HEADS = 200_000  # rows after which a part is written, some 10 MB
PART_SECONDS = 120.0  # or as long after its first row: this much a killed run may lose
VITALS = (*FLOAT_FIELDS, "passes")


class Parquet(BackgroundSink):
    """Adds parts to a folder; a resumed run goes on with the next number."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._arrow = required("pyarrow", "parquet", "the Parquet sink")
        self._parquet = required("pyarrow.parquet", "parquet", "the Parquet sink")
        self.folder = Path(folder).absolute()
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"{self.folder} is a file; Parquet(folder) wants a folder")
        for table in ("vitals", "scalars"):
            (self.folder / table).mkdir(parents=True, exist_ok=True)
        self._part = itertools.count(_last_part(self.folder) + 1)
        self._readings: list[Reading] = []
        self._scalars: list[Scalar] = []
        self._heads = 0
        self._since = time.monotonic()
        super().__init__()

    def _take(self, readings: Sequence[Reading], scalars: Sequence[Scalar]) -> None:
        if not (self._readings or self._scalars):
            self._since = time.monotonic()
        self._readings += readings
        self._scalars += scalars
        self._heads += sum(reading.heads for reading in readings)
        if self._heads >= PART_HEADS:
            self._flush()

    def _tick(self) -> None:
        if time.monotonic() - self._since >= PART_SECONDS:
            self._flush()

    def _flush(self) -> None:
        if not (self._readings or self._scalars):
            return
        part = next(self._part)
        if self._readings:
            self._save(part, "vitals", _vitals_columns(self._readings))
        if self._scalars:
            self._save(part, "scalars", _scalar_columns(self._scalars))
        self._readings, self._scalars, self._heads = [], [], 0

    def _close(self) -> None:
        for torn in self.folder.glob("*/.part-*.parquet*"):  # of a run that was killed
            torn.unlink(missing_ok=True)

    def _save(self, part: int, table: str, columns: dict[str, Any]) -> None:
        path = self.folder / table / f"part-{part:06d}.parquet"
        content = io.BytesIO()
        self._parquet.write_table(self._arrow.table(columns), content, compression="zstd")
        write_atomically(path, content.getvalue())


def _vitals_columns(readings: list[Reading]) -> dict[str, Any]:
    heads = [reading.heads for reading in readings]

    def repeated(values: list[Any]) -> np.ndarray:
        return np.repeat(np.array(values), heads)

    return {
        "step": repeated([reading.step for reading in readings]),
        "phase": repeated([reading.phase for reading in readings]),
        "time": repeated([reading.time for reading in readings]),
        "layer": repeated([reading.layer for reading in readings]),
        "head": np.concatenate([np.arange(number, dtype=np.int32) for number in heads]),
        **{
            name: np.concatenate([reading.value(name) for reading in readings])
            for name in (*VITALS, *COUNT_FIELDS)
        },
    }


def _scalar_columns(scalars: list[Scalar]) -> dict[str, Any]:
    return {
        "step": np.array([scalar.step for scalar in scalars], dtype=np.int64),
        "name": [scalar.name for scalar in scalars],
        "value": np.array([scalar.value for scalar in scalars], dtype=np.float64),
    }


def _last_part(folder: Path) -> int:
    found = (re.fullmatch(r"part-(\d+)\.parquet", path.name) for path in folder.glob("*/*"))
    return max((int(match[1]) for match in found if match), default=0)
