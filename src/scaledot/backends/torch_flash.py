"""Call torch's CPU kernel with gradients that differentiate again.

torch differentiates its kernel once and refuses what comes after. Here its forward and backward
pass are the same two operators; only a second derivative, which they do not have, is ours.
"""

from typing import Any

import torch
from torch import Tensor

from scaledot.backends import derivatives
from scaledot.backends.inputs import Inputs
from scaledot.backends.operators import straight_apply
from scaledot.problem import Settings

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def is_needed(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Tell whether the call gets a graph, and would get it from that kernel."""
    return (
        torch.is_grad_enabled()
        and (query.requires_grad or key.requires_grad or value.requires_grad)
        and query.is_cpu
        and torch._C._get_flash_sdp_enabled()  # a user may ask for torch's own formula instead
    )


def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> Tensor:
    return _apply(query, key, value, causal, scale)


class Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
    ) -> Tensor:
        out, lse = _forward(query, key, value, 0.0, causal, scale=scale)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.settings = causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (grad_out,) = grads
        query, key, value, out, lse = ctx.saved_tensors
        inputs, settings = _inputs(query, key, value), _settings(*ctx.settings)
        if torch._C._functorch.is_legacy_batchedtensor(grad_out):  # its graph has operators only
            found = torch.ops.scaledot.cpu_backward(
                *inputs, *settings, grad_out, out, lse, *[False] * 4
            )
        elif derivatives.in_forward_mode():
            found = derivatives.gradients(None, inputs, settings, grad_out)
        else:
            run = _gradients if derivatives.is_last() else Gradients.apply
            found = run(query, key, value, grad_out, out, lse, *ctx.settings)
        return (*found[:3], None, None)


_apply = straight_apply(Attend)


class Gradients(torch.autograd.Function):
    """The backward pass as a node of its own, for a graph of the backward pass."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return _gradients(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        *tensors, _, _, causal, scale = inputs
        ctx.save_for_backward(*tensors)
        ctx.settings = causal, scale

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        query, key, value, grad_out = ctx.saved_tensors
        inputs, none = _inputs(query, key, value), (None,) * 4
        found, of_grad_out = derivatives.second_derivatives(
            None, inputs, _settings(*ctx.settings), grad_out, (*grads, *none)
        )
        return (*found[:3], of_grad_out, *none)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *arguments: Any) -> tuple[tuple, tuple]:
        *tensors, causal, scale = arguments
        size = info.batch_size
        folded = [
            (t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)).flatten(0, 1)
            for t, dim in zip(tensors, in_dims, strict=False)
        ]
        found = Gradients.apply(*folded, causal, scale)
        return tuple(grad.unflatten(0, (size, -1)) for grad in found), (0,) * len(found)


def _gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, ...]:
    return _backward(grad_out, query, key, value, out, lse, 0.0, causal, scale=scale)


def _inputs(query: Tensor, key: Tensor, value: Tensor) -> Inputs:
    return Inputs(query, key, value, *[None] * (len(Inputs._fields) - 3))


def _settings(causal: bool, scale: float) -> Settings:
    return Settings(scale, False, 0.0, 0.0, None, 0 if causal else None, False)
