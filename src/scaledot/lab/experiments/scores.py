"""Three scores: dot, cosine, additive."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

import scaledot
from scaledot.lab.experiments.lesson import Claim, Control, Lesson, claim, seed_control
from scaledot.measure import Vitals

WIDTHS = (16, 32, 64, 128, 256, 512)
ENTRIES = 2**14  # of q, and of k: enough problems for a deviation right to a few per cent
LARGE = 1000.0  # how much larger q and k are made, to see that additive scores stay bounded
TIMED_TOKENS = 256
REPEATS = 5
EVEN = 1.0  # "additive scores are bounded to -1..1"


@dataclass(frozen=True)
class Score:
    """sd and largest |score| over all pairs; top: mean largest weight, max_weight: the largest."""

    sd: float
    theory_sd: float | None  # None: there is no closed form
    largest: float
    bound: float  # no |score| can pass it; inf: none
    top: float
    max_weight: float
    milliseconds: float | None  # at TIMED_TOKENS queries and keys; None: not measured


@dataclass(frozen=True)
class ScoresResult:
    """Placeholders: width, n, size, samples; dot.sd, dot.max_weight, ..., cosine.sd, ...,
    additive.sd, additive.bound, additive.largest, ...; expected_bound, additive_large,
    cosine_limit, identity_difference, timed_tokens.

    claims: `tanh_bound` ("tanh bounds additive scores to -1..1": the bound |v|_1), `bounded`
    ("bounded whatever the size of q and k": the share of |v|_1 that scores of thousandfold q and k
    reach, at most 1), `cosine_limit` ("cosine needs a temperature": no weight passes this one of n
    keys; folklore 0.33, for 16 keys), `identity` (q.k/sqrt(d) = sqrt(d) cos for |q| = |k| =
    sqrt(d): the largest difference), and `slower` ("additive attention is slower", where measured).
    """

    width: int
    v_init: str
    size: float
    n: int
    samples: int  # scores of each kind
    seed: int
    dot: Score  # q.k, undivided
    cosine: Score  # no temperature
    additive: Score  # v . tanh(W_q q + W_k k)
    expected_bound: float  # E |v|_1 of this initialisation
    additive_large: float  # largest |score| when q and k are LARGE times as long
    cosine_limit: float  # the largest weight of n keys: one cosine 1, the others -1
    cosine_limit_zero: float  # the same with the others at 0
    identity_difference: float
    timed_tokens: int
    claims: tuple[Claim, ...]


def scores(
    *,
    width: int = 64,
    v_init: str = "linear",
    size: float = 1.0,
    n: int = 16,
    seed: int = 0,
    measure: bool = False,
) -> ScoresResult:
    """The same q and k (normal, of deviation `size`) scored in three ways."""
    q, k, w_q, w_k, v = _draw(width, v_init, n, seed)
    q, k = q * size, k * size
    q_unit, k_unit = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    q_mixed, k_mixed = q @ w_q.T, k @ w_k.T
    bound = float(v.abs().sum())
    far = float(_largest(_additive(q_mixed * LARGE, k_mixed * LARGE, v)))
    times = _times(width, v, seed) if measure else (None, None, None)
    root = math.sqrt(width)
    dot = _score(
        scaledot.vitals(q, k, scale="none", per_row=True),
        _largest(q @ k.mT),
        times[0],
        theory=root * size * size,
        bound=math.inf,
    )
    cosine = _score(
        scaledot.vitals(q_unit, k_unit, scale="none", per_row=True),
        _largest(q_unit @ k_unit.mT),
        times[1],
        theory=1 / root,
        bound=1.0,
    )
    additive = _score(
        _additive_vitals(q_mixed, k_mixed, v),
        _largest(_additive(q_mixed, k_mixed, v)),
        times[2],
        theory=None,
        bound=bound,
    )
    limit = _largest_weight(n, -1.0)
    identity = float(
        (q_unit * root @ (k_unit * root).mT / root - root * (q_unit @ k_unit.mT)).abs().max()
    )
    return ScoresResult(
        width=width,
        v_init=v_init,
        size=size,
        n=n,
        samples=q.shape[0] * n * n,
        seed=seed,
        dot=dot,
        cosine=cosine,
        additive=additive,
        expected_bound=width * (0.5 / root if v_init == "linear" else math.sqrt(2 / math.pi)),
        additive_large=far,
        cosine_limit=limit,
        cosine_limit_zero=_largest_weight(n, 0.0),
        identity_difference=identity,
        timed_tokens=TIMED_TOKENS,
        claims=(
            claim("tanh_bound", folklore=EVEN, measured=bound, theory=bound, tolerance=0.05),
            claim(
                "bounded",
                folklore="bounded",
                theory="bounded",
                measured="bounded" if far <= bound * (1 + 1e-5) else "past the bound",
            ),
            claim(
                "cosine_limit",
                folklore=0.33,
                measured=_largest_weight(16, -1.0),
                theory=1 / (1 + 15 * math.exp(-2)),
                tolerance=5e-3,
            ),
            claim("identity", folklore=0.0, measured=identity, theory=0.0, tolerance=1e-4),
            *_slower(times),
        ),
    )


def _draw(width: int, v_init: str, n: int, seed: int) -> tuple[Tensor, ...]:
    """q, k [problems, n, width]; W_q, W_k such that W_q q + W_k k has the variance of q; v as a
    Linear's, or N(0, 1)."""
    generator = torch.Generator().manual_seed(seed)
    problems = _problems(width, n)
    q, k = (torch.randn(problems, n, width, generator=generator) for _ in range(2))
    w_q, w_k = (
        torch.randn(width, width, generator=generator) / (2 * width) ** 0.5 for _ in range(2)
    )
    if v_init == "linear":
        v = (2 * torch.rand(width, generator=generator) - 1) / width**0.5
    else:
        v = torch.randn(width, generator=generator)
    return q, k, w_q, w_k, v


def _problems(width: int, n: int) -> int:
    return max(1, min(32, ENTRIES // (n * width)))


def _additive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.tanh(q[:, :, None] + k[:, None]) @ v


def _additive_vitals(q: Tensor, k: Tensor, v: Tensor) -> Vitals:
    values = k[..., :1]  # the weights are what is looked at
    return scaledot.additive_attention_with_vitals(q, k, values, v, per_row=True)[1]


def _largest(scores: Tensor) -> float:
    return float(scores.abs().max())


def _score(
    vitals: Vitals,
    largest: float,
    milliseconds: float | None,
    *,
    theory: float | None,
    bound: float,
) -> Score:
    assert vitals.per_row is not None  # asked for
    # All heads hold the same number of pairs: the mean of their squares is the square over all.
    mean = vitals.logit_mean.double()
    second = (vitals.logit_std.double().square() + mean.square()).mean()
    return Score(
        sd=float((second - mean.mean().square()).sqrt()),
        theory_sd=theory,
        largest=largest,
        bound=bound,
        top=float(vitals.top_p.mean()),
        max_weight=float(vitals.per_row.top_p.max()),
        milliseconds=milliseconds,
    )


def _largest_weight(n: int, other: float) -> float:
    """Of one cosine of 1 among n, the others `other`."""
    cosines = torch.tensor([[1.0]] + [[other]] * (n - 1), dtype=torch.float64)
    one, identity = torch.ones(1, 1, dtype=torch.float64), torch.eye(n, dtype=torch.float64)
    return float(scaledot.attention(one, cosines, identity, scale="none").max())


def _times(width: int, v: Tensor, seed: int) -> tuple[float, float, float]:
    """Milliseconds of one attention of TIMED_TOKENS tokens: the best of REPEATS, in turns."""
    generator = torch.Generator().manual_seed(seed)
    q, k, x = (torch.randn(1, TIMED_TOKENS, width, generator=generator) for _ in range(3))

    def cosine() -> Tensor:
        return scaledot.attention(F.normalize(q, dim=-1), F.normalize(k, dim=-1), x, scale="none")

    calls: tuple[Callable[[], Tensor], ...] = (
        lambda: scaledot.attention(q, k, x),
        cosine,
        lambda: scaledot.additive_attention(q, k, x, v),
    )
    best = [math.inf] * len(calls)
    for _ in range(REPEATS):
        for place, call in enumerate(calls):
            began = time.perf_counter()
            call()
            best[place] = min(best[place], 1000 * (time.perf_counter() - began))
    return best[0], best[1], best[2]


def _slower(times: tuple[float | None, float | None, float | None]) -> list[Claim]:
    dot, _, additive = times
    if dot is None or additive is None:
        return []
    word = "slower" if additive > dot else "not slower"
    return [claim("slower", folklore="slower", measured=word, theory="slower")]


def _code(width: int, v_init: str, size: float, n: int, seed: int, measure: bool) -> str:
    v = (
        "(2 * torch.rand(width, generator=generator) - 1) / width**0.5"
        if v_init == "linear"
        else "torch.randn(width, generator=generator)"
    )
    return f"""\
import torch

problems, n, width = {_problems(width, n)}, {n}, {width}
generator = torch.Generator().manual_seed({seed})
q, k = (torch.randn(problems, n, width, generator=generator) for _ in range(2))
w_q, w_k = (torch.randn(width, width, generator=generator) / (2 * width) ** 0.5 for _ in range(2))
v = {v}
q, k = q * {size}, k * {size}
dot = q @ k.mT
cosine = torch.cosine_similarity(q[:, :, None], k[:, None], dim=-1)
additive = torch.tanh((q @ w_q.T)[:, :, None] + (k @ w_k.T)[:, None]) @ v
for name, scores in (("dot", dot), ("cosine", cosine), ("additive", additive)):
    weights = torch.softmax(scores, dim=-1)
    print(f"{{name}}.sd", scores.std(correction=0).item())
    print(f"{{name}}.largest", scores.abs().max().item())
    print(f"{{name}}.max_weight", weights.max().item())
print("additive.bound", v.abs().sum().item())
"""


LESSON = Lesson(
    "scores",
    scores,
    (
        Control("width", "steps", 64, values=WIDTHS),
        Control("v_init", "choice", "linear", values=("linear", "normal")),
        Control("size", "range", 1.0, low=0.1, high=10.0, step=0.1),
        Control("n", "steps", 16, values=(2, 4, 8, 16, 32)),
        seed_control(),
        Control("measure", "toggle", False),
    ),
    _code,
)
