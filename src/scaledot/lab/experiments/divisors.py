"""Which divisor: none, sqrt(d_k), d_k, sqrt(d_model), or the vectors' own norms."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

import scaledot
from scaledot import scale as scale_rules
from scaledot.lab.experiments.lesson import Claim, Control, Lesson, claim, seed_control
from scaledot.measure import SATURATED_ABOVE

RULES = ("none", "sqrt_dk", "dk", "sqrt_dmodel", "cosine")
ENTRIES = 2**16  # of q, and of k
SCORES = 2**14  # of each rule
HEAD_COUNTS = (1, 2, 8, 12, 96)


@dataclass(frozen=True)
class Divided:
    """One rule. divisor: for cosine the mean of |q_i| |k_j|, which is another for every pair."""

    rule: str
    divisor: float
    sd: float
    theory_sd: float
    top: float  # mean largest weight of a row
    entropy_ratio: float
    saturated: float  # share of rows whose largest weight is above 0.99
    weights: tuple[float, ...]  # of the first row


@dataclass(frozen=True)
class HeadCount:
    heads: int
    sd: float  # of scores divided by sqrt(heads * d_k)
    theory_sd: float


@dataclass(frozen=True)
class DivisorsResult:
    """Placeholders: d_k, d_model, heads, n, samples; none.sd, none.top, none.entropy_ratio,
    none.saturated and so on for sqrt_dk, dk, sqrt_dmodel, cosine; aligned_none, aligned_sqrt_dk,
    aligned_dk.

    claims: `unit` ("divided by sqrt(d_k), the scores have a deviation of 1"), `dk_too_flat`
    ("dividing by d_k is too flat": its entropy ratio against 1), `under_or_over` ("sqrt(d_model)
    under- or over-corrects": the largest deviation over several numbers of heads against one above
    1), `dk_always_flat` ("d_k is always too flat": the score of a vector with itself divided by
    d_k, against 0; it is 1, which is why muP divides so).
    """

    d_k: int
    heads: int
    d_model: int
    n: int
    samples: int  # rows
    seed: int
    none: Divided
    sqrt_dk: Divided
    dk: Divided
    sqrt_dmodel: Divided
    cosine: Divided
    head_counts: tuple[HeadCount, ...]
    aligned_none: float  # mean score of a vector with itself
    aligned_sqrt_dk: float
    aligned_dk: float
    claims: tuple[Claim, ...]


def divisors(*, d_k: int = 64, heads: int = 8, n: int = 16, seed: int = 0) -> DivisorsResult:
    """The same queries and keys under every rule, as the softmax sees them."""
    q, k = _draw(d_k, n, seed)
    raw = q @ k.mT  # [problems, n, n]
    by_rule = {rule: _divided(rule, raw, q, k, heads) for rule in RULES}
    sd = float(raw.std())
    head_counts = tuple(
        HeadCount(number, sd * scale_rules.resolve("sqrt_dmodel", d_k, number), number**-0.5)
        for number in HEAD_COUNTS
    )
    aligned = float((q * q).sum(-1).mean())
    aligned_dk = aligned * scale_rules.resolve("dk", d_k)
    # n queries and n keys make n * n scores: their error is that of the vectors behind them.
    error = 4 * math.sqrt(2 / (q.shape[0] * n))
    return DivisorsResult(
        d_k=d_k,
        heads=heads,
        d_model=heads * d_k,
        n=n,
        samples=q.shape[0] * n,
        seed=seed,
        **by_rule,
        head_counts=head_counts,
        aligned_none=aligned,
        aligned_sqrt_dk=aligned * scale_rules.resolve("sqrt_dk", d_k),
        aligned_dk=aligned_dk,
        claims=(
            claim(
                "unit", folklore=1.0, measured=by_rule["sqrt_dk"].sd, theory=1.0, tolerance=error
            ),
            claim(
                "dk_too_flat",
                folklore=1.0,
                measured=by_rule["dk"].entropy_ratio,
                tolerance=0.02,
            ),
            claim(
                "under_or_over",
                folklore="under and over",
                measured=_corrections(head_counts, 1 + error),
                theory="over",
            ),
            claim("dk_always_flat", folklore=0.0, measured=aligned_dk, theory=1.0, tolerance=0.1),
        ),
    )


def _draw(d_k: int, n: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    problems = _problems(d_k, n)
    q, k = (torch.randn(problems, n, d_k, generator=generator) for _ in range(2))
    return q, k


def _problems(d_k: int, n: int) -> int:
    return max(1, min(ENTRIES // (n * d_k), SCORES // (n * n)))


def _divided(rule: str, raw: Tensor, q: Tensor, k: Tensor, heads: int) -> Divided:
    d_k = q.shape[-1]
    if rule == "cosine":
        norms = q.norm(dim=-1)[..., None] * k.norm(dim=-1)[:, None]
        logits, divisor, theory = raw / norms, float(norms.mean()), 1 / math.sqrt(d_k)
    else:
        scale = scale_rules.resolve(rule, d_k, heads)
        logits, divisor, theory = raw * scale, 1 / scale, math.sqrt(d_k) * scale
    rows = scaledot.RowState.from_logits(logits)
    return Divided(
        rule,
        divisor,
        float(logits.std()),
        theory,
        float(rows.top_p.mean()),
        float(rows.entropy.mean()) / math.log(logits.shape[-1]),
        float((rows.top_p > SATURATED_ABOVE).double().mean()),
        tuple(torch.softmax(logits[0, 0], -1).tolist()),
    )


def _corrections(counts: tuple[HeadCount, ...], too_wide: float) -> str:
    """Which ways sqrt(d_model) errs over the numbers of heads."""
    under = any(count.sd > too_wide for count in counts)
    over = any(count.sd < 1 / too_wide for count in counts)
    return " and ".join(word for word, found in (("under", under), ("over", over)) if found)


def _code(d_k: int, heads: int, n: int, seed: int) -> str:
    return f"""\
import torch
import scaledot

problems, n, d_k, heads = {_problems(d_k, n)}, {n}, {d_k}, {heads}
generator = torch.Generator().manual_seed({seed})
q, k = (torch.randn(problems, n, d_k, generator=generator) for _ in range(2))
for rule in ("none", "sqrt_dk", "dk", "sqrt_dmodel", "cosine"):
    if rule == "cosine":
        a, b = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
        logits = a @ b.mT
    else:
        logits = q @ k.mT * scaledot.scale.resolve(rule, d_k, heads)
    p = torch.softmax(logits, dim=-1)
    entropy = -torch.special.xlogy(p, p).sum(-1)
    print(f"{{rule}}.sd", logits.std().item())
    print(f"{{rule}}.top", p.amax(-1).mean().item())
    print(f"{{rule}}.entropy_ratio", (entropy.mean() / torch.tensor(n).log()).item())
    print(f"{{rule}}.saturated", (p.amax(-1) > 0.99).double().mean().item())
"""


LESSON = Lesson(
    "divisors",
    divisors,
    (
        Control("d_k", "steps", 64, values=(4, 8, 16, 32, 64, 128, 256, 512, 1024)),
        Control("heads", "steps", 8, values=(1, 2, 4, 8, 12, 16, 32, 64, 96)),
        Control("n", "steps", 16, values=(2, 4, 8, 16, 32, 64)),
        seed_control(),
    ),
    _code,
)
