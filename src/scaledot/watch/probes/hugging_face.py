"""transformers 5: the attention functions of its registry.

Models ask `AttentionInterface.get_interface(name, eager)` at every forward pass. What it returns is
wrapped; the names, and with them the masks that transformers makes for each name, stay as they
are. A new name without a mask function of its own would silently lose the mask.

"sdpa" calls torch's function, where the other probe sees exactly what is computed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from scaledot import functional
from scaledot.measure import Vitals
from scaledot.watch.probes import compiled, hub
from scaledot.watch.probes.patch import Attribute
from scaledot.watch.probes.seen import Seen, why_not

MODULE = "transformers.modeling_utils"


def probes() -> tuple[Any, ...]:
    from transformers.modeling_utils import AttentionInterface

    original = vars(AttentionInterface)["get_interface"]

    def get_interface(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Any:
        attend = original(self, attn_implementation, default)
        if attn_implementation is not None and attn_implementation.endswith("sdpa"):
            return attend
        if torch.compiler.is_compiling():
            if compiled.tracing():
                kind = "transformers' eager or flash attention"
                compiled.cannot_see(kind, "it is inside torch.compile")
            return attend
        if not hub.wants():
            return attend
        return _probe(attend, attn_implementation or "eager")

    return (Attribute(AttentionInterface, "get_interface", get_interface),)


def _probe(attend: Callable[..., Any], name: str) -> Callable[..., Any]:
    kind = f"transformers' {name} attention"

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        with hub.quiet():
            out = attend(module, query, key, value, attention_mask, *args, **kwargs)
        reason = why_not(query) or _why_not_read(name, attention_mask, args)
        if reason:
            hub.cannot_see(kind, reason, module)
        else:
            read = _flash_vitals if name.startswith("flash_attention") else _eager_vitals

            def measure() -> Vitals:
                return read(module, query, key, attention_mask, **kwargs)

            hub.offer(Seen(query, measure, kind, module))
        return out

    return attention


def _why_not_read(name: str, attention_mask: Any, args: tuple[Any, ...]) -> str:
    if name != "eager" and not name.startswith("flash_attention"):
        return f"the watch does not know what {name!r} computes"
    if not isinstance(attention_mask, Tensor | None):
        return f"its mask is a {type(attention_mask).__name__}"
    if args:
        return "it was given arguments without their names"
    return ""


def _eager_vitals(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> Vitals:
    """softmax(cap(q k^T * scaling) + mask): windows and packed sequences are in the mask."""
    bias = None if attention_mask is None else attention_mask[..., : key.shape[-2]]
    if position_bias is not None:
        bias = position_bias if bias is None else position_bias + _as_bias(bias, position_bias)
    return functional.vitals(
        query,
        key,
        bias,
        scale=_scale(module, query, scaling),
        enable_gqa=key.shape[1] != query.shape[1],
        softcap=softcap,
        sinks=s_aux,
    )


def _flash_vitals(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **_: Any,
) -> Vitals:
    """flash_attn's own rules: aligned to the last key, a window, padding as [batch, keys]."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    queries, keys = query.shape[-2], key.shape[-2]
    windowed = sliding_window is not None and keys > sliding_window
    shared: dict[str, Any] = {
        "is_causal": causal and queries > 1,
        "scale": _scale(module, query, scaling),
        "enable_gqa": key.shape[1] != query.shape[1],
        "window": (sliding_window - 1, 0 if causal else sliding_window - 1) if windowed else None,
        "causal_align": "bottom_right",
        "softcap": softcap,
        "sinks": s_aux,
    }
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        rows, columns = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key))
        return functional.vitals_varlen(rows, columns, cu_seq_lens_q, cu_seq_lens_k, **shared)
    mask = None
    if attention_mask is not None:
        real = attention_mask.bool()
        mask = real[:, None, None, :] & real[:, None, -queries:, None]  # padding asks nothing
    return functional.vitals(query, key, mask, **shared)


def _scale(module: nn.Module, query: Tensor, scaling: float | None) -> float:
    if scaling is not None:
        return scaling
    return getattr(module, "head_dim", query.shape[-1]) ** -0.5


def _as_bias(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(~mask, -torch.inf)
