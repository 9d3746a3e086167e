"""Readings of the whole job from those of its ranks."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from scaledot.fields import COUNT_FIELDS, FLOAT_FIELDS
from scaledot.measure import Vitals
from scaledot.watch.ranks.exchange import Bundle
from scaledot.watch.ranks.parcel import NUMBERS, Contents
from scaledot.watch.ranks.told import Part, Placing
from scaledot.watch.reading import (
    LEARNING_RATE,
    LOSS,
    ROWS_READ,
    ROWS_THERE,
    Phase,
    Reading,
    Scalar,
)

AT_ONCE = 64  # ranks whose numbers are merged in one go


class Whole(NamedTuple):
    """A layer of the job in one reading."""

    layer: str
    phase: Phase
    step: int


def readings_of(bundle: Bundle, placing: Placing) -> list[Reading]:
    """One a layer: heads from wherever they are, rows of all ranks that hold them."""
    parts = placing.parts(bundle.parts)
    heads: dict[Whole, int] = {}
    times: dict[Whole, float] = {}
    for part in parts:
        whole = Whole(part.layer, part.phase, part.step)
        last = part.first + part.columns.stop - part.columns.start
        heads[whole] = max(heads.get(whole, 0), last)
        times.setdefault(whole, part.time)
    begins = dict(zip(heads, np.cumsum([0, *heads.values()]).tolist(), strict=False))
    merged = _merged(bundle.parts, parts, begins, sum(heads.values()))
    return [
        Reading(
            step=whole.step,
            phase=whole.phase,
            time=times[whole],
            layer=whole.layer,
            floats=merged.floats[:, begins[whole] : begins[whole] + number],
            counts=merged.counts[:, begins[whole] : begins[whole] + number],
        )
        for whole, number in heads.items()
    ]


def scalars_of(bundle: Bundle) -> list[Scalar]:
    """The mean loss, the first rank's learning rate, the longest step, the dearest watch.

    Rows are added up: of ranks that hold other heads of the same rows, too.
    """
    rules = {LOSS: np.mean, LEARNING_RATE: lambda known: known[0], ROWS_READ: sum, ROWS_THERE: sum}
    found = []
    for name in NUMBERS:
        values = [part.scalars[name] for part in bundle.parts if name in part.scalars]
        if values:
            found.append(Scalar(bundle.step, name, float(rules.get(name, max)(values))))
    return found


def wish_of(bundle: Bundle) -> int:
    """The rarest that any rank asks for; 0: nobody knows yet."""
    return max(part.header.wish for part in bundle.parts)


class _Numbers(NamedTuple):
    floats: np.ndarray  # [F, heads of all layers]
    counts: np.ndarray


def _merged(
    contents: Sequence[Contents], parts: Sequence[Part], begins: dict[Whole, int], heads: int
) -> _Numbers:
    merged: Vitals | None = None
    for start in range(0, len(contents), AT_ONCE):
        ranks = range(start, min(start + AT_ONCE, len(contents)))
        some = _vitals(contents, [part for part in parts if part.rank in ranks], begins, heads)
        merged = some if merged is None else merged.merge(some)
    assert merged is not None
    floats = np.stack([getattr(merged, name).numpy() for name in FLOAT_FIELDS])
    return _Numbers(floats, np.stack([getattr(merged, name).numpy() for name in COUNT_FIELDS]))


def _vitals(
    contents: Sequence[Contents], parts: Sequence[Part], begins: dict[Whole, int], heads: int
) -> Vitals:
    """All layers side by side, [heads]; a rank is to a head what a batch entry is to it."""
    rows = {rank: row for row, rank in enumerate(dict.fromkeys(part.rank for part in parts))}
    empty = Vitals.empty((len(rows), heads), torch.float64)
    floats = np.stack([getattr(empty, name).numpy() for name in FLOAT_FIELDS])
    counts = np.stack([getattr(empty, name).numpy() for name in COUNT_FIELDS])
    for part in parts:
        begin = begins[Whole(part.layer, part.phase, part.step)] + part.first
        place = slice(begin, begin + part.columns.stop - part.columns.start)
        floats[:, rows[part.rank], place] = contents[part.rank].floats[:, part.columns]
        counts[:, rows[part.rank], place] = contents[part.rank].counts[:, part.columns]
    named: dict[str, Any] = dict(zip(FLOAT_FIELDS, torch.from_numpy(floats), strict=True))
    named |= dict(zip(COUNT_FIELDS, torch.from_numpy(counts), strict=True))
    return Vitals(**named).over_batch()
