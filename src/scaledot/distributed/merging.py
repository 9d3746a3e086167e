"""The vitals of all ranks' rows, by one collective."""

from dataclasses import replace
from typing import Any

import torch

from scaledot.distributed.group import all_bytes, ranks_of
from scaledot.measure import COUNT_FIELDS, FLOAT_FIELDS, Vitals

FIELDS = FLOAT_FIELDS + COUNT_FIELDS


def merge_vitals(vitals: Vitals, mesh: Any) -> Vitals:
    """Every rank gives vitals of the same shape and gets the merged ones, the same on all ranks.

    The rows of the ranks must be disjoint: data parallel, context parallel. One all-gather of 19
    numbers a head. What was measured row by row stays the rank's own.
    """
    ranks = ranks_of(mesh)
    # float64 holds counts exactly up to 2^53.
    packed = torch.stack([getattr(vitals, name).double() for name in FIELDS])
    everybodys = all_bytes(ranks, packed).transpose(0, 1).flatten(2)  # [fields, ranks, heads]
    named: dict[str, Any] = dict(zip(FIELDS, everybodys, strict=True))
    for name in COUNT_FIELDS:
        named[name] = named[name].long()
    merged = Vitals(**named).over_batch()
    shaped: dict[str, Any] = {
        name: getattr(merged, name).view(vitals.shape).to(getattr(vitals, name).dtype)
        for name in FIELDS
    }
    return replace(vitals, **shaped)
