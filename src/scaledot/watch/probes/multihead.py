"""nn.MultiheadAttention and nn.TransformerEncoder, wherever they do not call torch's function.

With need_weights=False the module calls scaled_dot_product_attention, and that probe sees it. Left
are need_weights=True, which multiplies matrices in Python, and two evaluation fast paths, which
are one operator each. None of them shows its queries and keys: they are projected once more, by
the same operator from the same weights, only where a reading is due.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import has_torch_function

from scaledot.watch.probes import compiled, frames, hub, multihead_compiled, place
from scaledot.watch.probes.patch import Attribute, KnownToScript, Swap, stands_for
from scaledot.watch.probes.projection import Heads, Inputs, split
from scaledot.watch.probes.seen import Seen, why_not

IN_GRAPH = "nn.MultiheadAttention"
IN_PYTHON = "nn.MultiheadAttention with need_weights=True"
FAST_MODULE = "nn.MultiheadAttention's fast path"
FAST_LAYER = "nn.TransformerEncoderLayer's fast path"


def probes() -> tuple[Any, ...]:
    forward = F.multi_head_attention_forward
    native = torch._native_multi_head_attention
    layer = torch._transformer_encoder_layer_fwd
    fast = (
        ("_native_multi_head_attention", native, _fast(native, _native_heads, FAST_MODULE)),
        ("_transformer_encoder_layer_fwd", layer, _fast(layer, _layer_heads, FAST_LAYER)),
    )
    return (
        Swap((forward, _in_python(forward))),
        *(Attribute(torch, name, stand_in) for name, _, stand_in in fast),
        *(KnownToScript(known, stand_in, f"aten::{name}") for name, known, stand_in in fast),
    )


def _in_python(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @frames.invisible
    def multi_head_attention_forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            if compiled.tracing():
                multihead_compiled.look(*args, **kwargs)
                if hub.replacing_in_graphs:
                    compiled.keeps_own(IN_GRAPH, "torch.compile takes it whole")
            return original(*args, **kwargs)
        call = frames.caller(frames.user_frame())
        if not (hub.wants() or hub.replacing()) or _is_overridden(args, kwargs):
            return call(original, args, kwargs)
        try:
            arguments = signature.bind(*args, **kwargs)
        except TypeError:
            return call(original, args, kwargs)  # which says the same of itself
        arguments.apply_defaults()
        given = arguments.arguments
        if not given["need_weights"]:
            return call(original, args, kwargs)  # the other probe looks, and replaces
        if hub.replacing():
            hub.keeps_own(IN_PYTHON, "its weights are asked for: need_weights=True")
        if not hub.wants():
            return call(original, args, kwargs)
        with hub.quiet():
            out = call(original, args, kwargs)
        query = given["query"]
        if reason := why_not(query):
            hub.cannot_see(IN_PYTHON, reason)
        else:
            inputs = Inputs(given)
            hub.offer(Seen(query, inputs.vitals, IN_PYTHON, source=inputs.itself))
        return out

    return stands_for(original, multi_head_attention_forward)


def _is_overridden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a mode of torch.overrides or a tensor's type takes the call: it comes back here."""
    return has_torch_function((*args, *kwargs.values()))


def _fast(
    original: Callable[..., Any], heads: Callable[..., Heads], kind: str
) -> Callable[..., Any]:
    @frames.invisible
    def fast_path(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            out = original(*args, **kwargs)
        else:
            out = frames.caller(frames.user_frame())(original, args, kwargs)
        if torch.compiler.is_compiling():
            if compiled.tracing():
                compiled.cannot_see(kind, "it is inside torch.compile")
            return out
        if _is_overridden(args, kwargs):
            return out
        if hub.replacing():
            module = _attention_of_running_layer() if kind == FAST_LAYER else None
            hub.keeps_own(kind, "evaluation takes torch's fast path", module)
        if hub.wants():
            # nn.TransformerEncoder turns padded batches into nested ones here; we turn them back.
            reason = why_not(args[0])
            if reason and not args[0].is_nested:
                hub.cannot_see(kind, reason)
            else:
                module = _attention_of_running_layer() if kind == FAST_LAYER else None
                hub.offer(Seen(args[0], lambda: heads(*args, **kwargs).vitals(), kind, module))
        return out

    return stands_for(original, fast_path)


def _attention_of_running_layer() -> nn.Module | None:
    """The layer's operator never calls the layer's attention module, which is what is measured."""
    running = next(iter(place.here().modules), None)
    return running.self_attn if isinstance(running, nn.TransformerEncoderLayer) else None


def _native_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_heads: int,
    in_proj_weight: Tensor,
    in_proj_bias: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> Heads:
    """Batch first, query and key the same tensor; whatever is not zero in the mask hides."""
    return _fast_heads(query, num_heads, in_proj_weight, in_proj_bias, mask, mask_type)


def _layer_heads(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    in_proj_weight: Tensor,
    in_proj_bias: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight: Tensor,
    norm_bias: Tensor,
    *rest: Any,
) -> Heads:
    *_others, mask, mask_type = rest
    if norm_first:
        src = F.layer_norm(src, (embed_dim,), norm_weight, norm_bias, eps)
    return _fast_heads(src, num_heads, in_proj_weight, in_proj_bias, mask, mask_type)


def _fast_heads(
    source: Tensor,
    num_heads: int,
    in_proj_weight: Tensor,
    in_proj_bias: Tensor,
    mask: Tensor | None,
    mask_type: int | None,
) -> Heads:
    may_see = None
    if source.is_nested:
        # The sizes lie on the CPU, and nobody is to wait until they have arrived.
        lengths = source._nested_tensor_size()[:, 0].to(source.device, non_blocking=True)
        source = source.to_padded_tensor(0.0)
        tokens = torch.arange(source.shape[1], device=source.device)
        real = tokens[None] < lengths[:, None]  # [batch, tokens]
        # Tokens that are not there ask nothing either: their rows may see no key, and do not count.
        may_see = real[:, None, :, None] & real[:, None, None, :]
    elif mask is not None:
        may_see = ~mask.bool()
        if mask_type == 1:  # of keys, [batch, tokens]
            may_see = may_see[:, None, None, :]
    q_weight, k_weight, _value = in_proj_weight.chunk(3)
    q_bias, k_bias, _value = in_proj_bias.chunk(3)
    q = F.linear(source, q_weight, q_bias).transpose(0, 1)
    k = F.linear(source, k_weight, k_bias).transpose(0, 1)
    return Heads(split(q, num_heads), split(k, num_heads), may_see)
