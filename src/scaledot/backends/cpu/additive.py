"""The additive score weight . tanh(q + k) of a tile, and its gradients.

The sums q + k of all pairs are a [rows, keys, width] tensor; here it exists for a few rows at a
time, small enough to stay in the cache, in the forward pass and, computed anew, in the backward.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

PIECE = 1 << 18  # entries of q + k held at once: 1 MiB of float32


def fill_scores(out: Tensor, query: Tensor, keys: Tensor, weight: Tensor) -> None:
    """out [heads, rows, keys]; query and weight [heads, rows, D]; keys [heads, keys, D]."""
    for head, rows in _pieces(query, keys):
        bent = (query[head, rows].unsqueeze(1) + keys[head].unsqueeze(0)).tanh_()
        torch.bmm(bent, weight[head, rows].unsqueeze(-1), out=out[head, rows].unsqueeze(-1))


class Gradients(NamedTuple):
    query: Tensor  # [heads, rows, D]
    keys: Tensor  # [heads, keys, D]
    weight: Tensor  # [heads, rows, D]


def gradients(grad: Tensor, query: Tensor, keys: Tensor, weight: Tensor) -> Gradients:
    """From the gradient of the scores [heads, rows, keys]: 0 where hidden, NaN in broken rows."""
    may_break = not math.isfinite(query.sum().item() + keys.sum().item())
    found = Gradients(torch.zeros_like(query), torch.zeros_like(keys), torch.zeros_like(query))
    for head, rows in _pieces(query, keys):
        bent = (query[head, rows].unsqueeze(1) + keys[head].unsqueeze(0)).tanh_()
        if may_break:  # a hidden pair's NaN would meet its 0; tanh of infinity is a number
            bent.nan_to_num_(0.0)
        own = grad[head, rows].unsqueeze(1)  # [rows, 1, keys]
        found.weight[head, rows] = torch.bmm(own, bent).squeeze(1)
        slope = bent.square_().neg_().add_(1.0)  # d tanh
        slope.mul_(weight[head, rows].unsqueeze(1))
        found.query[head, rows] = torch.bmm(own, slope).squeeze(1)
        found.keys[head] += slope.mul_(own.transpose(1, 2)).sum(0)
    return found


def _pieces(query: Tensor, keys: Tensor) -> Iterator[tuple[int, slice]]:
    heads, rows, width = query.shape
    step = max(PIECE // max(keys.shape[1] * width, 1), 1)
    for head in range(heads):
        for row in range(0, rows, step):
            yield head, slice(row, min(row + step, rows))
