"""torch.nn.functional.scaled_dot_product_attention, under whatever name it was imported."""

from typing import Any

import torch
from torch import Tensor
from torch.jit import _builtins
from torch.nn import functional as F

from scaledot import functional
from scaledot.measure import Vitals
from scaledot.watch.probes import compiled, hub
from scaledot.watch.probes.patch import Swap
from scaledot.watch.probes.seen import Seen, why_not

KIND = "scaled_dot_product_attention"


def probes() -> tuple[Any, ...]:
    original = F.scaled_dot_product_attention
    replacement = _probe(original)
    return Swap((original, replacement)), _KnownToScript(replacement)


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
                compiled.look(query, key, attn_mask, is_causal, scale, enable_gqa)
        elif hub.replacing() and not why_not(query):
            return _replaced(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
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
    if reason := why_not(query):
        hub.cannot_see(KIND, reason)
        return

    def measure() -> Vitals:
        return functional.vitals(query, key, attn_mask, is_causal, scale, enable_gqa)

    hub.offer(Seen(query, measure, KIND))


def _replaced(query: Tensor, *arguments: Any) -> Tensor:
    with hub.quiet():
        out, vitals = functional.attention_with_vitals(query, *arguments)
    if hub.wants():
        hub.offer(Seen(query, lambda: vitals, KIND))
    return out


class _KnownToScript:
    """torch.jit.script knows builtins by identity: the stand-in is the same operator to it."""

    def __init__(self, replacement: Any) -> None:
        self._replacement = replacement

    def make(self, model: Any = None) -> None:
        table = _builtins._get_builtin_table()
        table[id(self._replacement)] = "aten::scaled_dot_product_attention"

    def undo(self) -> None:
        _builtins._get_builtin_table().pop(id(self._replacement), None)
