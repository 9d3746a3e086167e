"""Readings measured on real attention, and what the sinks' tests share."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import scaledot
from scaledot.watch.reading import Phase, Reading

LAYERS = (("blocks.0.attention", 3), ("blocks.1.attention", 5))  # layers of unequal head counts
STARTED = 1_700_000_000.0
SOURCE = Path(__file__).parents[2] / "src"


def reading(step: int, layer: str = "blocks.0.attention", heads: int = 3, **more) -> Reading:
    generator = torch.Generator().manual_seed(1000 * step + sum(map(ord, layer)))
    query, key = (torch.randn(2, heads, 7, 5, generator=generator) for _ in range(2))
    vitals = scaledot.vitals(query * (1 + step), key).over_batch()
    return Reading.of(vitals, step=step, layer=layer, time=STARTED + step, **more)


def readings(step: int, phase: Phase = "train") -> list[Reading]:
    return [reading(step, layer, heads, phase=phase) for layer, heads in LAYERS]


def with_a_head_without_rows(one: Reading) -> Reading:
    empty = Reading.of(scaledot.Vitals.empty((1,)), step=one.step, layer=one.layer, time=one.time)
    return Reading(
        one.step,
        one.phase,
        one.time,
        one.layer,
        np.concatenate([one.floats, empty.floats], axis=1),
        np.concatenate([one.counts, empty.counts], axis=1),
    )


def needs(module: str, extra: str):
    return pytest.importorskip(module, reason=f"NOT TESTED: pip install 'scaledot[{extra}]'")


def run_python(code: str, folder: Path, **environment: str) -> str:
    """In a process of its own: libraries that keep threads, sockets or a home folder."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=folder,
        env={
            **{name: value for name, value in os.environ.items() if name != "HF_TOKEN"},
            "PYTHONPATH": os.pathsep.join([str(SOURCE), str(SOURCE.parent / "tests")]),
            "OMP_NUM_THREADS": "1",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
