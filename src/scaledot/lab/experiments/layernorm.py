"""LayerNorm alone is not enough, and QK-norm is another thing."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

import scaledot
from scaledot.lab.experiments.lesson import Claim, Control, Lesson, claim, seed_control

TOKENS = 64
ENTRIES = 2**17  # of x, at most 16 problems of TOKENS tokens
GROWN = 4.0  # how much larger W_Q and W_K are than at the start, where training is meant
OFFSET, SPREAD = 1.0, 3.0  # of the entries before LayerNorm: it has something to do


@dataclass(frozen=True)
class LayernormResult:
    """Placeholders: d, gain, growth, samples, norm, theory_norm, sd_raw, theory_sd_raw, sd_scaled,
    theory_sd_scaled, sd_scores, theory_sd_scores, grown.

    claims: `enough` ("after LayerNorm no division is needed": the deviation of x.y against 1),
    `deviation` (d/sqrt(d-1), 8.06 at 64), `stays` ("LayerNorm keeps the scores in check": the
    deviation of the scaled scores after W_Q, W_K against 1, with LayerNorm alone and both weights
    `grown` times as large, whatever is chosen).
    """

    d: int
    layernorm: bool
    qk_norm: bool
    gain: float
    growth: float
    samples: int  # pairs
    seed: int
    norms: tuple[float, float, float]  # smallest, mean and largest |x|
    norm: float  # the mean
    theory_norm: float  # sqrt(d) after LayerNorm
    sd_raw: float  # of x.y, two tokens: before W_Q and W_K
    theory_sd_raw: float  # d / sqrt(d - 1) after LayerNorm
    sd_scaled: float  # of x.y / sqrt(d)
    theory_sd_scaled: float
    sd_scores: float  # of q.k / sqrt(d), after W_Q, W_K and QK-norm if it is on
    theory_sd_scores: float
    grown: float
    claims: tuple[Claim, ...]


def layernorm(
    *,
    d: int = 64,
    layernorm: bool = True,
    qk_norm: bool = False,
    gain: float = 1.0,
    growth: float = 1.0,
    seed: int = 0,
) -> LayernormResult:
    """Tokens, LayerNormed or not, scored as they are and after W_Q and W_K.

    growth: how many times larger than at the start W_Q and W_K have become. gain: QK-norm's.
    """
    drawn, w_q, w_k = _draw(d, seed)
    normed = F.layer_norm(drawn, (d,))
    x = normed if layernorm else drawn
    half = TOKENS // 2
    one, two = x[:, :half], x[:, half:]
    q, k = growth * (one @ w_q.T), growth * (two @ w_k.T)
    if qk_norm:
        q, k = (gain * F.rms_norm(heads, (d,)) for heads in (q, k))
    norms = x.norm(dim=-1)
    sd_raw, sd_scores = _sd(one, two, "none"), _sd(q, k, "sqrt_dk")
    raw = _theory_raw(d, layernorm)
    scores = _theory_scores(d, layernorm, gain if qk_norm else None, growth)
    sd_start = _sd(normed[:, :half] @ w_q.T, normed[:, half:] @ w_k.T, "sqrt_dk")
    root = math.sqrt(d)
    tolerance = 4 * math.sqrt(1 / (2 * x.shape[0] * half))  # of the vectors, not of the pairs
    return LayernormResult(
        d=d,
        layernorm=layernorm,
        qk_norm=qk_norm,
        gain=gain,
        growth=growth,
        samples=x.shape[0] * half * half,
        seed=seed,
        norms=(float(norms.min()), float(norms.mean()), float(norms.max())),
        norm=float(norms.mean()),
        theory_norm=root * (1 if layernorm else math.hypot(OFFSET, SPREAD)),
        sd_raw=sd_raw,
        theory_sd_raw=raw,
        sd_scaled=sd_raw / root,
        theory_sd_scaled=raw / root,
        sd_scores=sd_scores,
        theory_sd_scores=scores,
        grown=GROWN,
        claims=(
            claim("enough", folklore=1.0, measured=sd_raw, theory=raw, tolerance=tolerance),
            claim(
                "deviation",
                folklore=d / math.sqrt(d - 1),
                measured=sd_raw,
                theory=raw,
                tolerance=tolerance * raw,
            ),
            # W_Q and W_K are one draw each, so the deviation differs from seed to seed.
            claim(
                "stays",
                folklore=1.0,
                measured=GROWN**2 * sd_start,
                theory=_theory_scores(d, True, None, GROWN),
                tolerance=0.25,
            ),
        ),
    )


def _draw(d: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [problems, TOKENS, d] of no unit variance, and weights that keep the variance."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(_problems(d), TOKENS, d, generator=generator) * SPREAD + OFFSET
    w_q, w_k = (torch.randn(d, d, generator=generator) / d**0.5 for _ in range(2))
    return x, w_q, w_k


def _problems(d: int) -> int:
    return min(16, ENTRIES // (TOKENS * d))


def _sd(q: Tensor, k: Tensor, rule: str) -> float:
    """Over all pairs: problems are disjoint rows of one head."""
    return float(scaledot.vitals(q[:, None], k[:, None], scale=rule).over_batch().logit_std)


def _theory_raw(d: int, layernorm: bool) -> float:
    """LayerNorm leaves d - 1 free directions, and |x|^2 |y|^2 / (d - 1) = d^2 / (d - 1).

    Without it x_i y_i has the variance (o^2 + s^2)^2 - o^4, o the offset and s the spread.
    """
    if layernorm:
        return d / math.sqrt(d - 1)
    return math.sqrt(d * ((OFFSET**2 + SPREAD**2) ** 2 - OFFSET**4))


def _theory_scores(d: int, layernorm: bool, gain: float | None, growth: float) -> float:
    if gain is not None:
        return gain * gain
    return growth * growth * (1.0 if layernorm else OFFSET**2 + SPREAD**2)


def _code(d: int, layernorm: bool, qk_norm: bool, gain: float, growth: float, seed: int) -> str:
    normed = "x = F.layer_norm(x, (d,))\n" if layernorm else ""
    qk = f"q, k = {gain} * F.rms_norm(q, (d,)), {gain} * F.rms_norm(k, (d,))\n" if qk_norm else ""
    return f"""\
import torch
import torch.nn.functional as F

problems, tokens, d = {_problems(d)}, {TOKENS}, {d}
generator = torch.Generator().manual_seed({seed})
x = torch.randn(problems, tokens, d, generator=generator) * {SPREAD} + {OFFSET}
w_q, w_k = (torch.randn(d, d, generator=generator) / d**0.5 for _ in range(2))
{normed}one, two = x[:, : tokens // 2], x[:, tokens // 2 :]
q, k = {growth} * (one @ w_q.T), {growth} * (two @ w_k.T)
{qk}print("norm", x.norm(dim=-1).mean().item())
print("sd_raw", (one @ two.mT).std(correction=0).item())
print("sd_scaled", (one @ two.mT / d**0.5).std(correction=0).item())
print("sd_scores", (q @ k.mT / d**0.5).std(correction=0).item())
"""


LESSON = Lesson(
    "layernorm",
    layernorm,
    (
        Control("d", "steps", 64, values=(8, 16, 32, 64, 128, 256, 512)),
        Control("layernorm", "toggle", True),
        Control("qk_norm", "toggle", False),
        Control("gain", "range", 1.0, low=0.25, high=4.0, step=0.25),
        Control("growth", "range", 1.0, low=0.25, high=8.0, step=0.25),
        seed_control(),
    ),
    _code,
)
