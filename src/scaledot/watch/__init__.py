"""The watch: the vital signs of every attention head of a training run, without editing it."""

import importlib
import logging
from typing import TYPE_CHECKING, Any

from scaledot.printable import make_visible

if TYPE_CHECKING:
    from scaledot.watch import alarms, remedies, sinks, store
    from scaledot.watch.watch import Watch

__all__ = ["Watch", "alarms", "remedies", "sinks", "store"]


make_visible(logging.getLogger("scaledot.watch"))


def __getattr__(name: str) -> Any:
    """On first use: who only reads a store needs no probes."""
    if name == "Watch":
        from scaledot.watch.watch import Watch

        return Watch
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
