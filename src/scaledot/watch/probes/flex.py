"""FlexAttention called as it is. Compiled, as it usually is, it is one kernel: named, not seen."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scaledot import functional
from scaledot.watch.probes import compiled, hub
from scaledot.watch.probes.patch import Swap
from scaledot.watch.probes.replacing import KEPT, replaced
from scaledot.watch.probes.seen import Seen, why_not

MODULE = "torch.nn.attention.flex_attention"
KIND = "flex_attention"


def probes() -> tuple[Any, ...]:
    flex_attention = sys.modules[MODULE].flex_attention
    return (Swap((flex_attention, _probe(flex_attention))),)


def _probe(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def flex_attention(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            if compiled.tracing():
                compiled.cannot_see(KIND, "it is inside torch.compile")
            return original(*args, **kwargs)
        replacing = hub.replacing()
        if not (replacing or hub.wants()):
            return original(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        reason = ""
        if given.get("score_mod") is not None:
            reason = "its score_mod may do anything to the scores"
        if replacing:
            out = _replaced(given, reason)
            if out is not KEPT:
                return out
        with hub.quiet():
            out = original(*args, **kwargs)
        if not hub.wants():
            return out
        if reason := why_not(given["query"]) or reason:
            hub.cannot_see(KIND, reason)
        else:
            rest = _rest(given)
            measure = functional.vitals
            hub.offer(Seen(given["query"], lambda: measure(*_query_key(given), **rest()), KIND))
        return out

    flex_attention.__doc__ = original.__doc__
    return flex_attention


def _replaced(given: dict[str, Any], reason: str) -> Any:
    if given.get("return_lse") or given.get("return_aux") is not None:
        reason = reason or "more than its output is asked for"
    rest, attend = _rest(given), functional.attention_with_vitals
    return replaced(
        given["query"],
        lambda: attend(*_query_key(given), given["value"], **rest()),
        KIND,
        reason=reason,
    )


def _query_key(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return given["query"], given["key"]


def _rest(given: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """The mask is as large as the scores, so it is made where it is needed."""
    return lambda: {
        "attn_mask": dense_mask(given.get("block_mask"), *_query_key(given)),
        "scale": given.get("scale"),
        "enable_gqa": given.get("enable_gqa", False),
    }


def dense_mask(block_mask: Any, query: Tensor, key: Tensor) -> Tensor | None:
    """What a BlockMask lets through, [batch, heads, Q, K], from the function it was made of."""
    if block_mask is None:
        return None
    from torch.nn.attention.flex_attention import create_mask

    batch, heads = block_mask.shape[:2]
    sizes = query.shape[-2], key.shape[-2]
    return create_mask(block_mask.mask_mod, batch, heads, *sizes, device=query.device)
