"""nn.MultiheadAttention inside torch.compile.

Dynamo takes torch.nn.functional.multi_head_attention_forward whole, so nothing inside it can be
traced. The operator beside it takes the module's inputs and projects them where a step is due.
"""

from types import CodeType
from typing import Any

import torch
from torch import Tensor

from scaledot.watch.probes import compiled
from scaledot.watch.probes.projection import Inputs

KIND = "nn.MultiheadAttention"
OPERATOR = "watch_multihead"


def reads(caller: CodeType) -> bool:
    """Tell whether torch's function is called by a graph that has the operator beside it.

    backend="eager" runs a graph as Python, and finds the function's stand-in under its name.
    """
    return OPERATOR in caller.co_names


def look(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> None:
    """The arguments of torch's function, traced: leaves the operator in the graph."""
    tensors = (
        query,
        key,
        in_proj_weight,
        in_proj_bias,
        bias_k,
        q_proj_weight,
        k_proj_weight,
        static_k,
        key_padding_mask,
        attn_mask,
    )
    apart = [None if tensor is None else tensor.detach() for tensor in tensors]
    site = compiled.site_of_call(torch.is_grad_enabled())
    _observe(*apart, compiled.BUFFER, site, num_heads, add_zero_attn, use_separate_proj_weight)


@torch.library.custom_op(f"scaledot::{OPERATOR}", mutates_args=("buffer",), tags=compiled.TAGS)
def _observe(
    query: Tensor,
    key: Tensor,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    q_proj_weight: Tensor | None,
    k_proj_weight: Tensor | None,
    static_k: Tensor | None,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    buffer: Tensor,
    site: int,
    num_heads: int,
    add_zero_attn: bool,
    use_separate_proj_weight: bool,
) -> None:
    heads: dict[str, Any] = {
        "query": query,
        "key": key,
        "num_heads": num_heads,
        "in_proj_weight": in_proj_weight,
        "in_proj_bias": in_proj_bias,
        "bias_k": bias_k,
        "add_zero_attn": add_zero_attn,
        "key_padding_mask": key_padding_mask,
        "attn_mask": attn_mask,
        "use_separate_proj_weight": use_separate_proj_weight,
        "q_proj_weight": q_proj_weight,
        "k_proj_weight": k_proj_weight,
        "static_k": static_k,
    }
    inputs = Inputs(heads)
    compiled.offer(site, query, inputs.vitals, KIND, inputs.itself)


@_observe.register_fake
def _(*arguments: Any) -> None:
    return None
