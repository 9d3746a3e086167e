"""Lessons on the score itself: products by hand, and why their variance is d_k."""

import math
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

import scaledot
from scaledot.lab.experiments.draws import (
    normal,
    row_vitals,
    seeded,
    split,
    vitals_of_normals,
)
from scaledot.lab.experiments.finding import Finding, compare
from scaledot.measure import Vitals

# (query, key, their product as the notes have it)
BY_HAND = (
    ((1.0, -1.0), (1.0, 1.0), 0.0),
    ((2.0, -1.0), (1.0, 3.0), -1.0),
    ((1.0, -1.0, 1.0, -1.0), (1.0, 1.0, 1.0, 1.0), 0.0),
    ((2.0, -1.0, 2.0, -1.0), (1.0, 2.0, 1.0, 2.0), 0.0),
)
FIRST_FIVE = (
    (0.8, -1.1, 0.5, 1.3, -0.9),
    (1.0, 0.7, -0.6, 0.9, -1.2),
    (0.8, -0.77, -0.3, 1.17, 1.08),
)
WIDTHS = (2, 16, 64, 128, 512, 1024)
ENTRIES = 2**21  # entries of q drawn for each width, as long as that is no more than ROWS
ROWS = 2**19

TYPICAL_CLAIM = 8.0  # "a typical |q.k| at d_k = 64"
TYPICAL_WIDTH = 64
RANGE_CLAIM = {2: (-23.0, 23.0), 5: (-49.0, 122.0)}  # "what the products range over", by width


@dataclass(frozen=True)
class DotProduct:
    query: tuple[float, ...]
    key: tuple[float, ...]
    terms: tuple[float, ...]  # q_i k_i
    finding: Finding


@dataclass(frozen=True)
class SmallVectors:
    products: tuple[DotProduct, ...]
    first_five: DotProduct  # of 64 entries; the finding is on the five terms
    flipped: DotProduct  # the last of `products` with one sign turned
    sign_choices: int  # ways to sign its query
    findings: tuple[Finding, ...]


def small_vectors(seed: int = 0) -> SmallVectors:
    """Products small enough to check by hand. Nothing is drawn: every seed gives the same."""
    products = tuple(_by_hand(query, key, claim) for query, key, claim in BY_HAND)
    query, key, claim = FIRST_FIVE
    terms = _terms(query, key)
    exact = tuple(a * b for a, b in zip(query, key, strict=True))
    five = compare("first_five", terms, claim=claim, theory=exact, within=1e-9)

    lucky_query, lucky_key, _ = BY_HAND[-1]
    flipped = _by_hand((*lucky_query[:-1], -lucky_query[-1]), lucky_key, None)
    return SmallVectors(
        products,
        DotProduct(query, key, terms, five),
        flipped,
        2 ** len(lucky_query),
        (_cancelling(lucky_query, lucky_key),),
    )


def _by_hand(query: tuple[float, ...], key: tuple[float, ...], claim: float | None) -> DotProduct:
    measured = float(_scores([query], [key]))
    theory = math.fsum(a * b for a, b in zip(query, key, strict=True))
    finding = compare("dot_product", measured, claim=claim, theory=theory, within=1e-9)
    return DotProduct(query, key, _terms(query, key), finding)


def _cancelling(query: tuple[float, ...], key: tuple[float, ...]) -> Finding:
    """How often the product is 0 if every entry of the query may have either sign.

    Where all terms have the same size, half of the signs must be plus: C(n, n/2) / 2^n.
    """
    signs = product((1.0, -1.0), repeat=len(query))
    signed = [[sign * a for sign, a in zip(row, query, strict=True)] for row in signs]
    share = float((_scores(signed, [key]) == 0).double().mean())
    theory = math.comb(len(query), len(query) // 2) / 2 ** len(query)
    return compare("products_cancel", share, claim=1.0, theory=theory, within=1e-9)


def _terms(query: tuple[float, ...], key: tuple[float, ...]) -> tuple[float, ...]:
    """q_i k_i: the product of width 1, once for each entry."""
    return tuple(_scores([[a] for a in query], [[b] for b in key], paired=True).tolist())


def _scores(query: list, key: list, paired: bool = False) -> Tensor:
    """The scores of queries [n, d] with one key [1, d], or of query i with key i if `paired`."""
    queries = torch.tensor(query, dtype=torch.float64)
    keys = torch.tensor(key, dtype=torch.float64)
    if paired:
        return scaledot.vitals(queries[:, None], keys[:, None], scale="none").max_logit
    return row_vitals(queries, keys, "none").max_logit  # one key: a row's maximum is its score


@dataclass(frozen=True)
class WidthVariance:
    d_k: int
    pairs: int
    finding: Finding  # Var(q.k) against d_k


@dataclass(frozen=True)
class Derivation:
    """Each line of the argument, measured."""

    mean_of_term: Finding  # E[q_i k_i] = 0
    variance_of_term: Finding  # Var(q_i k_i) = 1
    variance_of_sum: Finding  # independent terms add up: d_k
    divided_by_root: Finding  # Var(x / sqrt(d_k)) = d_k / d_k = 1
    divided_by_width: Finding  # Var(x / d_k) = d_k / d_k^2 = 1 / d_k


@dataclass(frozen=True)
class Typical:
    """The size of q.k at one width."""

    d_k: int
    standard_deviation: Finding
    mean_size: Finding
    median_size: Finding
    above_one_sd: Finding  # P(|q.k| > sqrt(d_k))
    above_one_and_a_half: Finding  # P(|q.k| > 1.5 sqrt(d_k))


@dataclass(frozen=True)
class Spread:
    """What one sample of products looks like."""

    d_k: int
    draws: int
    low: float
    high: float
    standard_deviation: float


@dataclass(frozen=True)
class Variance:
    widths: tuple[WidthVariance, ...]
    derivation: Derivation
    typical: Typical
    spreads: tuple[Spread, ...]
    findings: tuple[Finding, ...]


def variance(seed: int = 0) -> Variance:
    """Var(q.k) = d_k for independent entries of unit variance, measured at several widths."""
    typical = _typical(seed)
    spreads = tuple(_spread(d_k, draws, seed) for d_k in RANGE_CLAIM for draws in (100, 100_000))
    said = compare(
        "typical_size",
        typical.mean_size.measured,
        claim=TYPICAL_CLAIM,
        theory=typical.mean_size.theory,
        within=0.5,
    )
    return Variance(
        tuple(_width_variance(d_k, seed) for d_k in WIDTHS),
        _derivation(seed),
        typical,
        spreads,
        (said, _ranges(seed)),
    )


def _width_variance(d_k: int, seed: int) -> WidthVariance:
    vitals = _scores_seen(d_k, seed, "none")
    measured = float(vitals.logit_std) ** 2
    finding = compare("variance", measured, theory=float(d_k), within=0.01 * d_k)
    return WidthVariance(d_k, int(vitals.pairs), finding)


def _derivation(seed: int) -> Derivation:
    d_k = TYPICAL_WIDTH
    term = _scores_seen(1, seed, "none")

    def variance_under(rule: str) -> float:
        return float(_scores_seen(d_k, seed, rule).logit_std) ** 2

    return Derivation(
        compare("mean_of_term", float(term.logit_mean), theory=0.0, within=0.01),
        compare("variance_of_term", float(term.logit_std) ** 2, theory=1.0, within=0.01),
        compare("variance_of_sum", variance_under("none"), theory=float(d_k), within=0.01 * d_k),
        compare("divided_by_root", variance_under("sqrt_dk"), theory=1.0, within=0.01),
        compare("divided_by_width", variance_under("dk"), theory=1 / d_k, within=0.01 / d_k),
    )


def _scores_seen(d_k: int, seed: int, rule: str) -> Vitals:
    """Enough scores for a variance that is right to about 0.2 %.

    Its relative error is near sqrt(4 / entries) from the vectors and sqrt(1 / pairs) from their
    products, so wider vectors come in larger problems, which make more pairs of each vector.
    """
    tokens = min(512, max(64, d_k // 2))
    rows = min(ROWS, ENTRIES // d_k)
    return vitals_of_normals(seed, rows // tokens, tokens, d_k, rule)


def _typical(seed: int) -> Typical:
    d_k = TYPICAL_WIDTH
    root = math.sqrt(d_k)
    scores = _single_scores(seed, d_k, problems=2**16, rows=8)
    size = scores.abs()
    return Typical(
        d_k,
        compare("standard_deviation", float(scores.std()), theory=root, within=0.05),
        compare("mean_size", float(size.mean()), theory=_mean_size(d_k), within=0.05),
        compare("median_size", float(size.median()), theory=_median_size(d_k), within=0.05),
        compare("above", _share_above(size, root), theory=_tail(d_k, root), within=0.01),
        compare(
            "above", _share_above(size, 1.5 * root), theory=_tail(d_k, 1.5 * root), within=0.01
        ),
    )


def _single_scores(seed: int, d_k: int, problems: int, rows: int) -> Tensor:
    """Scores themselves: `rows` queries against one key, so that a row's maximum is its score."""
    generator = seeded(seed)
    parts = []
    for size in split(problems, rows * d_k):
        (query,) = normal(generator, (size, rows, d_k), 1)
        (key,) = normal(generator, (size, 1, d_k), 1)
        parts.append(row_vitals(query, key, "none").max_logit.flatten())
    return torch.cat(parts).double()


def _share_above(size: Tensor, threshold: float) -> float:
    return float((size > threshold).double().mean())


def _mean_size(d_k: int) -> float:
    """E|q.k| = E|N(0, 1)| E||q||, since q.k given q is normal with standard deviation ||q||."""
    norm = math.sqrt(2) * math.exp(math.lgamma((d_k + 1) / 2) - math.lgamma(d_k / 2))
    return math.sqrt(2 / math.pi) * norm


def _tail(d_k: int, threshold: float) -> float:
    """P(|q.k| > t) = E erfc(t / (sqrt(2) ||q||)), the norm following the chi distribution."""
    norm = torch.linspace(0, math.sqrt(d_k) + 10, 20_001, dtype=torch.float64)[1:]
    log_density = (d_k - 1) * norm.log() - norm.square() / 2
    density = torch.softmax(log_density, 0)
    return float((density * torch.erfc(threshold / (math.sqrt(2) * norm))).sum())


def _median_size(d_k: int) -> float:
    low, high = 0.0, 2 * math.sqrt(d_k)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _tail(d_k, middle) > 0.5 else (low, middle)
    return (low + high) / 2


def _spread(d_k: int, draws: int, seed: int) -> Spread:
    scores = _single_scores(seed, d_k, problems=draws, rows=1)
    return Spread(d_k, draws, float(scores.min()), float(scores.max()), float(scores.std()))


def _ranges(seed: int) -> Finding:
    """How much wider the products of 5 entries are than those of 2."""
    narrow, wide = RANGE_CLAIM
    claimed = {d_k: high - low for d_k, (low, high) in RANGE_CLAIM.items()}
    deviation = {d_k: float(_scores_seen(d_k, seed, "none").logit_std) for d_k in RANGE_CLAIM}
    return compare(
        "ranges",
        deviation[wide] / deviation[narrow],
        claim=claimed[wide] / claimed[narrow],
        theory=math.sqrt(wide / narrow),
        within=0.1,
    )
