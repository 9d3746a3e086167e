"""What is left to torch: gradients of one number a head, and those of calls without pairs."""

import math

import torch
from torch import Tensor

from scaledot.backends.inputs import Gradients, Inputs, Wanted


def no_pairs(inputs: Inputs, wanted: Wanted) -> Gradients:
    """No pair of a query and a key exists: every gradient is 0."""
    asked = (True, True, True, *wanted)
    tensors = (*inputs[:3], inputs.mask, inputs.head_scale, inputs.sinks, inputs.weight)
    return Gradients._make(
        torch.zeros_like(tensor) if want and tensor is not None else None
        for tensor, want in zip(tensors, asked, strict=True)
    )


def summed_to(tensor: Tensor | None, each: Tensor) -> Tensor:
    """What belongs to each batch entry, summed to the shape of the tensor that they share."""
    assert tensor is not None
    return each.sum_to_size(tensor.shape).to(tensor.dtype)


def sink_gradient(sinks: Tensor | None, lse: Tensor, delta: Tensor) -> Tensor:
    """-sum_i p_sink,i delta_i; rows that see no key have no part in it."""
    assert sinks is not None
    p_sink = (sinks.to(lse.dtype).unsqueeze(-1) - lse).exp()
    each = -(p_sink * delta).masked_fill(lse == -math.inf, 0.0).sum(-1)  # [B, H]
    return summed_to(sinks, each)
