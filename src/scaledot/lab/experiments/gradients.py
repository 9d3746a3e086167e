"""Vanish or explode? The size of dL/dq, row by row: both, in different rows."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

import scaledot
from scaledot import scale as scale_rules
from scaledot.lab.experiments.lesson import Claim, Control, Lesson, claim, seed_control

RULES = ("none", "sqrt_dk", "dk", "sqrt_dmodel", "cosine")
HEADS = 8  # for sqrt_dmodel
QUERIES = 32  # of one problem: rows that share their keys
ENTRIES = 5 * 2**16  # of q: wide vectors come in fewer rows, to answer within a slider's time
SILENT = 1e-3
EDGES = tuple(10.0 ** (power / 4) for power in range(-32, 9))  # 1e-8 to 100, four a decade


@dataclass(frozen=True)
class GradientSizes:
    """Root mean square over the entries of dL/dq, one number a row."""

    rule: str
    median: float
    mean: float
    p99: float
    below_1e3: float  # share of rows below 1e-3
    counts: tuple[int, ...]  # of GradientsResult.edges; sizes past an end are in the bin there


@dataclass(frozen=True)
class GradientsResult:
    """Placeholders: d_k, n, rows, median, mean, p99, below_1e3 (of the chosen rule) and
    scaled.median, scaled.mean, scaled.p99, scaled.below_1e3 (of sqrt_dk).

    claims, without scaling, whatever rule is chosen: `vanish` ("the gradients vanish": the share
    of rows below 1e-3 against all of them), `explode` ("the gradients explode": the share of rows
    above the scaled rows' 99th percentile, against all of them).
    """

    d_k: int
    rule: str
    n: int
    rows: int  # taken: fewer than asked for where vectors are wide
    seed: int
    median: float
    mean: float
    p99: float
    below_1e3: float
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    scaled: GradientSizes
    claims: tuple[Claim, ...]


def gradients(
    *, d_k: int = 512, rule: str = "none", rows: int = 3000, n: int = 16, seed: int = 0
) -> GradientsResult:
    """L is a random linear function of the output: its gradient there is standard normal."""
    q, k, v, loss = _draw(d_k, rows, n, seed)
    through = loss @ v.mT  # dL/dp: the same for every rule
    sizes = {name: row_sizes(q, k, through, name) for name in {rule, "none", "sqrt_dk"}}
    chosen, scaled = _summary(rule, sizes[rule]), _summary("sqrt_dk", sizes["sqrt_dk"])
    silent = float((sizes["none"] < SILENT).double().mean())
    loud = float((sizes["none"] > scaled.p99).double().mean())
    return GradientsResult(
        d_k=d_k,
        rule=rule,
        n=n,
        rows=sizes[rule].numel(),
        seed=seed,
        median=chosen.median,
        mean=chosen.mean,
        p99=chosen.p99,
        below_1e3=chosen.below_1e3,
        edges=EDGES,
        counts=chosen.counts,
        scaled=scaled,
        claims=(
            claim("vanish", folklore=1.0, measured=silent, tolerance=0.05),
            claim("explode", folklore=1.0, measured=loud, tolerance=0.05),
        ),
    )


def _problems(d_k: int, rows: int) -> int:
    return max(1, min(rows, ENTRIES // d_k) // QUERIES)


def _draw(d_k: int, rows: int, n: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q [P, QUERIES, d_k], k and v [P, n, d_k], and dL/d(output) [P, QUERIES, d_k]."""
    generator = torch.Generator().manual_seed(seed)
    problems = _problems(d_k, rows)
    q, k, v, loss = (
        torch.randn(problems, tokens, d_k, generator=generator)
        for tokens in (QUERIES, n, n, QUERIES)
    )
    return q, k, v, loss


def row_sizes(q: Tensor, k: Tensor, through: Tensor, rule: str) -> Tensor:
    """|dL/dq| / sqrt(d_k) of every row, given dL/dp.

    The weights come out of scaledot.attention with the identity as values; back through them goes
    dL/dz = p (dL/dp - p.dL/dp), the Jacobian diag(p) - p p^T at work, and then dz/dq = scale k.
    Autograd through scaledot.attention gives the same and takes four times as long.
    """
    problems, n, d_k = k.shape
    norms = q.norm(dim=-1, keepdim=True)
    if rule == "cosine":
        q, k, scale = q / norms, F.normalize(k, dim=-1), 1.0
    else:
        scale = scale_rules.resolve(rule, d_k, HEADS)
    identity = torch.eye(n).expand(problems, n, n)
    p = scaledot.attention(q, k, identity, scale=scale)
    dz = p * (through - (p * through).sum(-1, keepdim=True))
    dq = scale * (dz @ k)
    if rule == "cosine":  # q enters by its direction alone
        dq = (dq - (dq * q).sum(-1, keepdim=True) * q) / norms
    return dq.norm(dim=-1).flatten() / math.sqrt(d_k)


def _summary(rule: str, sizes: Tensor) -> GradientSizes:
    counts = torch.bincount(
        torch.bucketize(sizes, torch.tensor(EDGES[1:-1])), minlength=len(EDGES) - 1
    )
    return GradientSizes(
        rule,
        float(sizes.median()),
        float(sizes.mean()),
        float(sizes.quantile(0.99)),
        float((sizes < SILENT).double().mean()),
        tuple(counts.tolist()),
    )


def _code(d_k: int, rule: str, rows: int, n: int, seed: int) -> str:
    normalise, scale = "", f"{scale_rules.resolve(rule, d_k, HEADS)!r}" if rule != "cosine" else "1"
    if rule == "cosine":
        normalise = "    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)\n"
    return f"""\
import torch
import torch.nn.functional as F

problems, queries, n, d_k = {_problems(d_k, rows)}, {QUERIES}, {n}, {d_k}
generator = torch.Generator().manual_seed({seed})
q, k, v, loss = (
    torch.randn(problems, tokens, d_k, generator=generator) for tokens in (queries, n, n, queries)
)


def output(q, k):
{normalise}    return F.scaled_dot_product_attention(q, k, v, scale={scale})


q.requires_grad_()
(gradient,) = torch.autograd.grad(output(q, k), q, loss)
sizes = gradient.square().mean(-1).sqrt().flatten()  # one number a row
print("rows", len(sizes))
print("median", sizes.median().item())
print("mean", sizes.mean().item())
print("p99", sizes.quantile(0.99).item())
print("below_1e3", (sizes < 1e-3).double().mean().item())
"""


LESSON = Lesson(
    "gradients",
    gradients,
    (
        Control("d_k", "steps", 512, values=(16, 32, 64, 128, 256, 512, 1024)),
        Control("rule", "choice", "none", values=RULES),
        Control("rows", "steps", 3000, values=(512, 1024, 2048, 3000)),
        Control("n", "steps", 16, values=(2, 4, 8, 16, 32)),
        seed_control(),
    ),
    _code,
)
