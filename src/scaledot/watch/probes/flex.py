"""FlexAttention called as it is. Compiled, as it usually is, it is one kernel: named, not seen."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

from scaledot import functional
from scaledot.measure import Vitals
from scaledot.watch.probes import compiled, hub
from scaledot.watch.probes.patch import Swap
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
        if not hub.wants():
            return original(*args, **kwargs)
        with hub.quiet():
            out = original(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        reason = why_not(given["query"])
        if given.get("score_mod") is not None:
            reason = reason or "its score_mod may do anything to the scores"
        if reason:
            hub.cannot_see(KIND, reason)
        else:
            hub.offer(Seen(given["query"], lambda: _vitals(**given), KIND))
        return out

    flex_attention.__doc__ = original.__doc__
    return flex_attention


def _vitals(
    query: Any,
    key: Any,
    value: Any,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    **_: Any,
) -> Vitals:
    mask = None
    if block_mask is not None:
        from torch.nn.attention.flex_attention import create_mask

        batch, heads = block_mask.shape[:2]
        sizes = query.shape[-2], key.shape[-2]
        mask = create_mask(block_mask.mask_mod, batch, heads, *sizes, device=query.device)
    return functional.vitals(query, key, mask, scale=scale, enable_gqa=enable_gqa)
