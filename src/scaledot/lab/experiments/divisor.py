"""Lesson on the divisor: none, sqrt(d_k), d_k or sqrt(d_model)."""

import math
from dataclasses import dataclass

import scaledot
from scaledot import scale as scale_rules
from scaledot.lab.experiments.draws import normal, seeded, vitals_of_normals
from scaledot.lab.experiments.finding import Finding, compare
from scaledot.measure import Vitals

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


@dataclass(frozen=True)
class Sample:
    """Which draws every rule is shown."""

    seed: int
    problems: int
    keys: int
    d_k: int

    def under(self, rule: str, heads: int | None = None) -> Vitals:
        return vitals_of_normals(self.seed, self.problems, self.keys, self.d_k, rule, heads)


def divisors(seed: int = 0, d_k: int = 64, keys: int = 16, problems: int = 1024) -> Divisors:
    """The same queries and keys under every rule, as the softmax sees them."""
    sample = Sample(seed, problems, keys, d_k)
    rules = tuple(_divided(sample, rule) for rule in RULES)
    head_counts = tuple(_head_count(sample, heads) for heads in MANY_HEADS)
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
    return Divisors(d_k, keys, HEADS, rules, head_counts, _aligned(seed, d_k), findings)


def _divided(sample: Sample, rule: str) -> Divided:
    vitals = sample.under(rule, HEADS)
    factor = scale_rules.resolve(rule, sample.d_k, HEADS)
    theory = math.sqrt(sample.d_k) * factor
    return Divided(
        rule,
        1 / factor,
        compare("divided", float(vitals.logit_std), theory=theory, within=0.02 * theory),
        float(vitals.top_p),
        float(vitals.entropy_ratio),
    )


def _head_count(sample: Sample, heads: int) -> HeadCount:
    return HeadCount(heads, float(sample.under("sqrt_dmodel", heads).logit_std))


def _aligned(seed: int, d_k: int) -> Aligned:
    """Vectors with themselves: where training that aligns q and k ends up."""
    (query,) = normal(seeded(seed), (4096, 1, d_k), 1)
    scores = (
        scaledot.vitals(query, query, scale=rule).max_logit for rule in ("none", "sqrt_dk", "dk")
    )
    return Aligned(*(float(score.mean()) for score in scores))  # one pair each: its score
