"""scaledot: scaled dot-product attention that reports its own vital signs."""

from typing import TYPE_CHECKING, Any

from scaledot import measure, nn, scale
from scaledot.functional import (
    additive_attention,
    additive_attention_with_vitals,
    attention,
    attention_varlen,
    attention_varlen_with_vitals,
    attention_with_vitals,
    backend_for,
    vitals,
    vitals_varlen,
)
from scaledot.measure import RowState, Vitals

__version__ = "0.1.0"

if TYPE_CHECKING:
    from scaledot import distributed
    from scaledot.watch import Watch

__all__ = [
    "RowState",
    "Vitals",
    "Watch",
    "additive_attention",
    "additive_attention_with_vitals",
    "attention",
    "attention_varlen",
    "attention_varlen_with_vitals",
    "attention_with_vitals",
    "backend_for",
    "distributed",
    "measure",
    "nn",
    "scale",
    "vitals",
    "vitals_varlen",
]


def __getattr__(name: str) -> Any:
    if name == "Watch":  # on first use: importing scaledot stays as light as torch
        from scaledot.watch import Watch

        return Watch
    if name == "distributed":
        import scaledot.distributed

        return scaledot.distributed
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
