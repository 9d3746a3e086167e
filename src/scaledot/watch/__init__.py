"""The watch: the vital signs of every attention head of a training run, without editing it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scaledot.watch.watch import Watch

__all__ = ["Watch"]


def __getattr__(name: str) -> Any:
    if name == "Watch":  # on first use: who only reads a store needs no probes
        from scaledot.watch.watch import Watch

        return Watch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
