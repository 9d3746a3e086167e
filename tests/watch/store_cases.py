"""Readings that say of themselves which step, layer and head they are; disks that fail."""

import contextlib
import logging
import os
import sqlite3
from collections.abc import Sequence

import numpy as np
import pytest

from scaledot.measure import COUNT_FIELDS, FLOAT_FIELDS
from scaledot.watch.reading import Phase, Reading, Scalar
from scaledot.watch.store import writer

LAYERS = (("blocks.0.attention", 3), ("blocks.1.attention", 5), ("decoder.cross", 2))
STARTED = 1_700_000_000.0
NOBODY = 65534


def reading(step: int, layer: str, heads: int, phase: Phase = "train") -> Reading:
    offset = sum(map(ord, layer)) % 97
    fields, head = np.arange(len(FLOAT_FIELDS))[:, None], np.arange(heads)
    counts = np.arange(len(COUNT_FIELDS))[:, None] * 1000 + head + step % 7
    floats = step + 0.125 * fields + 0.0078125 * head + offset
    return Reading(step, phase, STARTED + step / 8, layer, floats, counts)


def readings(
    step: int, layers: Sequence[tuple[str, int]] = LAYERS, phase: Phase = "train"
) -> list[Reading]:
    return [reading(step, layer, heads, phase) for layer, heads in layers]


def scalars(step: int) -> list[Scalar]:
    return [Scalar(step, "loss", 4.0 / (1 + step)), Scalar(step, "learning_rate", 3e-4)]


def assert_same(found: Reading, expected: Reading) -> None:
    for name in ("step", "phase", "time", "layer"):
        assert getattr(found, name) == getattr(expected, name)
    np.testing.assert_array_equal(found.floats, expected.floats)
    np.testing.assert_array_equal(found.counts, expected.counts)


def warnings_in(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@contextlib.contextmanager
def files_no_larger_than(size: int):
    import resource  # not on every system

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def refuse_rows(monkeypatch: pytest.MonkeyPatch, full: bool) -> None:
    """Let the disk take no new row from now on, being full or broken; what is there can change."""

    def refuse(database: sqlite3.Connection, rows: object) -> None:
        error = sqlite3.OperationalError("it is full" if full else "it is broken")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL if full else sqlite3.SQLITE_IOERR
        raise error

    monkeypatch.setattr(writer, "_write_rows", refuse)


@contextlib.contextmanager
def unprivileged():
    """Root may write anywhere: be nobody for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
