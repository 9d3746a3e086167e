"""Whom we are compared with on a GPU: cuDNN and FlashAttention-2 through torch, FlashAttention-4.

torch's kernels are called as its `scaled_dot_product_attention` calls them once it has chosen: by
the operator's name there is no choice to make and none to go wrong. FlexAttention is in flex.py.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scaledot.bench.workload import Answer, Inputs


def cudnn(inputs: Inputs) -> Answer:
    query, key, value, _, causal, _ = inputs
    out, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query,
        key,
        value,
        attn_bias=None,
        compute_log_sumexp=query.requires_grad,  # as torch asks for it
        is_causal=causal,
    )
    return Answer(out, None)


def flash(inputs: Inputs) -> Answer:
    query, key, value, _, causal, _ = inputs
    out, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, is_causal=causal
    )
    return Answer(out, None)


def flash_4(inputs: Inputs) -> Answer:
    """Inputs as `tokens_first` lays them out: the transposition costs nothing."""
    query, key, value = (tensor.transpose(1, 2) for tensor in inputs[:3])  # [B, n, H, D]
    out = _flash_4()(query, key, value, causal=inputs.causal)
    out = out[0] if isinstance(out, tuple) else out  # some versions add the log of the sum
    return Answer(out.transpose(1, 2), None)


def tokens_first(inputs: Inputs) -> Inputs:
    """The same tensors, [B, n, H, D] in memory: the layout that FlashAttention is made for."""

    def laid_out(tensor: Tensor) -> Tensor:
        moved = tensor.detach().transpose(1, 2).contiguous().transpose(1, 2)
        return moved.requires_grad_(tensor.requires_grad)

    query, key, value = (laid_out(tensor) for tensor in inputs[:3])
    grad = None if inputs.grad is None else laid_out(inputs.grad)
    return inputs._replace(query=query, key=key, value=value, grad=grad)


def cudnn_forward_backward(inputs: Inputs) -> Answer:
    return _with_gradients(cudnn(inputs), inputs)


def flash_4_forward_backward(inputs: Inputs) -> Answer:
    return _with_gradients(flash_4(inputs), inputs)


def output_alone(inputs: Inputs) -> Answer:
    """Computes nothing: the memory that a result needs whoever makes it."""
    torch.empty_like(inputs.query)
    return Answer(None, None)


def _with_gradients(answer: Answer, inputs: Inputs) -> Answer:
    assert answer.out is not None
    return answer._replace(gradients=torch.autograd.grad(answer.out, inputs[:3], inputs.grad))


@functools.cache
def _flash_4() -> Callable[..., Any]:
    from flash_attn.cute import flash_attn_func  # pyrefly: ignore[missing-import]

    if "causal" not in inspect.signature(flash_attn_func).parameters:
        raise TypeError("flash_attn.cute.flash_attn_func takes no argument causal")
    return flash_attn_func
