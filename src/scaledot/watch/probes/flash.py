"""The flash_attn package, called directly: [batch, tokens, heads, width], or packed tokens."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scaledot import functional
from scaledot.measure import Vitals
from scaledot.watch.probes import compiled, hub
from scaledot.watch.probes.patch import Swap
from scaledot.watch.probes.seen import Seen, why_not

MODULE = "flash_attn.flash_attn_interface"
FUNCTIONS = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_qkvpacked_func")


def probes() -> tuple[Any, ...]:
    home = vars(sys.modules[MODULE])
    found = [home[name] for name in FUNCTIONS if name in home]
    return (Swap(*((original, _probe(original)) for original in found)),)


def _probe(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)
    kind = f"flash_attn.{original.__name__}"

    def attention(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            if compiled.tracing():
                compiled.cannot_see(kind, "it is inside torch.compile")
            return original(*args, **kwargs)
        if not hub.wants():
            return original(*args, **kwargs)
        with hub.quiet():
            out = original(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        query, key = given["qkv"].unbind(2)[:2] if "qkv" in given else (given["q"], given["k"])
        reason = why_not(query)
        for name in ("alibi_slopes", "block_table"):
            if given.get(name) is not None:
                reason = reason or f"the watch does not follow {name}"
        if reason:
            hub.cannot_see(kind, reason)
        else:
            hub.offer(Seen(query, lambda: _vitals(query, key, given), kind))
        return out

    attention.__doc__ = original.__doc__
    return attention


def _vitals(query: Tensor, key: Tensor, given: dict[str, Any]) -> Vitals:
    """Causality and window are counted from the last key; -1 means no limit, a cap of 0 no cap."""
    left, right = given.get("window_size", (-1, -1))
    shared: dict[str, Any] = {
        "is_causal": given.get("causal", False),
        "causal_align": "bottom_right",
        "scale": given.get("softmax_scale"),
        "enable_gqa": query.shape[-2] != key.shape[-2],
        "window": (left if left >= 0 else None, right if right >= 0 else None),
        "softcap": given.get("softcap") or None,
    }
    if "cu_seqlens_q" in given:
        return functional.vitals_varlen(
            query, key, given["cu_seqlens_q"], given["cu_seqlens_k"], **shared
        )
    return functional.vitals(query.transpose(1, 2), key.transpose(1, 2), **shared)
