"""Run torch's own CPU flash backward on our (out, lse), where it is right."""

import math

import torch
from torch import Tensor

from scaledot.backends import logit_bound
from scaledot.backends.inputs import Inputs
from scaledot.problem import Settings


def can_serve_backward(inputs: Inputs, settings: Settings) -> bool:
    """Plain or causal, one key head a query head, finite and not far from 0: what it gets right."""
    query, key, value = inputs.query, inputs.key, inputs.value
    causal = settings.right == 0 and (not settings.bottom_right or query.shape[-2] == key.shape[-2])
    return (
        value is not None
        and inputs[3:] == (None,) * len(inputs[3:])
        and settings.dropout_p == 0.0
        and not settings.log_n
        and not settings.softcap
        and settings.scale > 0.0
        and settings.left is None
        and (settings.right is None or causal)
        and query.shape[1] == key.shape[1]
        and query.shape[-1] == value.shape[-1]
        and all(size > 0 for size in (*query.shape, *key.shape))
        and logit_bound.within(query, key, settings.scale, logit_bound.TORCH_IS_RIGHT_TO)
        and all(math.isfinite(tensor.sum().item()) for tensor in (key, value))
    )


def backward(
    inputs: Inputs, settings: Settings, grad_out: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    assert inputs.value is not None
    # The kernel reads last dimensions as contiguous, whatever their stride.
    query, key, value, out, grad_out = (
        tensor if tensor.stride(-1) == 1 else tensor.contiguous()
        for tensor in (inputs.query, inputs.key, inputs.value, out, grad_out)
    )
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out,
        query,
        key,
        value,
        out,
        lse,
        0.0,
        settings.right == 0,
        attn_mask=None,
        scale=settings.scale,
    )
