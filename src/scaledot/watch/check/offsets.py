"""How much of a head's weight lies at a fixed distance from the query, exactly, without a matrix.

p_ij = exp(c_ij + bias_ij - lse_i). A distance names one key a row, so it costs one dot product a
row: O(n d), where the whole matrix would be O(n^2).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from scaledot.problem import Problem

OFFSETS = (-3, -2, -1, 0, 1, 2, 3)  # keys after the query; -1 is the previous token


class Weights(NamedTuple):
    """Sums over the rows that may see the key at each offset, and their number, [O, heads]."""

    total: Tensor
    rows: Tensor

    def merge(self, other: "Weights") -> "Weights":
        return Weights(self.total + other.total, self.rows + other.rows)

    def of_heads(self, heads: int) -> Tensor:
        """Mean probabilities [O, heads]; [batch * heads] is folded as the watch folds it."""
        total, rows = (part.reshape(len(OFFSETS), -1, heads).sum(1) for part in self)
        return total / rows.clamp(min=1)


class Offset(NamedTuple):
    """The offset that a head looks at most, and the mean probability there."""

    offset: int
    weight: float

    def __str__(self) -> str:
        near = {-1: "previous token", 0: "own token", 1: "next token"}
        side = "back" if self.offset < 0 else "ahead"
        return near.get(self.offset, f"{abs(self.offset)} tokens {side}")


def why_not(problem: Problem) -> str:
    """Why offsets mean nothing here, or are not known; empty where they are."""
    if problem.cu_seqlens_q is not None:
        return "its sequences are packed"
    if problem.weight is not None:
        return "its score is additive"
    if problem.settings.log_n:
        return "its scale changes from row to row"
    if problem.key_lengths is not None and problem.settings.bottom_right:
        return "every sequence of the batch has a diagonal of its own"
    if problem.query.shape[-2] != problem.key.shape[-2] and not problem.settings.bottom_right:
        return "queries and keys are not of the same sequence"
    return ""


def weights_of(problem: Problem, lse: Tensor) -> Weights:
    """lse: of every row, [..., Q], as `per_row` measured it."""
    lse = lse.reshape(problem.query.shape[:3])
    parts = [_at(problem, lse, offset) for offset in OFFSETS]
    return Weights(*(torch.stack(column) for column in zip(*parts, strict=True)))


def _at(problem: Problem, lse: Tensor, offset: int) -> tuple[Tensor, Tensor]:
    """Sum of the probabilities at one offset, and the number of rows, [heads]."""
    settings = problem.settings
    queries, keys = problem.query.shape[-2], problem.key.shape[-2]
    shift = offset + (keys - queries if settings.bottom_right else 0)
    first, last = max(0, -shift), min(queries, keys - shift)
    if first >= last or _outside_window(offset, settings.left, settings.right):
        nothing = lse.new_zeros(lse.shape[1], dtype=torch.float64)
        return nothing, nothing
    query = problem.query[:, :, first:last].double()
    key = problem.key[:, :, first + shift : last + shift].double()
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    logit = (query * key).sum(-1) * settings.scale  # [B, H, rows]
    if problem.head_scale is not None:
        logit = logit * problem.head_scale.double().unsqueeze(-1)
    if settings.softcap:
        logit = settings.softcap * (logit / settings.softcap).tanh()
    normaliser = lse[:, :, first:last].double()
    seen = torch.isfinite(normaliser) & torch.isfinite(logit)
    if problem.mask is not None:
        full = problem.mask.expand(*problem.mask.shape[:2], queries, keys)
        pairs = full.diagonal(shift, -2, -1)
        if pairs.dtype == torch.bool:
            seen = seen & pairs
        else:
            seen = seen & (pairs > torch.finfo(pairs.dtype).min / 2)
            logit = logit + pairs.double()
    if problem.key_lengths is not None:
        column = torch.arange(first + shift, last + shift, device=logit.device)
        seen = seen & (column < problem.key_lengths[:, None, None])
    weight = torch.where(seen, (logit - normaliser).exp(), 0.0)
    return weight.sum((0, 2)).cpu(), seen.sum((0, 2)).double().cpu()


def _outside_window(offset: int, left: int | None, right: int | None) -> bool:
    return (left is not None and -offset > left) or (right is not None and offset > right)
