"""Bound the scores of a call by the norms of its rows: |q . k| <= |q| |k|.

A logit is rounded in proportion to the products that it sums, not to its own size, so this bound
says how many digits behind the point the probabilities of a call have.
"""

import math

import torch
from torch import Tensor

# torch's CPU kernel takes p = e^(s - lse) and delta = dO . O in its backward pass. They keep the
# rounding of logits, which are the less exact the farther from 0: at 100 its gradients of a value
# are off by four times as much as those of the plain formula, at 1000 by twenty times.
TORCH_IS_RIGHT_TO = 64.0


def row_norms(rows: Tensor) -> Tensor:
    """Return |x| of each row [..., n, width] as [..., n].

    Rows whose squares underflow are summed in float64.
    """
    norms = torch.linalg.vector_norm(rows, dim=-1).contiguous()
    if norms.numel() and norms.amax().item() < 1e-15:
        norms = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64).to(rows.dtype)
    return norms


def bound_of_scores(query_norms: Tensor, key_norms: Tensor, factor: float | Tensor) -> float:
    """Return what no |factor q . k| exceeds; NaN or inf where a row is not finite or overflows."""
    if not (query_norms.numel() and key_norms.numel()):
        return 0.0
    if isinstance(factor, Tensor):
        factor = factor.abs().amax().item()
    return query_norms.amax().item() * key_norms.amax().item() * abs(factor)


def within(query: Tensor, key: Tensor, factor: float, limit: float) -> bool:
    """Tell whether no score of the two can exceed the limit; False if one may not be finite."""
    accurate = torch.float64 if query.dtype == torch.float64 else torch.float32
    query_norm, key_norm = (
        torch.linalg.vector_norm(rows, dim=-1, dtype=accurate).amax().item()
        for rows in (query, key)
    )
    bound = query_norm * key_norm * abs(factor)
    return math.isfinite(bound) and bound <= limit
