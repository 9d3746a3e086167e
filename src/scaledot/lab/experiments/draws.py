"""Standard normal queries and keys, and what `scaledot.vitals` sees in them.

Large samples come in chunks, each merged into the vitals so far: memory stays small, and the same
seed gives the same numbers again for another scale rule.
"""

import functools

import torch
from torch import Tensor

import scaledot
from scaledot.measure import RowVitals, Vitals

CHUNK = 2**18  # entries of q drawn at once: a few megabytes in all


def normal(generator: torch.Generator, shape: tuple[int, ...], count: int) -> list[Tensor]:
    return [torch.randn(shape, generator=generator) for _ in range(count)]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def split(problems: int, entries: int) -> list[int]:
    """Problems of so many entries each, cut into chunks of at most CHUNK entries."""
    step = max(CHUNK // entries, 1)
    return [min(step, problems - start) for start in range(0, problems, step)]


def vitals_of_normals(
    seed: int, problems: int, tokens: int, d_k: int, scale: str, num_heads: int | None = None
) -> Vitals:
    """Of `problems` problems, `tokens` queries and as many keys each, all merged: shape [1]."""
    generator = seeded(seed)
    parts = []
    for size in split(problems, tokens * d_k):
        query, key = normal(generator, (size, 1, tokens, d_k), 2)
        seen = scaledot.vitals(query, key, scale=scale, num_heads=num_heads)
        parts.append(seen.over_batch())
    return functools.reduce(Vitals.merge, parts)


def row_vitals(query: Tensor, key: Tensor, scale: str = "sqrt_dk") -> RowVitals:
    rows = scaledot.vitals(query, key, scale=scale, per_row=True).per_row
    assert rows is not None  # asked for
    return rows
