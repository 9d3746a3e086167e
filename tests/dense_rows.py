"""What a GPU kernel must give of each row, as dense float64 matrices of one `Inputs`, `Settings`.

`attend` is differentiable. It knows lengths, packed sequences and a given dropout pattern, and it
returns the planes of `scaledot.backends.cuda.statistics`.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from scaledot.backends.inputs import Inputs
from scaledot.problem import Settings


class Rows(NamedTuple):
    out: Tensor | None  # [B, H, Q, V]
    lse: Tensor  # [B, H, Q]
    planes: Tensor  # [9, B, H, Q]
    bad: Tensor  # [B, H, Q]: the row sees a logit that is not finite


def attend(inputs: Inputs, settings: Settings, keep: Tensor | None = None) -> Rows:
    """keep [B, H, Q, K]: what dropout multiplies each probability by."""
    query, key = inputs.query.double(), inputs.key.double()
    repeats = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(repeats, 1)
    positions, first = _positions(inputs, settings)
    seen, read, bias = positions, positions, query.new_zeros(())
    if inputs.mask is not None and inputs.mask.dtype == torch.bool:
        seen = read = positions & inputs.mask
    elif inputs.mask is not None:
        seen = positions & (inputs.mask != -math.inf)
        read = seen & ~(inputs.mask <= torch.finfo(inputs.mask.dtype).min / 2)
        bias = inputs.mask.double()
    shape = (*query.shape[:3], key.shape[2])
    seen, read, bias = seen.expand(shape), read.expand(shape), bias.expand(shape)

    factor: Tensor | float = settings.scale
    if inputs.head_scale is not None:
        factor = factor * inputs.head_scale.double()[:, :, None, None]
    if settings.log_n:
        factor = factor * seen.sum(-1, keepdim=True).clamp(min=1).double().log()
    scores = (query @ key.mT) * factor
    capped = settings.softcap * (scores / settings.softcap).tanh() if settings.softcap else scores
    # What is hidden does not exist: neither its number nor its gradient.
    argument = torch.where(seen, torch.where(seen, capped, 0) + torch.where(seen, bias, 0), -1e300)
    blind = ~seen.any(-1, keepdim=True)
    outcomes = argument
    if inputs.sinks is not None:
        sink = inputs.sinks.double()[:, :, None, None].expand(*shape[:3], 1)
        outcomes = torch.cat([argument, torch.where(sink == math.inf, math.nan, sink)], -1)
    if not outcomes.shape[-1]:
        outcomes = outcomes.new_full((*shape[:3], 1), -1e300)
    probability = torch.where(blind, 0.0, outcomes.softmax(-1))
    keys_only = probability[..., : shape[-1]] * seen
    lse = torch.where(blind[..., 0], -math.inf, outcomes.logsumexp(-1))
    out = None
    if inputs.value is not None:
        value = inputs.value.double().repeat_interleave(repeats, 1)
        out = (keys_only if keep is None else keys_only * keep) @ value
    z = torch.where(read, scores + bias, 0.0).detach()
    planes, bad = _planes(inputs, z, lse, probability, keys_only, read, first)
    return Rows(out, lse, planes, bad)


def _positions(inputs: Inputs, settings: Settings) -> tuple[Tensor, Tensor]:
    """Pairs that position allows [B, 1, Q, K], and each row's first key [B, Q] (K: none)."""
    batch, _, queries, _ = inputs.query.shape
    keys = inputs.key.shape[2]
    seen = torch.zeros(batch, 1, queries, keys, dtype=torch.bool)
    first = torch.full((batch, queries), keys)
    for b in range(batch):
        for row, row_end, key, key_end in _sequences(inputs, b):
            diagonal = key_end - row_end if settings.bottom_right else key - row
            i = torch.arange(row, row_end)[:, None]
            j = torch.arange(keys)[None, :]
            part = (j >= key) & (j < key_end) & (i >= 0)
            if settings.left is not None:
                part &= j >= i + diagonal - settings.left
            if settings.right is not None:
                part &= j <= i + diagonal + settings.right
            seen[b, 0, row:row_end] = part
            first[b, row:row_end] = key
    return seen.to(inputs.query.device), first.to(inputs.query.device)


def _sequences(inputs: Inputs, b: int) -> list[tuple[int, int, int, int]]:
    if inputs.cu_seqlens_q is not None and inputs.cu_seqlens_k is not None:
        rows, keys = inputs.cu_seqlens_q.tolist(), inputs.cu_seqlens_k.tolist()
        return list(zip(rows[:-1], rows[1:], keys[:-1], keys[1:], strict=True))
    length = inputs.key.shape[2] if inputs.key_lengths is None else int(inputs.key_lengths[b])
    return [(0, inputs.query.shape[2], 0, length)]


def _planes(
    inputs: Inputs,
    z: Tensor,
    lse: Tensor,
    probability: Tensor,
    keys_only: Tensor,
    read: Tensor,
    first: Tensor,
) -> tuple[Tensor, Tensor]:
    count = read.sum(-1)
    empty = count == 0
    bad = ~z.isfinite().all(-1) & ~empty
    if inputs.sinks is not None:
        bad |= ~(inputs.sinks.double()[:, :, None] < math.inf) & ~empty
    probability, keys_only = probability.detach(), keys_only.detach()
    padded = torch.nn.functional.pad(keys_only, (0, 1))  # a row of no sequence has no first key
    index = first[:, None, :, None].expand(*keys_only.shape[:3], 1)
    mean = z.sum(-1) / count.clamp(min=1)
    deviation = torch.where(read, z - mean[..., None], 0.0)
    lowest = torch.where(read, z, -math.inf)
    planes = torch.stack(
        [
            torch.nn.functional.pad(lowest, (0, 1), value=-math.inf).amax(-1),
            torch.where(empty, -math.inf, lse.detach()),
            torch.where(empty, 0.0, -torch.special.xlogy(probability, probability).sum(-1)),
            torch.where(empty, 0.0, padded.amax(-1)),
            torch.where(empty, 0.0, probability.square().sum(-1)),
            torch.where(empty, 0.0, padded.gather(-1, index)[..., 0]),
            count.double(),
            mean,
            deviation.square().sum(-1),
        ]
    )
    return planes, bad
