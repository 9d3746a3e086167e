"""Lesson on the divisor: none, sqrt(d_k), d_k or sqrt(d_model)."""

import math
from dataclasses import dataclass

from torch import Tensor

import scaledot
from scaledot import scale as scale_rules
from scaledot.lab.experiments.finding import Finding, compare, normal

RULES = ("none", "sqrt_dk", "dk", "sqrt_dmodel")
HEADS = 8
MANY_HEADS = (2, 8, 12, 96)


@dataclass(frozen=True)
class Divided:
    rule: str
    divisor: float
    standard_deviation: Finding  # of the divided scores
    top_p: float
    entropy_ratio: float


@dataclass(frozen=True)
class HeadCount:
    heads: int
    standard_deviation: float  # of the scores divided by sqrt(d_model)


@dataclass(frozen=True)
class Aligned:
    """The mean score of a vector with itself, under three rules."""

    none: float
    sqrt_dk: float
    dk: float


@dataclass(frozen=True)
class Divisors:
    d_k: int
    keys: int
    heads: int
    rules: tuple[Divided, ...]
    head_counts: tuple[HeadCount, ...]
    aligned: Aligned
    findings: tuple[Finding, ...]


def divisors(seed: int = 0, d_k: int = 64, keys: int = 16, problems: int = 1024) -> Divisors:
    """The same queries and keys under every rule, as the softmax sees them."""
    query, key = normal(seed, (problems, 1, keys, d_k), (problems, 1, keys, d_k))
    rules = tuple(_divided(query, key, rule) for rule in RULES)
    head_counts = tuple(HeadCount(heads, _deviation(query, key, heads)) for heads in MANY_HEADS)
    aligned = Aligned(*(_with_itself(query, rule) for rule in ("none", "sqrt_dk", "dk")))
    by_rule = {row.rule: row.standard_deviation for row in rules}
    findings = (
        compare("unit", by_rule["sqrt_dk"].measured, claim=1.0, theory=1.0, within=0.02),
        compare(
            "width_does_as_well",
            by_rule["dk"].measured,
            claim=1.0,
            theory=by_rule["dk"].theory,
            within=0.02,
        ),
        compare(
            "model_width_undercorrects",
            float(sum(row.standard_deviation > 1 for row in head_counts)),
            claim=1.0,
            theory=0.0,
            within=0.5,
        ),
    )
    return Divisors(d_k, keys, HEADS, rules, head_counts, aligned, findings)


def _divided(query: Tensor, key: Tensor, rule: str) -> Divided:
    d_k = query.shape[-1]
    vitals = scaledot.vitals(query, key, scale=rule, num_heads=HEADS).over_batch()
    factor = scale_rules.resolve(rule, d_k, HEADS)
    theory = math.sqrt(d_k) * factor
    return Divided(
        rule,
        1 / factor,
        compare("divided", float(vitals.logit_std), theory=theory, within=0.02 * theory),
        float(vitals.top_p),
        float(vitals.entropy_ratio),
    )


def _deviation(query: Tensor, key: Tensor, heads: int) -> float:
    vitals = scaledot.vitals(query, key, scale="sqrt_dmodel", num_heads=heads)
    return float(vitals.over_batch().logit_std)


def _with_itself(query: Tensor, rule: str) -> float:
    """The mean score of a vector with itself: what training does that aligns q and k."""
    each = query.reshape(-1, 1, query.shape[-1])[:4096]
    return float(scaledot.vitals(each, each, scale=rule).max_logit.mean())  # one pair each
