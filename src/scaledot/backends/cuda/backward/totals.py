"""What is left to torch: gradients of one number a head, and those of calls without pairs."""

import math

import torch
from torch import Tensor

from scaledot.backends.inputs import Gradients, Inputs, Wanted
from scaledot.problem import Settings


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


def sums_to_zero(inputs: Inputs, settings: Settings) -> bool:
    """Whether each row's dS does, and its pivot is a score's argument without any bias."""
    unbiased = inputs.mask is None or inputs.mask.dtype == torch.bool
    return unbiased and inputs.sinks is None and not settings.softcap


def scale_gradient(scale: Tensor | None, sums: Tensor, settings: Settings, centred: bool) -> Tensor:
    """Sum dS q . k of all pairs, by head; sums [4, B, H, Q]: the rows' Scales.

    delta was taken from an output of fewer digits, so dS sum to a rest that is not 0. Where they
    should, each row's share of it is P, and takes what P has of the scores along.
    """
    product, rest, shift, total = sums
    if centred:
        product = product - torch.where(total > 0.0, rest * shift / total, 0.0)
    return summed_to(scale, product.sum(-1) * settings.scale)


def sink_gradient(sinks: Tensor | None, pivot: Tensor, above: Tensor, delta: Tensor) -> Tensor:
    """-sum_i p_sink,i delta_i; in rows that see no key the pivot is +inf, and p_sink 0."""
    assert sinks is not None
    sinks2 = sinks.to(pivot.dtype).unsqueeze(-1) * math.log2(math.e)
    each = -((sinks2 - pivot - above).exp2() * delta).sum(-1)  # [B, H]
    return summed_to(sinks, each)
