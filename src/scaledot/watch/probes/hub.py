"""The watches that listen. The first puts the probes in place, the last takes them away."""

import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from scaledot.watch.probes import frames
from scaledot.watch.probes.patch import Swap
from scaledot.watch.probes.place import Near
from scaledot.watch.probes.scores import Scores
from scaledot.watch.probes.seen import Seen

log = logging.getLogger("scaledot.watch")


class Listener(Protocol):
    @property
    def model(self) -> nn.Module | None:
        """Whose attributes are searched for functions too; None: nobody's."""
        ...

    def wants(self) -> bool:
        """Whether a call at this moment may be worth looking at. Asked at every call: cheap."""
        ...

    def replaces(self) -> bool: ...

    def saw(self, seen: Seen) -> None: ...

    def cannot_see(self, kind: str, reason: str, module: nn.Module | None) -> None: ...


class Keeper(Protocol):
    """Who keeps account of what no probe measures."""

    @property
    def replace(self) -> bool:
        """Whether scaledot computes the model's attention wherever it can."""
        ...

    @property
    def looking(self) -> bool:
        """Whether `takes_inventory` may say so."""
        ...

    def takes_inventory(self) -> bool:
        """Whether attention by hand is looked for at this moment. Asked at every softmax."""
        ...

    def found_by_hand(self, module: nn.Module | None) -> None: ...

    def keeps_own(self, kind: str, reason: str, module: nn.Module | None) -> None: ...

    def knows_attention(self) -> bool:
        """Whether any was measured, or named."""
        ...

    def passed_by(self, kind: str, reason: str) -> None:
        """Attention that no probe meets."""
        ...


class _Thread(threading.local):
    quiet = 0  # how many probes of this thread are at work: what they call is not attention's own


class _Quiet:
    """A class and no generator: a call of attention enters it three times."""

    def __enter__(self) -> None:
        _thread.quiet += 1

    def __exit__(self, *exception: object) -> None:
        _thread.quiet -= 1


Recall = Callable[[Near, Scores], bool]

listeners: tuple[Listener, ...] = ()
keepers: tuple[Keeper, ...] = ()
_recalls: dict[Listener, Recall] = {}  # of the listeners that know calls again
# A graph is traced once: it asks whether a watch replaces at all, not whether this step is due.
replacing_in_graphs = False
_placed: list[Any] = []
_lock = threading.RLock()
_thread = _Thread()
_quiet = _Quiet()


def listen(listener: Listener, keeper: Keeper | None = None, recall: Recall | None = None) -> None:
    """recall: takes a call that is like one offered before, whole; False: it is to be offered."""
    global listeners
    with _lock:
        if not listeners:
            _place()
        for placed in _placed:
            placed.make(listener.model)
        listeners = (*listeners, listener)
        if keeper is not None:
            _keep((*keepers, keeper))
        if recall is not None:
            _recalls[listener] = recall


def leave(listener: Listener, keeper: Keeper | None = None) -> None:
    global listeners
    with _lock:
        if listener not in listeners:
            return
        listeners = tuple(other for other in listeners if other is not listener)
        _keep(tuple(other for other in keepers if other is not keeper))
        _recalls.pop(listener, None)
        if listeners:
            return
        for placed in reversed(_placed):
            placed.undo()
        _placed.clear()
        frames.forget()


def _keep(now: tuple[Keeper, ...]) -> None:
    global keepers, replacing_in_graphs
    keepers = now
    replacing_in_graphs = any(keeper.replace for keeper in now)


def place_late(placed: Any) -> None:
    """One of the probes waited for a package that has been imported now."""
    with _lock:
        if placed in _placed:  # not where the last watch has left meanwhile
            placed.make()


def is_quiet() -> bool:
    """Whether this thread runs something that a probe has seen already."""
    return _thread.quiet > 0


def wants() -> bool:
    """Tell whether somebody wants to see a call at this moment."""
    for listener in listeners:  # asked first, for mostly nobody does
        if listener.wants():
            # A forward pass inside of a backward pass is a recomputation: it was seen before.
            return not _thread.quiet and torch._C._current_graph_task_id() == -1
    return False


def replacing() -> bool:
    """Tell whether scaledot computes the model's attention in this step, and in recomputations."""
    for listener in listeners:
        if listener.replaces():
            return not _thread.quiet
    return False


def idle() -> bool:
    """Tell whether no watch has anything to do with a call at this moment, as in most steps."""
    for listener in listeners:  # noqa: SIM110 - a generator takes 2 µs more at every call
        if listener.wants() or listener.replaces():
            return False
    return True


def offer(seen: Seen) -> None:
    """Show a call to every watch. Nothing that goes wrong here may reach the model."""
    with quiet():
        for listener in listeners:
            try:
                listener.saw(seen)
            except Exception as error:
                cannot_see(seen.kind, f"{type(error).__name__}: {error}", seen.module, listener)


def recalled(near: Near, scores: Scores) -> bool:
    """Show a call to the one watch there is; True: it knows such calls, and has taken this one."""
    if len(listeners) != 1 or (recall := _recalls.get(listeners[0])) is None:
        return False
    return recall(near, scores)


def cannot_see(
    kind: str, reason: str, module: nn.Module | None = None, only: Listener | None = None
) -> None:
    for listener in listeners if only is None else (only,):
        try:
            listener.cannot_see(kind, reason, module)
        except Exception:
            log.exception("the watch could not note that a call of %s was not measured", kind)


def keeps_own(kind: str, reason: str, module: nn.Module | None = None) -> None:
    """A call that was to be replaced and was not."""
    for keeper in keepers:
        try:
            if keeper.replace:
                keeper.keeps_own(kind, reason, module)
        except Exception:
            log.exception("the watch could not note that a call of %s was not replaced", kind)


def inventory() -> list[Keeper]:
    """Return who looks for attention by hand; nobody inside of a call that a probe sees."""
    for keeper in keepers:  # mostly nobody does: that is found out in as little time as possible
        if keeper.looking:
            break
    else:
        return []
    return [] if _thread.quiet else [one for one in keepers if one.takes_inventory()]


def quiet() -> _Quiet:
    """What runs inside is part of a call already seen, or the watch's own work."""
    return _quiet


def _place() -> None:
    from scaledot.watch.probes import (
        by_hand,
        compiler_table,
        diffusers,
        flash,
        flex,
        hugging_face,
        late,
        multihead,
        over_ranks,
        own,
        sdpa,
    )

    placed = (*sdpa.probes(), *multihead.probes(), *own.probes(), *by_hand.probes())
    swaps = [probe for probe in placed if isinstance(probe, Swap)]
    # One pass over the names of the process for all of them.
    _placed.append(Swap(*(pair for swap in swaps for pair in swap.pairs)))
    _placed.extend(probe for probe in placed if not isinstance(probe, Swap))
    # Packages that may never be imported.
    for place in (compiler_table, hugging_face, diffusers, flex, over_ranks):
        _placed.append(late.AfterImport(place.MODULE, place.probes))
    for module, probes in flash.PLACES:
        _placed.append(late.AfterImport(module, probes))
