"""Var(q.k) = d_k sigma_q^2 sigma_k^2: the reason for the square root."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from scaledot import scale as scale_rules
from scaledot.lab.experiments import normal_products
from scaledot.lab.experiments.lesson import Claim, Control, Lesson, claim, seed_control

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
ENTRIES = 2**19  # products q_i k_i drawn; every width groups the same ones into its own scores
BINS = 40
REACH = 4.0  # the histogram's ends, in standard deviations of the theory
RANGES = {2: (-23.0, 23.0), 5: (-49.0, 122.0)}  # "what the products range over", by width


@dataclass(frozen=True)
class Histogram:
    edges: tuple[float, ...]  # BINS + 1
    counts: tuple[int, ...]  # scores past an end are counted in the bin at that end


@dataclass(frozen=True)
class Curve:
    d_k: tuple[int, ...]
    measured: tuple[float, ...]  # standard deviations
    theory: tuple[float, ...]


@dataclass(frozen=True)
class DerivationStep:
    """key: mean_of_product, variance_of_product, variance_of_sum, divided_by_root,
    divided_by_width."""

    key: str
    measured: float
    theory: float


@dataclass(frozen=True)
class VarianceResult:
    """Placeholders: d_k, variance, sd, mean, mean_abs, median_abs, above_8, above_12, kurtosis,
    each with its theory_ twin, samples, low, high, ratio_5_2.

    claims: `variance` ("Var(q.k) is d_k", after the division 1), `typical` ("a typical |q.k| is
    sqrt(d_k)": against the mean of |q.k|), `ranges` ("2-D products range over -23..23, 5-D over
    -49..122": the ratio of the widths against that of the standard deviations), `scaled` ("divided
    by sqrt(d_k) the variance is 1", at these sigmas), `kurtosis` ("q.k is normal": 3).
    """

    d_k: int
    scaled: bool
    samples: int  # scores behind the numbers: wide vectors come in fewer than asked for
    seed: int
    sigma_q: float
    sigma_k: float
    divisor: float  # 1 unless scaled
    mean: float
    variance: float
    theory_variance: float
    sd: float
    theory_sd: float
    mean_abs: float
    theory_mean_abs: float
    median_abs: float
    theory_median_abs: float
    above_8: float  # P(|score| > 8)
    theory_above_8: float
    above_12: float
    theory_above_12: float
    kurtosis: float
    theory_kurtosis: float
    low: float  # smallest and largest score of this sample
    high: float
    ratio_5_2: float  # sd of 5-D products over sd of 2-D products
    histogram: Histogram
    curve: Curve
    derivation: tuple[DerivationStep, ...]
    claims: tuple[Claim, ...]


def variance(
    *,
    d_k: int = 64,
    scaled: bool = False,
    samples: int = 2000,
    sigma_q: float = 1.0,
    sigma_k: float = 1.0,
    seed: int = 0,
) -> VarianceResult:
    """Scores of independent normal vectors, at one width and along all of them."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(ENTRIES, generator=generator) for _ in range(2))
    products = q.mul_(k).mul_(sigma_q * sigma_k)
    size = sigma_q * sigma_k
    divisor = 1 / scale_rules.resolve("sqrt_dk", d_k) if scaled else 1.0
    raw = _scores(products, d_k, samples)
    scores = raw / divisor
    absolute = scores.abs()
    unit = size / divisor  # of the scores: theory is for standard normal entries
    number = scores.numel()
    sd = float(scores.std())
    theory_sd = math.sqrt(d_k) * unit
    ratio = float(_all_scores(products, 5).std() / _all_scores(products, 2).std())
    return VarianceResult(
        d_k=d_k,
        scaled=scaled,
        samples=number,
        seed=seed,
        sigma_q=sigma_q,
        sigma_k=sigma_k,
        divisor=divisor,
        mean=float(scores.mean()),
        variance=sd * sd,
        theory_variance=theory_sd**2,
        sd=sd,
        theory_sd=theory_sd,
        mean_abs=float(absolute.mean()),
        theory_mean_abs=normal_products.mean_size(d_k) * unit,
        median_abs=float(absolute.median()),
        theory_median_abs=normal_products.median_size(d_k) * unit,
        above_8=_above(absolute, 8.0),
        theory_above_8=normal_products.tail(d_k, 8.0 / unit),
        above_12=_above(absolute, 12.0),
        theory_above_12=normal_products.tail(d_k, 12.0 / unit),
        kurtosis=float(((scores - scores.mean()) / sd).pow(4).mean()),
        theory_kurtosis=normal_products.kurtosis(d_k),
        low=float(scores.min()),
        high=float(scores.max()),
        ratio_5_2=ratio,
        histogram=_histogram(scores, theory_sd),
        curve=_curve(products, samples, size, scaled),
        derivation=_derivation(products, raw, d_k, size),
        claims=_claims(raw, scores, d_k, scaled, ratio, unit),
    )


def _scores(products: Tensor, d_k: int, samples: int) -> Tensor:
    """The first scores: each is the sum of d_k products of its own."""
    samples = min(samples, products.numel() // d_k)
    return products[: samples * d_k].view(samples, d_k).sum(1)


def _all_scores(products: Tensor, d_k: int) -> Tensor:
    return _scores(products[: 2**17], d_k, 2**17)


def _above(absolute: Tensor, threshold: float) -> float:
    return float((absolute > threshold).double().mean())


def _histogram(scores: Tensor, theory_sd: float) -> Histogram:
    edges = torch.linspace(-REACH, REACH, BINS + 1) * theory_sd
    inside = torch.bucketize(scores, edges[1:-1])
    counts = torch.bincount(inside, minlength=BINS)
    return Histogram(tuple(edges.tolist()), tuple(counts.tolist()))


def _curve(products: Tensor, samples: int, size: float, scaled: bool) -> Curve:
    """Divided or not, the standard deviation at every width."""
    divisors = [1 / scale_rules.resolve("sqrt_dk", d) if scaled else 1.0 for d in WIDTHS]
    measured = [
        float(_scores(products, d, samples).std()) / divisor
        for d, divisor in zip(WIDTHS, divisors, strict=True)
    ]
    theory = [math.sqrt(d) * size / divisor for d, divisor in zip(WIDTHS, divisors, strict=True)]
    return Curve(WIDTHS, tuple(measured), tuple(theory))


def _derivation(products: Tensor, raw: Tensor, d_k: int, size: float) -> tuple[DerivationStep, ...]:
    one, total = products[: 2**17], float(raw.var())
    square = size * size
    return (
        DerivationStep("mean_of_product", float(one.mean()), 0.0),
        DerivationStep("variance_of_product", float(one.var()), square),
        DerivationStep("variance_of_sum", total, d_k * square),
        DerivationStep("divided_by_root", total / d_k, square),
        DerivationStep("divided_by_width", total / d_k**2, square / d_k),
    )


def _claims(
    raw: Tensor, scores: Tensor, d_k: int, scaled: bool, ratio: float, unit: float
) -> tuple[Claim, ...]:
    """Tolerances are four standard errors of the sample."""
    number = scores.numel()
    # The variance of a sample variance is (kurtosis - 1) / n of its square.
    relative = 4 * math.sqrt((normal_products.kurtosis(d_k) - 1) / number)
    absolute = scores.abs()
    claimed_variance = 1.0 if scaled else float(d_k)
    widths = {d: high - low for d, (low, high) in RANGES.items()}
    kurtosis = float(((raw - raw.mean()) / raw.std()).pow(4).mean())
    return (
        claim(
            "variance",
            folklore=claimed_variance,
            measured=float(scores.var()),
            theory=d_k * unit * unit,
            tolerance=relative * claimed_variance,
        ),
        claim(
            "typical",
            folklore=math.sqrt(claimed_variance),
            measured=float(absolute.mean()),
            theory=normal_products.mean_size(d_k) * unit,
            tolerance=4 * float(absolute.std()) / math.sqrt(number),
        ),
        claim(
            "ranges",
            folklore=widths[5] / widths[2],
            measured=ratio,
            theory=math.sqrt(5 / 2),
            tolerance=0.1,
        ),
        claim(
            "scaled",
            folklore=1.0,
            measured=float(raw.var()) / d_k,
            theory=(unit if not scaled else unit * math.sqrt(d_k)) ** 2,
            tolerance=relative,
        ),
        claim(
            "kurtosis",
            folklore=3.0,
            measured=kurtosis,
            theory=normal_products.kurtosis(d_k),
            tolerance=4 * math.sqrt(24 / number),
        ),
    )


def _code(d_k: int, scaled: bool, samples: int, sigma_q: float, sigma_k: float, seed: int) -> str:
    divide = "scores = scores / d_k**0.5\n" if scaled else ""
    return f"""\
import torch

d_k, samples = {d_k}, {min(samples, ENTRIES // d_k)}
generator = torch.Generator().manual_seed({seed})
q, k = (torch.randn({ENTRIES}, generator=generator) for _ in range(2))
products = q * k * ({sigma_q} * {sigma_k})
scores = products[: samples * d_k].view(samples, d_k).sum(1)  # each sum is one q.k
{divide}print("samples", len(scores))
print("variance", scores.var().item())
print("sd", scores.std().item())
print("mean_abs", scores.abs().mean().item())
print("median_abs", scores.abs().median().item())
print("above_8", (scores.abs() > 8).double().mean().item())
"""


def sigma(name: str) -> Control:
    return Control(name, "range", 1.0, low=0.1, high=4.0, step=0.1)


LESSON = Lesson(
    "variance",
    variance,
    (
        Control("d_k", "steps", 64, values=WIDTHS),
        Control("scaled", "toggle", False),
        Control("samples", "steps", 2000, values=(250, 500, 1000, 2000, 4000, 8000)),
        sigma("sigma_q"),
        sigma("sigma_k"),
        seed_control(),
    ),
    _code,
)
