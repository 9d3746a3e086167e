"""scaledot: scaled dot-product attention that reports its own vital signs."""

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

__all__ = [
    "RowState",
    "Vitals",
    "additive_attention",
    "additive_attention_with_vitals",
    "attention",
    "attention_varlen",
    "attention_varlen_with_vitals",
    "attention_with_vitals",
    "backend_for",
    "measure",
    "nn",
    "scale",
    "vitals",
    "vitals_varlen",
]
