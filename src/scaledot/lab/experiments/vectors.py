"""Small vectors by hand: q.k is the sum of the products of their entries."""

import functools
import math
from dataclasses import dataclass
from itertools import product

import torch

import scaledot
from scaledot.lab.experiments.lesson import Claim, Control, Lesson, claim

# (query, key, their product as the notes have it); the last row is five entries of 64
BY_HAND = (
    ((1.0, -1.0), (1.0, 1.0), 0.0),
    ((2.0, -1.0), (1.0, 3.0), -1.0),
    ((1.0, -1.0, 1.0, -1.0), (1.0, 1.0, 1.0, 1.0), 0.0),
    ((2.0, -1.0, 2.0, -1.0), (1.0, 2.0, 1.0, 2.0), 0.0),
    ((0.8, -1.1, 0.5, 1.3, -0.9), (1.0, 0.7, -0.6, 0.9, -1.2), None),
)
FIRST_FIVE = (0.8, -0.77, -0.3, 1.17, 1.08)  # the notes' products of the last row
LUCKY = 3  # the row whose 0 is luck
EXACT = 1e-9  # these are sums of a few doubles


@dataclass(frozen=True)
class VectorRow:
    q: tuple[float, ...]
    k: tuple[float, ...]
    products: tuple[float, ...]
    dot: float
    folklore: float | None  # None: the notes give the products only


@dataclass(frozen=True)
class VectorsResult:
    """Placeholders: dot, cosine, q_norm, k_norm, flipped_dot, zero_share.

    claims: `by_hand` (the dot products of the table), `first_five` (the products of its last row),
    `cancel` ("alternating signs cancel": the share of sign patterns of the lucky row that do).
    """

    q: tuple[float, ...]
    k: tuple[float, ...]
    products: tuple[float, ...]
    dot: float
    cosine: float  # 0 where a vector is zero: it has no direction
    q_norm: float
    k_norm: float
    table: tuple[VectorRow, ...]
    flipped_dot: float  # of the lucky row, the last sign of its query turned
    sign_patterns: int  # ways to sign the lucky row's query
    zero_share: float  # of them, those whose dot product is 0
    claims: tuple[Claim, ...]


def vectors(*, q: tuple[float, ...] = (1.0, -1.0), k: tuple[float, ...] = (1.0, 1.0)):
    """The products of two vectors, entry by entry, and the notes' five examples."""
    if len(q) != len(k):
        raise ValueError(f"q has {len(q)} numbers but k has {len(k)}; give both the same length")
    table = _table()
    lucky = table[LUCKY]
    q_norm, k_norm = math.hypot(*q), math.hypot(*k)
    dot = _dot(q, k)
    signed = _signed_dots(lucky)
    zeros = sum(abs(value) <= EXACT for value in signed) / len(signed)
    half = len(lucky.q) // 2
    return VectorsResult(
        q=tuple(q),
        k=tuple(k),
        products=_products(q, k),
        dot=dot,
        cosine=dot / (q_norm * k_norm) if q_norm * k_norm else 0.0,
        q_norm=q_norm,
        k_norm=k_norm,
        table=table,
        flipped_dot=signed[1],  # the second pattern turns the last sign
        sign_patterns=len(signed),
        zero_share=zeros,
        claims=(
            claim(
                "by_hand",
                folklore=tuple(row.folklore for row in table if row.folklore is not None),
                measured=tuple(row.dot for row in table if row.folklore is not None),
                tolerance=EXACT,
            ),
            claim("first_five", folklore=FIRST_FIVE, measured=table[-1].products, tolerance=EXACT),
            # All products of the lucky row have one size, so half of the signs must be plus.
            claim(
                "cancel",
                folklore=1.0,
                measured=zeros,
                theory=math.comb(len(lucky.q), half) / len(signed),
                tolerance=EXACT,
            ),
        ),
    )


@functools.cache
def _table() -> tuple[VectorRow, ...]:
    return tuple(_row(*row) for row in BY_HAND)


def _row(q: tuple[float, ...], k: tuple[float, ...], folklore: float | None) -> VectorRow:
    return VectorRow(q, k, _products(q, k), _dot(q, k), folklore)


def _products(q: tuple[float, ...], k: tuple[float, ...]) -> tuple[float, ...]:
    return tuple((_double(q) * _double(k)).tolist())


def _dot(q: tuple[float, ...], k: tuple[float, ...]) -> float:
    """As attention computes it: with one key, the largest score is the score."""
    return float(scaledot.vitals(_double(q)[None], _double(k)[None], scale="none").max_logit)


def _double(numbers: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


@functools.cache
def _signed_dots(row: VectorRow) -> tuple[float, ...]:
    """The dot product under every choice of signs for q, (+, +, ..., +) first."""
    signs = torch.tensor(list(product((1.0, -1.0), repeat=len(row.q))), dtype=torch.float64)
    queries = (signs * _double(row.q))[:, None]  # one query and one key a pattern
    keys = _double(row.k).expand_as(queries)
    return tuple(scaledot.vitals(queries, keys, scale="none").max_logit.tolist())


def _code(q: tuple[float, ...], k: tuple[float, ...]) -> str:
    return f"""\
import torch

q = torch.tensor({list(q)}, dtype=torch.float64)
k = torch.tensor({list(k)}, dtype=torch.float64)
print("products", (q * k).tolist())
print("dot", (q @ k).item())
print("q_norm", q.norm().item())
print("k_norm", k.norm().item())
print("cosine", torch.cosine_similarity(q, k, dim=0, eps=1e-300).item())
"""


LESSON = Lesson(
    "vectors",
    vectors,
    (
        Control("q", "numbers", (1.0, -1.0), length=64),
        Control("k", "numbers", (1.0, 1.0), length=64),
    ),
    _code,
)
