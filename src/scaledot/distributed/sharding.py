"""Cutting a whole tensor into a rank's shard, and putting the shards together again."""

from typing import Any

import torch
from torch import Tensor

from scaledot.distributed.group import Ranks, all_bytes, all_numbers, ranks_of
from scaledot.distributed.layout import cut, of_lengths, tokens_of


def shard(tensor: Tensor, mesh: Any, dim: int, layout: str = "contiguous") -> Tensor:
    """This rank's part of a tensor that every rank holds, cut along its tokens, dimension `dim`.

    Differentiable; the shards of an uneven sequence differ in length by one or two.
    """
    ranks = ranks_of(mesh)
    own = cut(tensor.shape[dim], ranks.size, layout)[ranks.rank]
    return torch.cat([tensor.narrow(dim, start, length) for start, length in own], dim)


def unshard(local: Tensor, mesh: Any, dim: int, layout: str = "contiguous") -> Tensor:
    """The whole tensor on every rank, from the shards of all; carries no graph."""
    ranks = ranks_of(mesh)
    numbers = all_numbers(ranks, (local.shape[dim],), local.device)
    return _together(local.detach(), ranks, dim, layout, [length for (length,) in numbers])


def _together(local: Tensor, ranks: Ranks, dim: int, layout: str, lengths: list[int]) -> Tensor:
    shards = of_lengths(lengths, layout, "tokens")
    front = local.movedim(dim, 0)
    padded = front.new_zeros(max(lengths), *front.shape[1:])
    padded[: front.shape[0]] = front
    everybodys = all_bytes(ranks, padded)
    whole = front.new_empty(sum(lengths), *front.shape[1:])
    for rank, segments in enumerate(shards):
        parts = everybodys[rank, : tokens_of(segments)].split([s.length for s in segments])
        for segment, part in zip(segments, parts, strict=True):
            whole[segment.start : segment.start + segment.length] = part
    return whole.movedim(0, dim)
