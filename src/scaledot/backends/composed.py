"""Compute attention by plain torch operators that differentiate to any order, in both modes.

The kernels know their first derivatives. Second derivatives and forward mode come from this formula
instead, which holds all Q * K scores of a call (additive: all Q * K * D sums). It takes every
argument that the kernels take and hides what they hide: a pair that is not visible gets no value
and no derivative, whatever its key holds, and a row without a visible key is 0.
"""

import contextlib
import math
from typing import NamedTuple

import torch
from torch import Tensor

from scaledot.backends.inputs import Inputs
from scaledot.problem import Settings


class Scores(NamedTuple):
    """The scores of a call, [B, H, Q, K]."""

    scores: Tensor  # before the cap and without the bias
    arguments: Tensor  # what the softmax takes; -inf where hidden
    visible: Tensor | None  # bool, broadcastable; None: every row sees every key


def attend(inputs: Inputs, settings: Settings, keep: Tensor | None = None) -> Tensor:
    """Return the output [B, H, Q, V]; keep multiplies the probabilities: dropout."""
    query, value = inputs.query, inputs.value
    assert value is not None
    with exact(query):
        found = scores_of(inputs, settings)
        probability = softmax(inputs, found)[..., : found.arguments.shape[-1]]
        if keep is not None:
            probability = probability * keep
        value = _for_every_head(value, query).to(compute_type(query))
        if found.visible is None:
            return (probability @ value).to(query.dtype)
        finite = value.isfinite()
        out = probability @ torch.where(finite, value, 0.0)
        # 0 * NaN is NaN: a value that is not finite is counted where it is seen, not multiplied.
        seen = found.visible.to(value.dtype) @ (~finite).to(value.dtype)
        return (out * torch.where(seen > 0, math.nan, 1.0)).to(query.dtype)


def exact(query: Tensor) -> contextlib.AbstractContextManager[object]:
    """Keep autocast away from the formula, which chooses its own type."""
    device = query.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)


def compute_type(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def softmax(inputs: Inputs, found: Scores) -> Tensor:
    """Return the probabilities, [B, H, Q, K], or K + 1 where the last outcome is a learned sink.

    Rows that see no key are 0.
    """
    arguments, sinks = found.arguments, inputs.sinks
    blind = None
    if found.visible is not None:
        blind = ~found.visible.any(-1, keepdim=True)
        arguments = arguments.masked_fill(blind, 0.0)
    if sinks is not None:
        sinks = sinks.to(arguments.dtype)
        sinks = torch.where(sinks == math.inf, math.nan, sinks)[:, :, None, None]
        arguments = torch.cat([arguments, sinks.expand(*arguments.shape[:-1], 1)], -1)
    probability = arguments.softmax(-1)
    return probability if blind is None else probability.masked_fill(blind, 0.0)


def scores_of(inputs: Inputs, settings: Settings) -> Scores:
    """Compute the scores of all pairs and what the softmax takes of them."""
    query, key = inputs.query, inputs.key
    dtype = compute_type(query)
    visible = visible_pairs(inputs, settings)
    factor: float | Tensor = settings.scale
    if inputs.head_scale is not None:
        factor = inputs.head_scale.to(dtype)[:, :, None, None] * settings.scale
    elif settings.log_n:
        keys = key.shape[-2]
        count = query.new_full((1,), keys) if visible is None else visible.sum(-1, keepdim=True)
        factor = count.clamp(min=1).to(dtype).log() * settings.scale
    key = _for_every_head(key, query).to(dtype)
    query = query.to(dtype)
    scores = _scores(query, key, inputs.weight, factor)
    if visible is not None:  # a NaN that a derivative of 0 would meet is taken out of the product
        broken = scores.detach()
        clean = _scores(_clean(query, inputs), _clean(key, inputs), inputs.weight, factor)
        scores = torch.where(broken.isfinite(), clean, broken)
    arguments = scores
    if settings.softcap:
        arguments = settings.softcap * (scores / settings.softcap).tanh()
    mask = inputs.mask
    if mask is not None and mask.dtype != torch.bool:
        arguments = arguments + mask.masked_fill(mask == -math.inf, 0.0)
    if visible is not None:
        arguments = torch.where(visible, arguments, -math.inf)
    return Scores(scores, arguments, visible)


def _clean(tensor: Tensor, inputs: Inputs) -> Tensor:
    """Replace what is not finite by 0; the additive score bends an infinity to a number."""
    good = tensor.isfinite() if inputs.weight is None else ~tensor.isnan()
    return torch.where(good, tensor, 0.0)


def _scores(query: Tensor, key: Tensor, weight: Tensor | None, factor: float | Tensor) -> Tensor:
    if weight is None:
        return (query * factor) @ key.mT
    bent = (query.unsqueeze(-2) + key.unsqueeze(-3)).tanh()  # [B, H, Q, K, D]
    return (bent @ weight.to(query.dtype)[:, :, None, :, None]).squeeze(-1) * factor


def _for_every_head(tensor: Tensor, query: Tensor) -> Tensor:
    """Repeat keys or values of [B, G, ...] for the query heads that share them, [B, H, ...]."""
    groups, heads = tensor.shape[1], query.shape[1]
    return tensor if groups == heads else tensor.repeat_interleave(heads // max(groups, 1), 1)


def visible_pairs(inputs: Inputs, settings: Settings) -> Tensor | None:
    """Return which pairs enter the softmax, bool [B|1, H|1, Q|1, K|1]; None: all of them."""
    query, mask = inputs.query, inputs.mask
    visible = _by_position(inputs, settings)
    if mask is not None:
        allowed = mask if mask.dtype == torch.bool else mask != -math.inf
        visible = allowed if visible is None else visible & allowed
        return visible.expand(*visible.shape[:2], query.shape[-2], inputs.key.shape[-2])
    return visible


def _by_position(inputs: Inputs, settings: Settings) -> Tensor | None:
    left, right = settings.left, settings.right
    device = inputs.query.device
    queries, keys = inputs.query.shape[-2], inputs.key.shape[-2]
    packed = inputs.cu_seqlens_q is not None
    if left is None and right is None and inputs.key_lengths is None and not packed:
        return None
    row = torch.arange(queries, device=device).unsqueeze(-1)
    column = torch.arange(keys, device=device)
    if inputs.cu_seqlens_q is not None and inputs.cu_seqlens_k is not None:
        rows, columns = inputs.cu_seqlens_q.long(), inputs.cu_seqlens_k.long()
        sequence = (row >= rows[1:]).sum(-1, keepdim=True).clamp(max=max(len(rows) - 2, 0))
        next_one = sequence + (1 if len(rows) > 1 else 0)
        first, last = columns[sequence], columns[next_one]
        first_row, last_row = rows[sequence], rows[next_one]
    else:
        first, last = 0, torch.full((1, 1, 1, 1), keys, device=device)
        first_row, last_row = 0, queries
        if inputs.key_lengths is not None:
            last = inputs.key_lengths.long()[:, None, None, None]
    diagonal = row + (last - last_row if settings.bottom_right else first - first_row)
    visible = (column >= first) & (column < last)
    if left is not None:
        visible = visible & (column >= diagonal - left)
    if right is not None:
        visible = visible & (column <= diagonal + right)
    return visible[(None,) * (4 - visible.dim())]
