"""Whoever takes readings: the store, a sink, a list."""

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from scaledot.watch.ranks.files import Silence
from scaledot.watch.reading import Reading, Scalar

log = logging.getLogger("scaledot.watch")

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


def by_rank_0(receiver: Callable[..., Any], target: Any, job: Silence) -> Callable[..., Any]:
    """In a job of several ranks the readings are the same on all: one of them hands them on.

    A target that says `on_every_rank` gets them on all, and knows what to do with them.
    """
    if getattr(target, "on_every_rank", False):
        return receiver

    def hand_on(*things: Any) -> Any:
        return None if job.silent else receiver(*things)

    return hand_on


def close_all(targets: Iterable[Any]) -> None:
    """Close those that can be closed. One that fails hinders neither the others nor the training.

    A watch closes the sinks it was given when it is removed: what they hold back (a part of a
    Parquet file, the last step of a picture) is written then. A store that was given as an object
    stays open: who opened it closes it.
    """
    for target in targets:
        if callable(close := getattr(target, "close", None)):
            try:
                close()
            except Exception:
                log.exception("a %s could not be closed; the others are", type(target).__name__)


def is_path(target: Any) -> bool:
    return isinstance(target, str | os.PathLike)
