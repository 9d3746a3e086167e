"""One JSON object a line: for scripts, agents and `jq`. Needs nothing but Python.

    {"kind": "reading", "step": 7, "phase": "train", "time": 1.7e9, "layer": "blocks.0.attention",
     "vitals": {"max_logit": [one number a head], ..., "passes": [...]}, "counts": {"rows": [...]}}
    {"kind": "scalar", "step": 7, "name": "loss", "value": 2.5}

JSON has no infinity and no NaN. They are written as "Infinity", "-Infinity" and "NaN", which
`float()` and JavaScript's `Number()` read.
"""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scaledot.fields import COUNT_FIELDS, FLOAT_FIELDS
from scaledot.watch.reading import Reading, Scalar
from scaledot.watch.sinks.background import BackgroundSink


class JsonLines(BackgroundSink):
    """Appends to the file; a line reaches the disk within a second and is never rewritten."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a+b")
        if _torn(self._file):  # a killed run's last line must not swallow our first
            self._file.write(b"\n")
        super().__init__()

    def _take(self, readings: Sequence[Reading], scalars: Sequence[Scalar]) -> None:
        for record in (*map(_reading, readings), *map(_scalar, scalars)):
            line = json.dumps(record, allow_nan=False, separators=(",", ":"))
            self._file.write(line.encode() + b"\n")

    def _flush(self) -> None:
        self._file.flush()

    def _close(self) -> None:
        self._file.close()


def _reading(reading: Reading) -> dict[str, Any]:
    return {
        "kind": "reading",
        "step": reading.step,
        "phase": reading.phase,
        "time": reading.time,
        "layer": reading.layer,
        "vitals": {name: _numbers(reading.value(name)) for name in (*FLOAT_FIELDS, "passes")},
        "counts": {name: reading.value(name).tolist() for name in COUNT_FIELDS},
    }


def _scalar(scalar: Scalar) -> dict[str, Any]:
    value = scalar.value if math.isfinite(scalar.value) else _word(scalar.value)
    return {"kind": "scalar", "step": scalar.step, "name": scalar.name, "value": value}


def _numbers(values: np.ndarray) -> list[float | str]:
    """float32 at its shortest: 0.1, not 0.10000000149011612; it reads back as the same float32."""
    return [float(str(value)) if math.isfinite(value) else _word(value) for value in values]


def _word(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _torn(file: Any) -> bool:
    if file.seek(0, os.SEEK_END) == 0:
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"
