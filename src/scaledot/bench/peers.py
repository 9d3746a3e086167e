"""Whom we are compared with: torch's fused kernel, and PyTorch that materialises the weights.

`plain` and `plain_additive` are also the gate's yardstick: in float64 they are the truth, in the
type of the case they show which error is honest. For that they can start at a later row.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from scaledot.bench.workload import Answer, Inputs
from scaledot.measure import SATURATED_ABOVE, Vitals


def torch_sdpa(inputs: Inputs) -> Answer:
    """torch's own kernel, without any vitals."""
    query, key, value = inputs.query, inputs.key, inputs.value
    return Answer(scaled_dot_product_attention(query, key, value, is_causal=inputs.causal), None)


def plain(inputs: Inputs, first_row: int = 0) -> Answer:
    """Output and every vital sign, the way one writes it with the n x n matrix at hand."""
    hidden = _hidden(inputs, first_row)
    logits = (inputs.query * inputs.query.shape[-1] ** -0.5) @ inputs.key.mT  # [B, H, Q, K]
    scores = logits
    if hidden is not None:
        scores = logits.masked_fill(hidden, -math.inf)
        logits = logits.masked_fill(hidden, 0.0)
    weights = scores.softmax(-1)
    vitals = _summary(
        inputs,
        hidden,
        row_max=scores.amax(-1),
        row_sum=logits.sum(-1),
        row_squares=logits.square().sum(-1),
        entropy=scores.logsumexp(-1) - (weights * logits).sum(-1),
        sum_p2=weights.square().sum(-1),
        top_p=weights.amax(-1),
        first_p=weights[..., 0],
    )
    return Answer(weights @ inputs.value, vitals)


def lean(inputs: Inputs) -> Answer:
    """`plain` after an afternoon with a profiler: no n x n temporary, no second exponential."""
    hidden = _hidden(inputs, 0)
    logits = (inputs.query * inputs.query.shape[-1] ** -0.5) @ inputs.key.mT  # [B, H, Q, K]
    scores = logits if hidden is None else logits.masked_fill(hidden, -math.inf)
    weights = scores.softmax(-1)
    row_max, top_p = scores.amax(-1), weights.amax(-1)
    if hidden is not None:
        del scores
        logits.tril_()
    expected = torch.einsum("...k,...k->...", weights, logits)
    vitals = _summary(
        inputs,
        hidden,
        row_max=row_max,
        row_sum=logits.sum(-1),
        row_squares=torch.einsum("...k,...k->...", logits, logits),
        entropy=row_max - top_p.log() - expected,  # top_p = exp(row_max - lse)
        sum_p2=torch.einsum("...k,...k->...", weights, weights),
        top_p=top_p,
        first_p=weights[..., 0],
    )
    return Answer(weights @ inputs.value, vitals)


def plain_additive(inputs: Inputs, first_row: int = 0) -> Answer:
    """softmax(weight . tanh(q + k)) v with the [Q, K, width] tensor in memory."""
    assert inputs.weight is not None
    together = inputs.query.unsqueeze(-2) + inputs.key.unsqueeze(-3)  # [B, H, Q, K, D]
    scores = together.tanh() @ inputs.weight
    hidden = _hidden(inputs, first_row)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    return Answer(scores.softmax(-1) @ inputs.value, None)


def _hidden(inputs: Inputs, first_row: int) -> Tensor | None:
    """True above the diagonal, [Q, K]; row 0 of the query is row `first_row` of the matrix."""
    if not inputs.causal:
        return None
    queries, keys = inputs.query.shape[-2], inputs.key.shape[-2]
    every = torch.ones(queries, keys, dtype=torch.bool, device=inputs.query.device)
    return every.triu(first_row + 1)


def _summary(
    inputs: Inputs,
    hidden: Tensor | None,
    *,
    row_max: Tensor,
    row_sum: Tensor,
    row_squares: Tensor,
    entropy: Tensor,
    sum_p2: Tensor,
    top_p: Tensor,
    first_p: Tensor,
) -> Vitals:
    """From one number a row [B, H, Q] to one number a head [B, H]."""
    query, key = inputs.query, inputs.key
    count = torch.full((query.shape[-2],), key.shape[-2], device=query.device)  # keys a row sees
    if hidden is not None:
        count -= hidden.sum(-1)
    pairs = count.sum()
    logit_mean = row_sum.sum(-1) / pairs
    row_variance = row_squares / count - (row_sum / count).square()
    several = count > 1
    ratio = torch.where(several, entropy / count.clamp(min=2).to(entropy.dtype).log(), 0.0)

    def each_head(number: int | Tensor) -> Tensor:
        return torch.zeros_like(logit_mean, dtype=torch.int64) + number

    return Vitals(
        max_logit=row_max.amax(-1),
        logit_mean=logit_mean,
        logit_std=(row_squares.sum(-1) / pairs - logit_mean.square()).sqrt(),
        row_std=row_variance.mean(-1).sqrt(),
        entropy=entropy.mean(-1),
        entropy_ratio=ratio.sum(-1) / several.sum().clamp(min=1),
        sum_p2=sum_p2.mean(-1),
        top_p=top_p.mean(-1),
        saturated=(top_p > SATURATED_ABOVE).to(top_p.dtype).mean(-1),
        sink=first_p.mean(-1),
        off=torch.zeros_like(logit_mean),
        q_rms=query.square().mean((-1, -2)).sqrt(),
        k_rms=key.square().mean((-1, -2)).sqrt(),
        rows=each_head(query.shape[-2]),
        pairs=each_head(pairs),
        nonfinite=(~row_sum.isfinite()).sum(-1),
        ratio_rows=each_head(several.sum()),
        q_entries=each_head(query.shape[-2] * query.shape[-1]),
        k_entries=each_head(key.shape[-2] * key.shape[-1]),
    )
