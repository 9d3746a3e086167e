"""torch.nn.functional.scaled_dot_product_attention, under whatever name it was imported."""

import sys
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from scaledot import functional
from scaledot.watch.probes import compiled, frames, hub, in_graph, place, sharded
from scaledot.watch.probes.patch import KnownToScript, Swap, stands_for
from scaledot.watch.probes.replacing import KEPT, replaced
from scaledot.watch.probes.scores import Scores
from scaledot.watch.probes.seen import Seen, scale_of, why_not

KIND = "scaled_dot_product_attention"
OURS = 2  # frames between `_look` and the model's own line, the first included
NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def probes() -> tuple[Any, ...]:
    original = F.scaled_dot_product_attention
    replacement = _probe(original)
    known = KnownToScript(original, replacement, "aten::scaled_dot_product_attention")
    return Swap((original, replacement)), known


def overridden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The tensors of a call, where a mode or one of their types takes part in torch's overrides.

    Such a call belongs to the override. It is handed the stand-in as the function that was called,
    because that is what the override finds under torch's name and compares with. What it calls in
    turn comes back here.
    """
    tensors = args[:4]
    if kwargs:
        tensors += tuple(kwargs.get(name) for name in ("query", "key", "value", "attn_mask"))
    return tensors if has_torch_function(tensors) else ()


def is_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the three tensors are there, each once, under names that torch knows."""
    given = (*NAMES[: len(args)], *kwargs)
    return (
        len(args) <= len(NAMES)
        and set(NAMES[:3]) <= set(given) <= set(NAMES)
        and (len(given) == len(set(given)))
    )


def known_to_torch_alone(tensors: tuple[Any, ...]) -> bool:
    """Whether the override looks for the original: nested tensors, and the proxies of torch.fx.

    What a proxy is called with stays in its graph, also after the watch has gone.
    """
    overrides = (one for one in tensors if hasattr(type(one), "__torch_function__"))
    with torch._C.DisableTorchFunction():  # a mode would be asked about this, too
        return any(not isinstance(one, Tensor) or one.is_nested for one in overrides)


def _probe(original: Any) -> Any:
    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return traced(*frames.unbound(scaled_dot_product_attention, args), **kwargs)
        try:
            if not (args and type(args[0]) is Tensor):
                args = frames.unbound(scaled_dot_product_attention, args)
            # The short question first: it is asked at every call, due or not.
            if (
                has_torch_function(args) or (kwargs and has_torch_function(tuple(kwargs.values())))
            ) and (tensors := overridden(args, kwargs)):
                if known_to_torch_alone(tensors):
                    return frames.caller(sys._getframe(1))(original, args, kwargs)
                return handle_torch_function(scaled_dot_product_attention, tensors, *args, **kwargs)
            if hub.idle():
                return frames.caller(sys._getframe(1))(original, args, kwargs)
            if hub.replacing():
                out = _replaced(*args, **kwargs)
                if out is not KEPT:
                    return out
            out = frames.caller(sys._getframe(1))(original, args, kwargs)
        except BaseException as error:
            frames.hide(error)
            raise
        if hub.wants() and not torch.compiler.is_compiling():
            try:
                _look(*args, **kwargs)
            except Exception as error:  # ours, and no matter of the program's
                hub.cannot_see(KIND, f"{type(error).__name__}: {error}")
        return out

    def traced(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """What Dynamo reads in the place of the above."""
        if has_torch_function((query, key, value, attn_mask)):
            return handle_torch_function(
                scaled_dot_product_attention,
                (query, key, value, attn_mask),
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        if compiled.tracing():
            if hub.replacing_in_graphs and in_graph.plain(query):
                return functional.attention_with_vitals(
                    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
                )[0]  # the probe of scaledot's own functions takes the vitals
            in_graph.look(KIND, query, key, attn_mask, is_causal, scale, enable_gqa)
        return original(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    return stands_for(original, scaled_dot_product_attention, ("torch.nn.functional", KIND))


def _replaced(
    query: Any = None,
    key: Any = None,
    value: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """A call that torch would refuse is left to torch, which names its mistake."""
    return replaced(
        query,
        lambda: functional.attention_with_vitals(query, key, value, *args, **kwargs),
        KIND,
    )


def _look(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> None:
    """Show the watches a call that torch has served."""
    near = place.near(OURS)
    scores = Scores(query, key, attn_mask, is_causal, scale, enable_gqa)
    if hub.recalled(near, scores):
        return
    if isinstance(query, FakeTensor):  # a compiler at work, which computes nothing
        return
    if sharded.is_sharded(query):
        found = sharded.look(KIND, query, key, attn_mask, is_causal, scale, enable_gqa)
        if isinstance(found, str):
            hub.cannot_see(KIND, found)
        else:
            hub.offer(found)
        return
    if reason := why_not(query):
        hub.cannot_see(KIND, reason)
        return

    factor = scale_of(query, scale)
    hub.offer(Seen(query, scores.vitals, KIND, scale=factor, source=scores.itself, near=near))
