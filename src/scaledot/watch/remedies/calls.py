"""Remedies at the attention call: what enters it is changed on its way, in every step.

The stand-ins lie above the watch's probes, so that the watch reads what the softmax is given. They
listen to the hub without wanting anything: as long as a remedy is in place, so are the probes below
it, whichever watch comes and goes.
"""

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import handle_torch_function

from scaledot import functional
from scaledot.watch.probes import compiled, frames, hub, hugging_face, over_ranks, place, sdpa
from scaledot.watch.probes.late import AfterImport
from scaledot.watch.probes.patch import Attribute, Swap, stands_for
from scaledot.watch.probes.seen import Seen
from scaledot.watch.remedies.rules import Arguments, Rule

log = logging.getLogger("scaledot.watch")


_rules: "weakref.WeakKeyDictionary[nn.Module, list[Rule]]" = weakref.WeakKeyDictionary()
_placed: list[Any] = []
_everywhere: list[Rule] = []  # for the calls of the whole process


class _Thread(threading.local):
    busy = False  # inside of a call that was changed: what it calls in turn is not changed again


_thread = _Thread()


def add(module: nn.Module | None, rule: Rule) -> None:
    """For every attention call made while `module` runs; None: of the process."""
    if not _placed:  # still there where a model was thrown away with its rules
        _place()
    for placed in _placed:
        placed.make(module)
    if module is None:
        _everywhere.append(rule)
    else:
        _rules.setdefault(module, []).append(rule)


def remove(module: nn.Module | None, rule: Rule) -> None:
    rules = _everywhere if module is None else _rules.get(module, [])
    if rule in rules:
        rules.remove(rule)
    if module is not None and not rules:
        _rules.pop(module, None)
    if not (_rules or _everywhere):
        while _placed:
            placed = _placed.pop()
            placed.undo()
            if placed in hub._placed:
                hub._placed.remove(placed)
        hub.leave(_silent)


class _Silent:
    """Keeps the probes in place."""

    model: nn.Module | None = None

    def wants(self) -> bool:
        return False

    def replaces(self) -> bool:
        return False

    def saw(self, seen: Seen) -> None:
        pass

    def cannot_see(self, kind: str, reason: str, module: nn.Module | None) -> None:
        pass


_silent = _Silent()


def _place() -> None:
    hub.listen(_silent)  # the probes first: the stand-ins go above them
    _placed.append(
        Swap(
            (F.scaled_dot_product_attention, _torchs(F.scaled_dot_product_attention)),
            (functional.attention, _ours(functional.attention)),
            (functional.attention_with_vitals, _ours(functional.attention_with_vitals)),
        )
    )
    for module, stand_in in ((hugging_face.MODULE, _registry), (over_ranks.MODULE, _over_ranks)):
        later = AfterImport(module, lambda stand_in=stand_in: (stand_in(),))
        _placed.append(later)
        hub._placed.append(later)  # who places it if the module is imported later


def _torchs(below: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @frames.invisible
    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            _tell_if_tracing()
            return below(*args, **kwargs)
        args = frames.unbound(F.scaled_dot_product_attention, args)
        tensors = sdpa.overridden(args, kwargs)
        if tensors and not sdpa.known_to_torch_alone(tensors):
            # Another's override takes the call, and comes back here.
            return handle_torch_function(scaled_dot_product_attention, tensors, *args, **kwargs)
        if tensors or not sdpa.is_call(args, kwargs):  # what torch refuses, torch names
            return below(*args, **kwargs)
        with _changing() as rules:
            if not rules:
                return below(*args, **kwargs)
            rest = {**dict(zip(sdpa.NAMES, args, strict=False)), **kwargs}
            query, key, value = (rest.pop(name) for name in sdpa.NAMES[:3])
            changed = _changed(rules, Arguments(query, key, rest))
            attend = functional.attention if any(rule.ours for rule in rules) else below
            return attend(changed.query, changed.key, value, **changed.rest)

    return stands_for(below, scaled_dot_product_attention)


NAMED = sdpa.NAMES[3:]  # after query, key, value


def _ours(below: Callable[..., Any]) -> Callable[..., Any]:
    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            _tell_if_tracing()
            return below(query, key, value, *args, **kwargs)
        with _changing() as rules:
            rest = {**dict(zip(NAMED, args, strict=False)), **kwargs}
            changed = _changed(rules, Arguments(query, key, rest))
            return below(changed.query, changed.key, value, **changed.rest)

    return stands_for(below, attention)


def _over_ranks() -> Swap:
    """Context parallel: each rank changes its own queries and keys, all of them alike."""
    from scaledot import distributed

    def standing(below: Callable[..., Any]) -> Callable[..., Any]:
        def attention(query: Tensor, key: Tensor, value: Tensor, mesh: Any, **kwargs: Any) -> Any:
            with _changing() as rules:
                changed = _changed(rules, Arguments(query, key, kwargs))
                return below(changed.query, changed.key, value, mesh, **changed.rest)

        return stands_for(below, attention)

    functions = (distributed.attention, distributed.attention_with_vitals)
    return Swap(*((below, standing(below)) for below in functions))


def _registry() -> Attribute:
    """transformers' functions but "sdpa", which calls torch's: their queries and keys."""
    from transformers.modeling_utils import AttentionInterface

    below = AttentionInterface.get_interface

    def get_interface(self: Any, attn_implementation: str, default: Any) -> Any:
        attend = below(self, attn_implementation, default)
        sdpa = attn_implementation is not None and attn_implementation.endswith("sdpa")
        if torch.compiler.is_compiling():
            _tell_if_tracing()
            return attend
        if sdpa:
            return attend

        def attention(module: nn.Module, query: Tensor, key: Tensor, *args: Any, **kw: Any) -> Any:
            with _changing() as rules:
                # What scaledot's attention has to compute is refused here: see `ways.OURS_ONLY`.
                rules = [rule for rule in rules if not rule.ours]
                changed = _changed(rules, Arguments(query, key, {}))
                return attend(module, changed.query, changed.key, *args, **kw)

        return attention

    return Attribute(AttentionInterface, "get_interface", get_interface)


def _tell_if_tracing() -> None:
    if compiled.tracing():
        _tell()


@compiled.constant
def _tell() -> int:
    """Runs once, while the compiler traces."""
    rules = [rule for some in _rules.values() for rule in some] + _everywhere
    if any(type(rule) is not Rule for rule in rules):
        log.warning(
            "a remedy at the attention call does not reach into a compiled graph; use qk-clip, "
            "which works on weights, or leave this model uncompiled"
        )
    return 0


@contextmanager
def _changing() -> Iterator[list[Rule]]:
    """The rules for the call, the innermost module's first; none inside of a changed call."""
    if _thread.busy:
        yield []
        return
    running = place.here().modules if _rules else ()
    rules = [rule for module in running for rule in _rules.get(module, ())] + _everywhere
    if not rules:
        yield []
        return
    _thread.busy = True
    try:
        yield rules
    finally:
        _thread.busy = False


def _changed(rules: list[Rule], given: Arguments) -> Arguments:
    for rule in rules:
        given = rule.change(given)
        if not rule.used:
            rule.used = True
            rule.first_used()
    return given
