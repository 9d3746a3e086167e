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
from scaledot.watch.probes import compiled, hub
from scaledot.watch.probes.flex import dense_mask
from scaledot.watch.probes.patch import Attribute
from scaledot.watch.probes.replacing import KEPT, replaced
from scaledot.watch.probes.seen import Seen, why_not

MODULE = "transformers.modeling_utils"
Attend = Callable[..., Any]
AGREEMENT = 16  # roundings of the type by which the model's own eager attention may differ


def probes() -> tuple[Any, ...]:
    from transformers.modeling_utils import AttentionInterface

    original = vars(AttentionInterface)["get_interface"]
    trials = Trials()

    def get_interface(self: Any, attn_implementation: str, default: Attend) -> Any:
        attend = original(self, attn_implementation, default)
        if attn_implementation is not None and attn_implementation.endswith("sdpa"):
            return attend
        if torch.compiler.is_compiling():
            if compiled.tracing():
                kind = "transformers' eager or flash attention"
                compiled.cannot_see(kind, "it is inside torch.compile")
            return attend
        if not (hub.wants() or hub.replacing()):
            return attend
        return _probe(attend, attn_implementation or "eager", trials)

    return (Attribute(AttentionInterface, "get_interface", get_interface),)


def _probe(attend: Attend, name: str, trials: "Trials") -> Attend:
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
        reason = _why_not_read(name, attention_mask, args)
        read = _flash_call if name.startswith("flash_attention") else _eager_call

        def call(value: Tensor | None, dropout: float = 0.0) -> Any:
            rest: dict[str, Any] = {**kwargs, "dropout": dropout}
            return read(module, query, key, value, attention_mask, **rest)

        if hub.replacing():
            dropout = kwargs.get("dropout", 0.0)
            why = reason or _why_own(module, kwargs)
            if not why and name == "eager":
                inputs = (query, key, value, attention_mask)
                why = trials.why_not(attend, module, inputs, kwargs, lambda: call(value))
            out = replaced(query, lambda: call(value, dropout), kind, module, reason=why)
            if out is not KEPT:
                return out, None
        with hub.quiet():
            out = attend(module, query, key, value, attention_mask, *args, **kwargs)
        if not hub.wants():
            return out
        if reason := why_not(query) or reason:
            hub.cannot_see(kind, reason, module)
        else:
            hub.offer(Seen(query, lambda: call(None), kind, module))
        return out

    return attention


def _why_not_read(name: str, attention_mask: Any, args: tuple[Any, ...]) -> str:
    known = name in ("eager", "flex_attention") or name.startswith("flash_attention")
    if not known:
        return f"the watch does not know what {name!r} computes"
    is_block_mask = name == "flex_attention" and hasattr(attention_mask, "mask_mod")
    if not (isinstance(attention_mask, Tensor | None) or is_block_mask):
        return f"its mask is a {type(attention_mask).__name__}"
    if args:
        return "it was given arguments without their names"
    return ""


def _why_own(module: nn.Module, kwargs: dict[str, Any]) -> str:
    """The weights are asked for: by argument, by configuration, or by the recorder of outputs."""
    config = getattr(module, "config", None)
    asked = kwargs.get("output_attentions") or getattr(config, "output_attentions", False)
    try:
        from transformers.utils.output_capturing import _active_collector

        asked = asked or any("attentions" in name for name in _active_collector.get() or ())
    except ImportError:
        pass
    return "its weights are asked for: output_attentions=True" if asked else ""


class Trials:
    """Each model may bring an eager attention of its own, of which only the signature is known.

    The first call of each, without dropout, is computed both ways and compared.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Attend, type[nn.Module]], str] = {}

    def why_not(
        self,
        attend: Attend,
        module: nn.Module,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
        ours: Callable[[], Any],
    ) -> str:
        key = attend, type(module)
        if key not in self._known:
            try:
                with torch.no_grad(), hub.quiet():
                    theirs = attend(module, *inputs, **{**kwargs, "dropout": 0.0})[0]
                    same = _agree(theirs, ours()[0])
                self._known[key] = "" if same else "its eager attention computes something else"
            except Exception as error:
                self._known[key] = f"{type(error).__name__}: {error}"
        return self._known[key]


def _agree(theirs: Tensor, ours: Tensor) -> bool:
    """Where theirs is a number: a row without a key is NaN in some of them."""
    if theirs.shape != ours.shape:
        return False
    tolerance = AGREEMENT * torch.finfo(theirs.dtype).eps
    there = theirs.isfinite()
    theirs, ours = theirs[there].float(), ours[there].float()
    size = theirs.abs().amax() if len(theirs) else theirs.new_ones(())
    return bool((theirs - ours).abs().le(tolerance * (1 + size)).all())


def _eager_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> Any:
    """softmax(cap(q k^T * scaling) + mask): windows and packed sequences are in the mask."""
    if isinstance(attention_mask, Tensor):
        bias = attention_mask[..., : key.shape[-2]]
    else:
        bias = dense_mask(attention_mask, query, key)
    if position_bias is not None:
        bias = position_bias if bias is None else position_bias + _as_bias(bias, position_bias)
    shared: dict[str, Any] = {
        "attn_mask": bias,
        "scale": _scale(module, query, scaling),
        "enable_gqa": key.shape[1] != query.shape[1],
        "softcap": softcap,
        "sinks": s_aux,
    }
    return _computed(query, key, value, dropout if module.training else 0.0, shared)


def _flash_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **_: Any,
) -> Any:
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
        lengths = cu_seq_lens_q, cu_seq_lens_k
        rows, columns = _packed(query), _packed(key)
        if value is None:
            return functional.vitals_varlen(rows, columns, *lengths, **shared)
        out, vitals = functional.attention_varlen_with_vitals(
            rows, columns, _packed(value), *lengths, dropout_p=dropout, **shared
        )
        return out.unflatten(0, (query.shape[0], -1)), vitals
    if attention_mask is not None:
        real = attention_mask.bool()
        # Padding asks nothing.
        shared["attn_mask"] = real[:, None, None, :] & real[:, None, -queries:, None]
    return _computed(query, key, value, dropout, shared)


def _computed(
    query: Tensor, key: Tensor, value: Tensor | None, dropout: float, shared: dict[str, Any]
) -> Any:
    """The vitals or, with values, the output [batch, tokens, heads, width] and the vitals."""
    if value is None:
        return functional.vitals(query, key, **shared)
    out, vitals = functional.attention_with_vitals(query, key, value, dropout_p=dropout, **shared)
    return out.transpose(1, 2).contiguous(), vitals


def _packed(tensor: Tensor) -> Tensor:
    """[batch, heads, tokens, width] -> [batch * tokens, heads, width]"""
    return tensor.transpose(1, 2).flatten(0, 1)


def _scale(module: nn.Module, query: Tensor, scaling: float | None) -> float:
    if scaling is not None:
        return scaling
    return getattr(module, "head_dim", query.shape[-1]) ** -0.5


def _as_bias(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(~mask, -torch.inf)
