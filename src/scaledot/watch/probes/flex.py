"""FlexAttention, as it is and compiled.

A mask is a function there. Outside of a graph it is evaluated where a step is due. Inside it can
only be evaluated with the graph, in every step: one cheap operation a pair where attention itself
takes some thousand, but a byte a pair, so there is a limit. A score_mod may do anything to the
scores: such calls are named, not measured.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scaledot import functional
from scaledot.watch.probes import compiled, frames, hub, in_graph
from scaledot.watch.probes.patch import Swap, stands_for
from scaledot.watch.probes.replacing import KEPT, replaced
from scaledot.watch.probes.scores import Scores
from scaledot.watch.probes.seen import Seen, why_not

MODULE = "torch.nn.attention.flex_attention"
KIND = "flex_attention"
SCORE_MOD = "its score_mod may do anything to the scores"
LARGEST_MASK = 2**28  # bytes that a graph may spend on a mask in every step


def probes() -> tuple[Any, ...]:
    flex_attention = sys.modules[MODULE].flex_attention
    return (Swap((flex_attention, _probe(flex_attention))),)


def _probe(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @frames.invisible
    def flex_attention(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            if compiled.tracing():
                _look_in_graph(*args, **kwargs)
                if hub.replacing_in_graphs:
                    compiled.keeps_own(KIND, "it is inside torch.compile")
            return original(*args, **kwargs)
        replacing = hub.replacing()
        if not (replacing or hub.wants()):
            return original(*args, **kwargs)
        given = frames.given(signature, args, kwargs)
        if given is None:
            return original(*args, **kwargs)
        reason = ""
        if given.get("score_mod") is not None:
            reason = SCORE_MOD
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

            def scores() -> Scores:
                return Scores(*_query_key(given), **rest())

            hub.offer(Seen(given["query"], lambda: scores().vitals(), KIND, source=scores))
        return out

    return stands_for(original, flex_attention)


def _look_in_graph(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *args: Any,
    **kwargs: Any,
) -> None:
    """torch's own arguments, traced."""
    reason = SCORE_MOD if score_mod is not None else why_not_dense(block_mask, query, key)
    if reason:
        compiled.cannot_see(KIND, reason)
    elif not compiled.already_seen():
        mask = dense_mask(block_mask, query, key)
        in_graph.look(KIND, query, key, mask, scale=scale, enable_gqa=enable_gqa)


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


def why_not_dense(block_mask: Any, query: Tensor, key: Tensor) -> str:
    """Why a graph does not evaluate this mask; empty where it may."""
    if block_mask is None:
        return ""
    batch, heads = block_mask.shape[:2]
    if batch * heads * query.shape[-2] * key.shape[-2] > LARGEST_MASK:
        return f"inside torch.compile its mask would take more than {LARGEST_MASK >> 20} MiB a step"
    return ""
