"""diffusers: the functions of its attention dispatcher, [batch, tokens, heads, width].

Sixty of its files import the dispatcher by name, but it looks its backends up in a registry at
every call: there they are wrapped. The native ones and "flex" call torch's functions, where the
other probes see exactly what is computed.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scaledot import functional
from scaledot.watch.probes import compiled, frames, hub, in_graph
from scaledot.watch.probes.patch import Item
from scaledot.watch.probes.replacing import KEPT, replaced
from scaledot.watch.probes.scores import Scores
from scaledot.watch.probes.seen import Seen, why_not

MODULE = "diffusers.models.attention_dispatch"
TORCHS = frozenset(
    {"flex", "native", "_native_cudnn", "_native_efficient", "_native_flash", "_native_math"}
)


def probes() -> tuple[Any, ...]:
    backends = sys.modules[MODULE]._AttentionBackendRegistry._backends
    names = [name for name in backends if name.value not in TORCHS]
    return tuple(Item(backends, name, _probe(backends[name], name.value)) for name in names)


def _probe(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    kind = f"diffusers' {name!r} attention"

    @frames.invisible
    def attention(**given: Any) -> Any:
        """Called by the dispatcher, which names every argument."""
        reason = _why_not_read(name, given)
        if torch.compiler.is_compiling():
            if compiled.tracing():
                if reason:
                    compiled.cannot_see(kind, reason)
                else:
                    in_graph.look(kind, **_arguments(name, given))
                    return compiled.seen(original, **given)
            return original(**given)
        if hub.replacing():
            out = _replaced(name, given, kind, reason)
            if out is not KEPT:
                return out
        if not hub.wants():
            return original(**given)
        with hub.quiet():
            out = original(**given)
        query = given["query"]
        if reason := why_not(query) or reason:
            hub.cannot_see(kind, reason)
        else:

            def scores() -> Scores:
                return Scores(**_arguments(name, given))

            hub.offer(Seen(query, lambda: scores().vitals(), kind, source=scores))
        return out

    attention.__doc__ = original.__doc__
    return attention


def _why_not_read(name: str, given: dict[str, Any]) -> str:
    if given.get("_parallel_config") is not None:
        return "its tokens are spread over ranks"
    if not isinstance(given.get("attn_mask"), Tensor | None):
        return f"its mask is a {type(given['attn_mask']).__name__}"
    mask = given.get("attn_mask")
    if mask is not None and "varlen" in name and mask.numel() != mask.shape[0] * mask.shape[-1]:
        return "diffusers makes a mask of keys out of its mask of pairs"
    unequal = given["query"].shape[1] != given["key"].shape[1]
    if given.get("is_causal") and unequal and "flash" not in name:
        return "the watch does not know where its causal diagonal begins"
    return ""


def _replaced(name: str, given: dict[str, Any], kind: str, reason: str) -> Any:
    if given.get("return_lse"):
        reason = reason or "more than its output is asked for"
    if "sage" in name:
        reason = reason or "it computes with quantised numbers"

    def attend() -> Any:
        out, vitals = functional.attention_with_vitals(
            value=given["value"].transpose(1, 2),
            dropout_p=given.get("dropout_p", 0.0),
            **_arguments(name, given),
        )
        return out.transpose(1, 2), vitals

    return replaced(given["query"], attend, kind, reason=reason)


def _arguments(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Of `scaledot.vitals`. Sage's scores are those before it quantises them."""
    query, key = given["query"], given["key"]
    left, right = given.get("window_size", (-1, -1))
    return {
        "query": query.transpose(1, 2),
        "key": key.transpose(1, 2),
        "attn_mask": _mask(given.get("attn_mask"), query, key),
        "is_causal": given.get("is_causal", False),
        "causal_align": "bottom_right" if "flash" in name else "top_left",
        "scale": given.get("scale"),
        "enable_gqa": query.shape[2] != key.shape[2],
        "window": (None if left < 0 else left, None if right < 0 else right),
    }


def _mask(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Two dimensions are [batch, keys], as in the dispatcher's own normalisation."""
    if mask is not None and mask.dim() == 2 and mask.shape[-1] == key.shape[1]:
        return mask[:, None, None, :]
    return mask
