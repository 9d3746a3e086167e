"""The gradient through the softmax: dp_i/dz_j = p_i (delta_ij - p_j)."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

import scaledot
from scaledot.lab.experiments.lesson import Claim, Control, Lesson, claim
from scaledot.lab.experiments.saturation import DIVISOR, problem

# Rows of scores and what the notes have for p (1 - p) of the winner, half a digit beside it.
NOTED = (
    ("open", (1.5, 0.25, -0.125), 0.2197, 5e-5),
    ("closed", (12.0, 2.0, -1.0), 4.8e-5, 5e-7),
    ("sealed", (25.0, 2.0, -3.0), 1e-10, 5e-12),
    ("two_keys", (7.0, 3.0), 0.0177, 5e-5),
)
DISTANCES = 49  # of two scores, from -6 to 6, where the steepest slope is looked for


@dataclass(frozen=True)
class JacobianRow:
    key: str
    scores: tuple[float, ...]
    slope: float  # p (1 - p) of the winner
    folklore: float


@dataclass(frozen=True)
class JacobianResult:
    """Placeholders: divisor, top, slope, trace, passed, steepest.

    claims: `quarter` ("p (1 - p) is at most 0.25"), `slope_open`, `slope_closed`, `slope_sealed`,
    `slope_two_keys` (the table's rows), `no_gradient` ("a saturated row gets no gradient": 0
    against p (1 - p) at [12, 2, -1]), `formula` (the largest difference of autograd's Jacobian
    from diag(p) - p p^T).
    """

    scores: tuple[float, ...]
    divisor: float
    weights: tuple[float, ...]
    diagonal: tuple[float, ...]  # p_i (1 - p_i)
    matrix: tuple[tuple[float, ...], ...]  # dp_i/dz_j by autograd through scaledot.attention
    top: int
    slope: float  # the diagonal's entry of the largest weight
    trace: float
    passed: float  # 1 - sum p^2 as the vitals report it: the same number as the trace
    steepest: float  # the largest slope of two keys over a sweep of their distance
    table: tuple[JacobianRow, ...]
    claims: tuple[Claim, ...]


def jacobian(*, scores: tuple[float, ...] = (1.5, 0.25, -0.125), divisor: float = 1.0):
    """How far each weight moves when one divided score moves."""
    logits = tuple(score / divisor for score in scores)
    weights, matrix = _through(logits)
    query, key, _ = problem(logits)
    diagonal, top = matrix.diagonal(), int(weights.argmax())
    table, steepest = _table(), _steepest()
    formula = weights.diag() - weights.outer(weights)
    slopes = [
        claim(f"slope_{key}", folklore=said, measured=row.slope, tolerance=tolerance)
        for (key, _, said, tolerance), row in zip(NOTED, table, strict=True)
    ]
    return JacobianResult(
        scores=tuple(scores),
        divisor=divisor,
        weights=tuple(weights.tolist()),
        diagonal=tuple(diagonal.tolist()),
        matrix=tuple(tuple(row) for row in matrix.tolist()),
        top=top,
        slope=float(diagonal[top]),
        trace=float(matrix.trace()),
        passed=float(scaledot.vitals(query, key, scale="none").passes),
        steepest=steepest,
        table=table,
        claims=(
            claim("quarter", folklore=0.25, measured=steepest, theory=0.25, tolerance=1e-9),
            *slopes,
            # Zero is said without a digit after it, so nothing but zero agrees.
            claim("no_gradient", folklore=0.0, measured=table[1].slope, tolerance=0.0),
            claim(
                "formula",
                folklore=0.0,
                measured=float((matrix - formula).abs().max()),
                theory=0.0,
                tolerance=1e-12,
            ),
        ),
    )


def _through(logits: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """The weights p and dp_i/dz_j, by autograd: one output a row, all rows at once."""
    number = len(logits)
    query, key, identity = problem(logits)
    keys = key.expand(number, number, 1).contiguous().requires_grad_()  # one copy for each p_i
    queries, values = query.expand(number, 1, 1), identity.expand(number, number, number)
    out = scaledot.attention(queries, keys, values, scale="none")[:, 0]
    (gradient,) = torch.autograd.grad(out.diagonal().sum(), keys)
    return out[0].detach(), gradient[..., 0]


@functools.cache
def _table() -> tuple[JacobianRow, ...]:
    return tuple(JacobianRow(key, row, _winner(row), said) for key, row, said, _ in NOTED)


def _winner(logits: tuple[float, ...]) -> float:
    weights, matrix = _through(logits)
    return float(matrix.diagonal()[weights.argmax()])


@functools.cache
def _steepest() -> float:
    """The largest dp/dz of two keys as their distance goes from -6 to 6."""
    distance = torch.linspace(-6, 6, DISTANCES, dtype=torch.float64)
    key = torch.stack([distance, torch.zeros_like(distance)], -1)[..., None].requires_grad_()
    query = torch.ones(len(distance), 1, 1, dtype=torch.float64)
    identity = torch.eye(2, dtype=torch.float64).expand(len(distance), 2, 2)
    first_weight = scaledot.attention(query, key, identity, scale="none")[..., 0]
    (slope,) = torch.autograd.grad(first_weight.sum(), key)
    return float(slope[:, 0, 0].max())


def _code(scores: tuple[float, ...], divisor: float) -> str:
    return f"""\
import torch

logits = torch.tensor({list(scores)}, dtype=torch.float64) / {divisor}
weights = torch.softmax(logits, dim=-1)
matrix = torch.autograd.functional.jacobian(lambda z: torch.softmax(z, dim=-1), logits)
print("weights", weights.tolist())
print("matrix", matrix.tolist())  # diag(p) - p p^T
print("diagonal", (weights * (1 - weights)).tolist())
print("trace", matrix.trace().item())
print("passed", 1 - weights.square().sum().item())
"""


LESSON = Lesson(
    "jacobian",
    jacobian,
    (Control("scores", "numbers", (1.5, 0.25, -0.125), length=16), DIVISOR),
    _code,
)
