"""Whoever takes readings: the store, a sink, a list."""

import os
from collections.abc import Callable, Sequence
from typing import Any

from scaledot.watch.reading import Reading, Scalar

Deliver = Callable[[Sequence[Reading], Sequence[Scalar]], Any]


def delivery_to(target: Any) -> Deliver:
    """Whole steps to `write(readings, scalars)`; else one by one to `put` or to a list."""
    if callable(write := getattr(target, "write", None)):
        return write
    put = target.append if isinstance(target, list) else getattr(target, "put", None)
    if not callable(put):
        raise TypeError(
            f"a {type(target).__name__} takes no readings; give the path of a file, a "
            f"scaledot.watch.store.Store, a list, or an object with write(readings, scalars)"
        )
    deliver: Callable[[Reading], Any] = put

    def one_by_one(readings: Sequence[Reading], scalars: Sequence[Scalar]) -> None:
        for reading in readings:
            deliver(reading)

    return one_by_one


def is_path(target: Any) -> bool:
    return isinstance(target, str | os.PathLike)
