"""Bound the scores of a call by the norms of its rows: |q . k| <= |q| |k|.

A logit is rounded in proportion to the products that it sums, not to its own size, so this bound
says how many digits behind the point the probabilities of a call have.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

# torch's CPU kernel takes p = e^(s - lse) and delta = dO . O in its backward pass. They keep the
# rounding of logits, which are the less exact the farther from 0: at 100 its gradients of a value
# are off by four times as much as those of the plain formula, at 1000 by twenty times.
TORCH_IS_RIGHT_TO = 64.0


class Norms(NamedTuple):
    """The norms of rows, and the largest of them: 0 where there is none."""

    of_rows: Tensor
    largest: float


def row_norms(rows: Tensor) -> Norms:
    """Return |x| of each row [..., n, width] as [..., n], and the largest.

    Rows whose squares underflow are summed in float64.
    """
    norms = torch.linalg.vector_norm(rows, dim=-1).contiguous()
    if not norms.numel():
        return Norms(norms, 0.0)
    largest = norms.amax().item()
    if largest < 1e-15:
        norms = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64).to(rows.dtype)
        largest = norms.amax().item()
    return Norms(norms, largest)


def bound_of_scores(query: Norms, key: Norms, factor: float | Tensor) -> float:
    """Return what no |factor q . k| exceeds; NaN or inf where a row is not finite or overflows."""
    if not (query.of_rows.numel() and key.of_rows.numel()):
        return 0.0
    if isinstance(factor, Tensor):
        factor = factor.abs().amax().item()
    return query.largest * key.largest * abs(factor)


def within(query: Tensor, key: Tensor, factor: float, limit: float) -> bool:
    """Tell whether no score of the two can exceed the limit; False if one may not be finite."""
    accurate = torch.float64 if query.dtype == torch.float64 else torch.float32
    query_norm, key_norm = (
        torch.linalg.vector_norm(rows, dim=-1, dtype=accurate).amax().item()
        for rows in (query, key)
    )
    bound = query_norm * key_norm * abs(factor)
    return math.isfinite(bound) and bound <= limit
