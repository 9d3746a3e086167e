"""scaledot: scaled dot-product attention that reports its own vital signs.

The names below are loaded on first use: `scaledot run` and `scaledot --help` need no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from scaledot import distributed, measure, nn, scale, watch
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
    "watch",
]

_MODULES = ("distributed", "measure", "nn", "scale", "watch")
_ELSEWHERE = {"RowState": "measure", "Vitals": "measure", "Watch": "watch"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    home = importlib.import_module(f"{__name__}.{_ELSEWHERE.get(name, 'functional')}")
    found = getattr(home, name)
    if name != "Watch":  # a plain name from now on, as quick as any
        globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
