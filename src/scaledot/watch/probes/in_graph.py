"""The operators that the probes leave in a compiled graph: they write to a buffer, and look.

An operator whose result nobody uses is removed by the compiler; one that mutates a buffer stays.
Their bodies are plain Python and ask at run time whether the step is due, so the graph is one and
the same whatever the cadence. `look` and its twins take the arguments of `scaledot.vitals`,
traced; `took` takes vitals that the graph has computed already.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scaledot import functional
from scaledot.fields import COUNT_FIELDS, FLOAT_FIELDS
from scaledot.functional import Scale, Window
from scaledot.measure import Vitals
from scaledot.watch.probes import compiled
from scaledot.watch.probes.compiled import BUFFER, TAGS
from scaledot.watch.probes.scores import Scores, Source, nothing
from scaledot.watch.probes.seen import scale_of


def look(
    kind: str,
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: Scale = None,
    enable_gqa: bool = False,
    *,
    window: Window = None,
    causal_align: str = "top_left",
    softcap: float | None = None,
    sinks: Tensor | None = None,
    key_lengths: Tensor | None = None,
    num_heads: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    weight: Tensor | None = None,
) -> None:
    """`scaledot.vitals` of these, packed with cu_seqlens, additive with weight."""
    if compiled.already_seen():
        return
    if not plain(query):
        compiled.cannot_see(kind, "its query is not a plain tensor")
        return
    per_head = scale if isinstance(scale, Tensor) else None
    tensors = (query, key, attn_mask, per_head, sinks, key_lengths, cu_seqlens_q, cu_seqlens_k)
    left, right = (None, None) if window is None else window
    _observe(
        *(_apart(tensor) for tensor in (*tensors, weight)),
        BUFFER,
        compiled.site_of_call(torch.is_grad_enabled()),
        kind,
        is_causal,
        float(scale) if isinstance(scale, (int, float)) else None,
        scale if isinstance(scale, str) else "",
        enable_gqa,
        left,
        right,
        causal_align,
        softcap,
        num_heads,
    )


def took(kind: str, vitals: Vitals) -> None:
    """Vitals that the graph computes anyway."""
    _take(
        torch.stack([getattr(vitals, name) for name in FLOAT_FIELDS]),
        torch.stack([getattr(vitals, name) for name in COUNT_FIELDS]),
        BUFFER,
        compiled.site_of_call(torch.is_grad_enabled()),
        kind,
    )


def plain(query: Tensor) -> bool:
    """An operator of ours has no rule for subclasses: a DTensor would stop the compilation."""
    return type(query) in (Tensor, torch.nn.Parameter)


def _apart(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


@torch.library.custom_op("scaledot::watch", mutates_args=("buffer",), tags=TAGS)
def _observe(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    per_head: Tensor | None,
    sinks: Tensor | None,
    key_lengths: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    weight: Tensor | None,
    buffer: Tensor,
    site: int,
    kind: str,
    is_causal: bool,
    scale: float | None,
    rule: str,
    enable_gqa: bool,
    left: int | None,
    right: int | None,
    causal_align: str,
    softcap: float | None,
    num_heads: int | None,
) -> None:
    shared: dict[str, Any] = {
        "is_causal": is_causal,
        "scale": per_head if per_head is not None else rule or scale,
        "enable_gqa": enable_gqa,
        "window": None if left is None and right is None else (left, right),
        "causal_align": causal_align,
        "softcap": softcap,
        "sinks": sinks,
        "num_heads": num_heads,
    }
    measure: Callable[[], Vitals]
    source: Callable[[], Source | None] = nothing
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        packed = cu_seqlens_q, cu_seqlens_k

        def measure() -> Vitals:
            return functional.vitals_varlen(query, key, *packed, **shared)

    else:
        shared |= {"attn_mask": attn_mask, "key_lengths": key_lengths}
        if weight is None:
            scores = Scores(query, key, **shared)
            measure, source = scores.vitals, scores.itself
        else:

            def measure() -> Vitals:
                # Additive scores have no function without values; any values will do.
                found = functional.additive_attention_with_vitals(query, key, key, weight, **shared)
                return found[1]

    plain_scale = per_head is None and weight is None and not rule
    factor = scale_of(query, scale)
    compiled.offer(site, query, measure, kind, source, factor if plain_scale else None)


@torch.library.custom_op("scaledot::watch_vitals", mutates_args=("buffer",), tags=TAGS)
def _take(floats: Tensor, counts: Tensor, buffer: Tensor, site: int, kind: str) -> None:
    def vitals() -> Vitals:
        # The graph may use the memory again: what is kept is a copy.
        return Vitals.unpacked(floats.clone(), counts.clone())

    compiled.offer(site, floats, vitals, kind)


@_observe.register_fake
def _(*arguments: Any) -> None:
    return None


@_take.register_fake
def _(*arguments: Any) -> None:
    return None
