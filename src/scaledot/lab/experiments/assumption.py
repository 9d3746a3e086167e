"""Unit variance is an assumption: what initialisations make of it, and how to measure it."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

import scaledot
from scaledot import scale as scale_rules
from scaledot.lab.experiments.lesson import Claim, Control, Lesson, claim, seed_control
from scaledot.lab.experiments.variance import sigma
from scaledot.measure import BANDS

INITS = ("unit", "mha", "linear", "gpt2")
TOKENS = 64
PROBLEMS = 4
FLAT_ROW_STD = BANDS["row_std"].low or 0.0
FLAT_ENTROPY_RATIO = BANDS["entropy_ratio"].high or 1.0
GPT2 = 0.02  # standard deviation of GPT-2's weights, whatever the width


@dataclass(frozen=True)
class Init:
    """init: "unit" N(0, 1/d_model), "mha" nn.MultiheadAttention's, "linear" nn.Linear's, "gpt2"
    N(0, 0.02^2). All that counts is the deviation of a weight."""

    init: str
    weight_sd: float
    theory_scaled: (
        float  # deviation of the scaled scores right after LayerNorm: d_model weight_sd^2
    )


@dataclass(frozen=True)
class AssumptionResult:
    """Placeholders: d_model, heads, d_k, n, sigma_q, sigma_k, weight_sd, sd_raw, theory_raw,
    sd_scaled, theory_scaled, logit_std, row_std, limit, entropy_ratio, flat_row_std,
    flat_entropy_ratio, top_p, saturated, q_rms, k_rms.

    claims: `unit` ("the scaled scores have a deviation of 1": sd_scaled), `frozen` ("the softmax is
    healthy": flat by the bands of scaledot.vitals, healthy, or frozen by the limit sqrt(2 ln n)).
    """

    init: str
    sigma_q: float
    sigma_k: float
    d_model: int
    heads: int
    d_k: int
    n: int  # keys of a row
    samples: int  # scores
    seed: int
    weight_sd: float
    sd_raw: float
    theory_raw: float
    sd_scaled: float
    theory_scaled: float
    logit_std: float  # of scaledot.vitals: the same as sd_scaled, without anybody forming scores
    row_std: float
    limit: float  # sqrt(2 ln n): a row whose deviation passes it is frozen on few keys
    entropy_ratio: float
    flat_row_std: float  # with less than this, or an entropy_ratio above the next, a row is flat
    flat_entropy_ratio: float
    top_p: float
    saturated: float
    q_rms: float
    k_rms: float
    inits: tuple[Init, ...]
    claims: tuple[Claim, ...]


def assumption(
    *,
    sigma_q: float = 1.0,
    sigma_k: float = 1.0,
    init: str = "unit",
    d_model: int = 768,
    heads: int = 12,
    seed: int = 0,
) -> AssumptionResult:
    """One head's scores right after a LayerNorm. sigma_q, sigma_k: how much larger q and k are
    than the initialisation makes them."""
    d_k = d_model // heads
    x, w_q, w_k = _draw(init, d_model, d_k, seed)
    q, k = sigma_q * (x @ w_q.T), sigma_k * (x @ w_k.T)
    scores = q @ k.mT
    vitals = scaledot.vitals(q[:, None], k[:, None]).over_batch()
    inits = tuple(
        Init(name, weight_sd(name, d_model), d_model * weight_sd(name, d_model) ** 2)
        for name in INITS
    )
    chosen = inits[INITS.index(init)]
    theory = chosen.theory_scaled * sigma_q * sigma_k
    scaled = float(scores.std()) * scale_rules.resolve("sqrt_dk", d_k)
    row_std, limit = float(vitals.row_std), math.sqrt(2 * math.log(TOKENS))
    return AssumptionResult(
        init=init,
        sigma_q=sigma_q,
        sigma_k=sigma_k,
        d_model=d_model,
        heads=heads,
        d_k=d_k,
        n=TOKENS,
        samples=scores.numel(),
        seed=seed,
        weight_sd=chosen.weight_sd,
        sd_raw=float(scores.std()),
        theory_raw=theory * math.sqrt(d_k),
        sd_scaled=scaled,
        theory_scaled=theory,
        logit_std=float(vitals.logit_std),
        row_std=row_std,
        limit=limit,
        entropy_ratio=float(vitals.entropy_ratio),
        flat_row_std=FLAT_ROW_STD,
        flat_entropy_ratio=FLAT_ENTROPY_RATIO,
        top_p=float(vitals.top_p),
        saturated=float(vitals.saturated),
        q_rms=float(vitals.q_rms),
        k_rms=float(vitals.k_rms),
        inits=inits,
        claims=(
            claim("unit", folklore=1.0, measured=scaled, theory=theory, tolerance=0.1),
            claim(
                "frozen",
                folklore="healthy",
                measured=_state(row_std, limit, float(vitals.entropy_ratio)),
            ),
        ),
    )


def _state(row_std: float, limit: float, entropy_ratio: float) -> str:
    if row_std > limit:
        return "frozen"
    flat = row_std < FLAT_ROW_STD or entropy_ratio > FLAT_ENTROPY_RATIO
    return "flat" if flat else "healthy"


def weight_sd(init: str, d_model: int) -> float:
    """A uniform weight of bound b has the deviation b / sqrt(3)."""
    return {
        "unit": 1 / math.sqrt(d_model),
        "mha": math.sqrt(6 / (4 * d_model))
        / math.sqrt(3),  # Xavier's bound of [3 d_model, d_model]
        "linear": 1 / math.sqrt(d_model) / math.sqrt(3),  # bound 1 / sqrt(inputs)
        "gpt2": GPT2,
    }[init]


def _draw(init: str, d_model: int, d_k: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(PROBLEMS, TOKENS, d_model, generator=generator)
    x = F.layer_norm(x, (d_model,))
    deviation = weight_sd(init, d_model)
    if init in ("unit", "gpt2"):
        w_q, w_k = (torch.randn(d_k, d_model, generator=generator) * deviation for _ in range(2))
    else:
        bound = deviation * math.sqrt(3)
        w_q, w_k = (
            (2 * torch.rand(d_k, d_model, generator=generator) - 1) * bound for _ in range(2)
        )
    return x, w_q, w_k


_WEIGHTS = {
    "unit": "torch.randn(d_k, d_model, generator=generator) / d_model**0.5",
    "mha": "(2 * torch.rand(d_k, d_model, generator=generator) - 1) * (6 / (4 * d_model)) ** 0.5",
    "linear": "(2 * torch.rand(d_k, d_model, generator=generator) - 1) / d_model**0.5",
    "gpt2": "torch.randn(d_k, d_model, generator=generator) * 0.02",
}


def _code(sigma_q: float, sigma_k: float, init: str, d_model: int, heads: int, seed: int) -> str:
    return f"""\
import torch
import scaledot

d_model, heads = {d_model}, {heads}
d_k = d_model // heads
generator = torch.Generator().manual_seed({seed})
x = torch.randn({PROBLEMS}, {TOKENS}, d_model, generator=generator)
x = torch.nn.functional.layer_norm(x, (d_model,))
w_q, w_k = ({_WEIGHTS[init]} for _ in range(2))
q, k = {sigma_q} * (x @ w_q.T), {sigma_k} * (x @ w_k.T)
print("sd_raw", (q @ k.mT).std().item())
print("sd_scaled", (q @ k.mT / d_k**0.5).std().item())
vitals = scaledot.vitals(q[:, None], k[:, None]).over_batch()
print("logit_std", vitals.logit_std.item())
print("row_std", vitals.row_std.item())
print("entropy_ratio", vitals.entropy_ratio.item())
"""


LESSON = Lesson(
    "assumption",
    assumption,
    (
        sigma("sigma_q"),
        sigma("sigma_k"),
        Control("init", "choice", "unit", values=INITS),
        Control("d_model", "steps", 768, values=(192, 384, 768, 1536)),
        Control("heads", "steps", 12, values=(6, 12, 24)),
        seed_control(),
    ),
    _code,
)
