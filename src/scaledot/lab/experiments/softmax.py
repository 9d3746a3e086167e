"""Lessons on the softmax: how it saturates, and what that does to the gradient."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

import scaledot
from scaledot import scale as scale_rules
from scaledot.lab.experiments.draws import normal, row_vitals, seeded, split
from scaledot.lab.experiments.finding import Finding, compare

SILENT = 1e-3  # a row of dL/dq below this counts as silent


@dataclass(frozen=True)
class Claimed:
    """A row of scores as the notes have it, with half a unit of the last digit they give."""

    key: str  # of the finding on the weights
    scores: tuple[float, ...]
    d_k: int  # the scores are divided by sqrt(d_k); 1 leaves them alone
    weights: tuple[float, ...]
    within: float
    exponentials: tuple[float, ...] | None = None
    exponentials_within: float = 0.0


CLAIMED = (
    Claimed(
        "saturated",
        (12.0, 2.0, -1.0),
        1,
        weights=(0.99995, 0.00004, 0.00001),
        within=5e-6,
        exponentials=(162754.0, 7.4, 0.37),
        exponentials_within=1.0,  # 162754.79 was cut, not rounded
    ),
    Claimed(
        "scaled",
        (12.0, 2.0, -1.0),
        64,
        weights=(0.59, 0.17, 0.24),
        within=5e-3,
        exponentials=(4.48, 1.28, 0.88),
        exponentials_within=5e-3,
    ),
    Claimed("extreme", (25.0, 2.0, -3.0), 1, weights=(1.0, 0.0, 0.0), within=0.5),
    Claimed("two_keys", (7.0, 3.0), 1, weights=(0.98, 0.02), within=5e-3),
)


@dataclass(frozen=True)
class SoftmaxRow:
    scores: tuple[float, ...]  # before the division
    divisor: float
    logits: tuple[float, ...]  # after it
    weights: Finding
    exponentials: Finding


@dataclass(frozen=True)
class Saturation:
    rows: tuple[SoftmaxRow, ...]


def saturation(seed: int = 0) -> Saturation:
    """The weights of a few rows of scores. Nothing is drawn: every seed gives the same."""
    return Saturation(tuple(_softmax_row(claimed) for claimed in CLAIMED))


def _softmax_row(claimed: Claimed) -> SoftmaxRow:
    query, key, identity = _problem(claimed.scores, claimed.d_k)
    weights = scaledot.attention(query, key, identity)[0]
    exponentials = weights * row_vitals(query, key).lse.exp()  # exp(z_j) = p_j sum(exp z)

    factor = scale_rules.resolve("sqrt_dk", claimed.d_k)
    logits = tuple(score * factor for score in claimed.scores)
    powers = tuple(math.exp(logit) for logit in logits)
    return SoftmaxRow(
        claimed.scores,
        1 / factor,
        logits,
        compare(
            claimed.key,
            tuple(weights.tolist()),
            claim=claimed.weights,
            theory=tuple(power / math.fsum(powers) for power in powers),
            within=claimed.within,
        ),
        compare(
            "exponentials",
            tuple(exponentials.tolist()),
            claim=claimed.exponentials,
            theory=powers,
            within=claimed.exponentials_within or 1e-6 * max(powers),
        ),
    )


def _problem(scores: tuple[float, ...], d_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, keys and values whose scores are `scores` and whose output is the weights.

    The query is 1 in its first entry, key j is score j there, and the values are the identity.
    """
    query = torch.zeros(1, d_k, dtype=torch.float64)
    query[0, 0] = 1.0
    key = torch.zeros(len(scores), d_k, dtype=torch.float64)
    key[:, 0] = torch.tensor(scores, dtype=torch.float64)
    return query, key, torch.eye(len(scores), dtype=torch.float64)


@dataclass(frozen=True)
class Slope:
    logits: tuple[float, ...]
    winner: Finding  # dp/dz of the largest weight, against p (1 - p)
    trace: Finding  # of the whole Jacobian, against 1 - sum p^2
    passes: float  # the same trace as the vitals report it
    jacobian_error: float  # largest difference from diag(p) - p p^T


@dataclass(frozen=True)
class RowGradients:
    """Sizes of dL/dq: root mean square over the entries, one number a row."""

    rule: str
    rows: int
    median: float
    percentile_99: float
    silent: float  # share of rows below SILENT
    histogram: tuple[float, ...]  # share of rows in each decade of DECADES, ends included


DECADES = (-6, -5, -4, -3, -2, -1, 0, 1)  # powers of ten that cut the histogram


@dataclass(frozen=True)
class Gradient:
    d_k: int
    keys: int
    silent_below: float
    slopes: tuple[Slope, ...]
    unscaled: RowGradients
    scaled: RowGradients
    findings: tuple[Finding, ...]


def gradient(seed: int = 0, d_k: int = 512, keys: int = 16, problems: int = 512) -> Gradient:
    """What the softmax lets through backwards: entry by entry, then for whole rows."""
    rows = ((1.5, 0.25, -0.125), (12.0, 2.0, -1.0), (25.0, 2.0, -3.0), (7.0, 3.0))
    unscaled, scaled = (
        _query_gradients(seed, rule, problems=problems, tokens=keys, d_k=d_k)
        for rule in ("none", "sqrt_dk")
    )
    summary = _summary("none", unscaled), _summary("sqrt_dk", scaled)
    loud = float((unscaled > summary[1].percentile_99).double().mean())
    return Gradient(
        d_k,
        keys,
        SILENT,
        tuple(_slope(logits) for logits in rows),
        *summary,
        (
            compare("steepest", _steepest(), claim=0.25, theory=0.25, within=1e-9),
            compare("vanishes", summary[0].silent, claim=1.0, within=0.05),
            compare("explodes", loud, claim=1.0, within=0.05),
        ),
    )


def _slope(logits: tuple[float, ...]) -> Slope:
    query, key, identity = _problem(logits, 1)

    def weights(key: Tensor) -> Tensor:
        return scaledot.attention(query, key, identity)[0]

    jacobian = torch.autograd.functional.jacobian(weights, key)[..., 0]  # dp_i / dz_j
    p = weights(key)
    top = int(p.argmax())
    vitals = scaledot.vitals(query, key)
    slope, trace = float(p[top] * (1 - p[top])), float(1 - p.square().sum())
    return Slope(
        logits,
        compare("winner", float(jacobian[top, top]), theory=slope, within=1e-6 * slope),
        compare("trace", float(jacobian.trace()), theory=trace, within=1e-6 * trace),
        float(vitals.passes),
        float((jacobian - (p.diag() - p.outer(p))).abs().max()),
    )


def _steepest() -> float:
    """The largest dp/dz of two keys as their distance goes from -6 to 6."""
    distance = torch.linspace(-6, 6, 25, dtype=torch.float64)
    key = torch.stack([distance, torch.zeros_like(distance)], -1)[..., None].requires_grad_()
    query = torch.ones(len(distance), 1, 1, dtype=torch.float64)
    identity = torch.eye(2, dtype=torch.float64).expand(len(distance), 2, 2)
    first_weight = scaledot.attention(query, key, identity)[..., 0]
    (slope,) = torch.autograd.grad(first_weight.sum(), key)
    return float(slope[:, 0, 0].max())


def _query_gradients(seed: int, rule: str, *, problems: int, tokens: int, d_k: int) -> Tensor:
    """The size of each row of dL/dq under a rule, L a random linear function of the output."""
    generator = seeded(seed)
    parts = []
    for size in split(problems, tokens * d_k):
        query, key, value, loss = normal(generator, (size, 1, tokens, d_k), 4)
        out = scaledot.attention(query.requires_grad_(), key, value, scale=rule)
        (grad,) = torch.autograd.grad(out, query, loss)
        parts.append(grad.double().square().mean(-1).sqrt().flatten())
    return torch.cat(parts)


def _summary(rule: str, sizes: Tensor) -> RowGradients:
    edges = 10.0 ** torch.tensor(DECADES, dtype=torch.float64)
    counts = torch.bincount(torch.bucketize(sizes, edges), minlength=len(DECADES) + 1)
    return RowGradients(
        rule,
        sizes.numel(),
        float(sizes.median()),
        float(sizes.quantile(0.99)),
        float((sizes < SILENT).double().mean()),
        tuple((counts / sizes.numel()).tolist()),
    )
