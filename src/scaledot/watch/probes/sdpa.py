"""torch.nn.functional.scaled_dot_product_attention, under whatever name it was imported."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from scaledot import functional
from scaledot.measure import Vitals
from scaledot.watch.probes import compiled, hub, in_graph, sharded
from scaledot.watch.probes.patch import KnownToScript, Swap
from scaledot.watch.probes.replacing import KEPT, replaced
from scaledot.watch.probes.seen import Seen, why_not

KIND = "scaled_dot_product_attention"


def probes() -> tuple[Any, ...]:
    original = F.scaled_dot_product_attention
    replacement = _probe(original)
    known = KnownToScript(replacement, "aten::scaled_dot_product_attention")
    return Swap((original, replacement)), known


def _probe(original: Any) -> Any:
    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if torch.compiler.is_compiling():
            if compiled.tracing():
                if hub.replacing_in_graphs and in_graph.plain(query):
                    return functional.attention_with_vitals(
                        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
                    )[0]  # the probe of scaledot's own functions takes the vitals
                in_graph.look(KIND, query, key, attn_mask, is_causal, scale, enable_gqa)
        elif hub.replacing():
            arguments = (attn_mask, dropout_p, is_causal, scale, enable_gqa)
            out = replaced(
                query,
                lambda: functional.attention_with_vitals(query, key, value, *arguments),
                KIND,
            )
            if out is not KEPT:
                return out
        out = original(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        if not torch.compiler.is_compiling() and hub.wants():
            _look(query, key, attn_mask, is_causal, scale, enable_gqa)
        return out

    scaled_dot_product_attention.__doc__ = original.__doc__
    return scaled_dot_product_attention


def _look(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> None:
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

    def measure() -> Vitals:
        return functional.vitals(query, key, attn_mask, is_causal, scale, enable_gqa)

    hub.offer(Seen(query, measure, KIND))
