"""The check as data: everything that the terminal shows, and every head."""

import math
from typing import Any

from scaledot.watch.check import words
from scaledot.watch.check.examine import Examination
from scaledot.watch.check.heads import Head, worst_first
from scaledot.watch.reading import loaded_versions


def as_data(examination: Examination, name: str, top: int | None) -> dict[str, Any]:
    """top: that many heads, the worst first; None: all, in the order of the layers."""
    heads = examination.heads if top is None else worst_first(examination.heads)[:top]
    coverage = examination.coverage
    return {
        "versions": loaded_versions(),
        "model": name,
        "summary": examination.model,
        "inputs": examination.subject.about,
        "seconds": examination.seconds,
        "healthy": examination.healthy,
        "verdict": words.verdict(examination),
        "coverage": {
            "words": str(coverage),
            "watched": list(coverage.watched),
            "unseen": list(coverage.unseen),
            "reasons": coverage.reasons,
        },
        "not_known_whether_positional": examination.unplaced,
        "random_weights": list(examination.subject.made_up),
        "heads_in_all": len(examination.heads),
        "heads": [_head(head) for head in heads],
    }


def _head(head: Head) -> dict[str, Any]:
    offset = head.offset
    return {
        "layer": head.layer,
        "head": head.head,
        "roles": list(head.roles),
        "outside": list(head.outside),
        "scale_holds": head.scale_holds,
        "d_k": head.d_k,
        "divisor": head.divisor,
        "keys": head.keys,
        "row_std_limit": head.freezing,
        "offset": None if offset is None else {"tokens": offset.offset, "weight": offset.weight},
        "vitals": {name: _finite(value) for name, value in head.vitals.items()},
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON knows neither NaN nor infinity
