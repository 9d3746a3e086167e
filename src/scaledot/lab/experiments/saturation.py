"""The softmax saturates: one large score takes all the weight."""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

import scaledot
from scaledot.lab.experiments.lesson import Claim, Control, Lesson, claim


@dataclass(frozen=True)
class Noted:
    """A row of scores as the notes have it, with half a unit of the last digit they give."""

    key: str
    scores: tuple[float, ...]
    divisor: float
    weights: tuple[float, ...]
    tolerance: float


NOTED = (
    Noted("saturated", (12.0, 2.0, -1.0), 1.0, (0.99995, 0.00004, 0.00001), 5e-6),
    Noted("scaled", (12.0, 2.0, -1.0), 8.0, (0.59, 0.17, 0.24), 5e-3),
    Noted("extreme", (25.0, 2.0, -3.0), 1.0, (1.0, 0.0, 0.0), 0.5),
    Noted("two_keys", (7.0, 3.0), 1.0, (0.98, 0.02), 5e-3),
)
# The notes' exponentials of the first two rows; 162754.79 was cut, not rounded: hence 1.
EXPONENTIALS = (
    ("exponentials", 0, (162754.0, 7.4, 0.37), 1.0),
    ("scaled_exponentials", 1, (4.48, 1.28, 0.88), 5e-3),
)


@dataclass(frozen=True)
class SaturationRow:
    key: str
    scores: tuple[float, ...]
    divisor: float
    logits: tuple[float, ...]  # scores / divisor
    exponentials: tuple[float, ...]
    weights: tuple[float, ...]
    folklore: tuple[float, ...]  # the notes' weights


@dataclass(frozen=True)
class SaturationResult:
    """Placeholders: divisor, entropy, entropy_ratio, top, max_probability, passes.

    claims: `saturated`, `scaled`, `extreme`, `two_keys` (the weights of the table's rows, which
    have the same keys), `exponentials`, `scaled_exponentials` (of its first two rows), `order`
    (which of the scaled scores the notes give the second largest weight, counted from 0).
    """

    scores: tuple[float, ...]
    divisor: float
    logits: tuple[float, ...]
    exponentials: tuple[float, ...]
    weights: tuple[float, ...]
    entropy: float  # nats
    entropy_ratio: float  # of ln n; 0 for one score
    top: int  # index of the largest weight
    max_probability: float
    passes: float  # 1 - sum p^2
    table: tuple[SaturationRow, ...]
    claims: tuple[Claim, ...]


def saturation(*, scores: tuple[float, ...] = (12.0, 2.0, -1.0), divisor: float = 1.0):
    """The weights of one row of scores, and those of the notes' rows."""
    query, key, identity = problem(scores)
    out, vitals = scaledot.attention_with_vitals(query, key, identity, scale=1 / divisor)
    weights = out[0]
    table = _table()
    return SaturationResult(
        scores=tuple(scores),
        divisor=divisor,
        logits=tuple(score / divisor for score in scores),
        exponentials=_exponentials(scores, divisor),
        weights=tuple(weights.tolist()),
        entropy=float(vitals.entropy),
        entropy_ratio=float(vitals.entropy_ratio),
        top=int(weights.argmax()),
        max_probability=float(vitals.top_p),
        passes=float(vitals.passes),
        table=table,
        claims=(*_weight_claims(table), *_exponential_claims(table), _order_claim(table[1])),
    )


def problem(scores: tuple[float, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Query, keys and values whose scores are `scores` and whose output is the weights.

    The query is 1, key j is score j, and the values are the identity.
    """
    key = torch.tensor(scores, dtype=torch.float64)[:, None]
    return torch.ones(1, 1, dtype=torch.float64), key, torch.eye(len(scores), dtype=torch.float64)


@functools.cache
def _table() -> tuple[SaturationRow, ...]:
    return tuple(_row(noted) for noted in NOTED)


def _row(noted: Noted) -> SaturationRow:
    return SaturationRow(
        noted.key,
        noted.scores,
        noted.divisor,
        tuple(score / noted.divisor for score in noted.scores),
        _exponentials(noted.scores, noted.divisor),
        tuple(scaledot.attention(*problem(noted.scores), scale=1 / noted.divisor)[0].tolist()),
        noted.weights,
    )


def _exponentials(scores: tuple[float, ...], divisor: float) -> tuple[float, ...]:
    """Typed scores may be past what a double's exp holds: inf, as the naive formula has it."""
    return tuple((torch.tensor(scores, dtype=torch.float64) / divisor).exp().tolist())


def _weight_claims(table: tuple[SaturationRow, ...]) -> list[Claim]:
    return [
        claim(
            noted.key,
            folklore=noted.weights,
            measured=row.weights,
            theory=tuple(value / math.fsum(row.exponentials) for value in row.exponentials),
            tolerance=noted.tolerance,
        )
        for noted, row in zip(NOTED, table, strict=True)
    ]


def _exponential_claims(table: tuple[SaturationRow, ...]) -> list[Claim]:
    return [
        claim(key, folklore=said, measured=table[row].exponentials, tolerance=tolerance)
        for key, row, said, tolerance in EXPONENTIALS
    ]


def _order_claim(row: SaturationRow) -> Claim:
    def second(numbers: tuple[float, ...]) -> float:
        return float(sorted(range(len(numbers)), key=lambda index: -numbers[index])[1])

    return claim(
        "order",
        folklore=second(row.folklore),
        measured=second(row.weights),
        theory=second(row.scores),
        tolerance=0.0,
    )


def _code(scores: tuple[float, ...], divisor: float) -> str:
    return f"""\
import torch

scores = torch.tensor({list(scores)}, dtype=torch.float64)
logits = scores / {divisor}
weights = torch.softmax(logits, dim=-1)
print("logits", logits.tolist())
print("exponentials", logits.exp().tolist())
print("weights", weights.tolist())
print("entropy", -torch.special.xlogy(weights, weights).sum().item())
print("max_probability", weights.max().item())
print("passes", 1 - weights.square().sum().item())
"""


DIVISOR = Control("divisor", "range", 1.0, low=0.25, high=64.0, step=0.25)
LESSON = Lesson(
    "saturation",
    saturation,
    (Control("scores", "numbers", (12.0, 2.0, -1.0), length=16), DIVISOR),
    _code,
)
