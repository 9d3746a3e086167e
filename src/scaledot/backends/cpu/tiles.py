"""The geometry of a call: which keys a row may see, and how the work is cut into tiles.

A tile is [batch entries, key heads, query heads a key head, rows, keys]; everything larger than a
tile is an input, an output or one number a row, so memory does not grow with Q * K.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from scaledot.errors import ArgumentError
from scaledot.problem import Settings

ROWS = 128  # rows of a tile; fewer cost matrix-product efficiency, more cost causal waste
KEYS = 1024  # keys of a tile
TILE = 2 * ROWS * KEYS  # scores of a tile: two buffers of it stay in two cores' caches


class Diagonal(NamedTuple):
    """Row i may see the keys [low(i), high(i)); both ends never decrease with i."""

    first: int  # the sequence's keys are [first, last)
    last: int
    offset: int  # the diagonal passes through (row, row + offset)
    left: int | None
    right: int | None

    @property
    def keys(self) -> int:
        return self.last - self.first

    def low(self, row: int) -> int:
        if self.left is None:
            return self.first
        return min(max(row + self.offset - self.left, self.first), self.last)

    def high(self, row: int) -> int:
        if self.right is None:
            return self.last
        return min(max(row + self.offset + self.right + 1, self.first), self.last)

    def counts(self, row: int, row_end: int) -> Tensor:
        """Keys that each of the rows may see, int64; on the CPU, whatever the default device."""
        rows = torch.arange(row, row_end, device="cpu")
        low, high = torch.full_like(rows, self.first), torch.full_like(rows, self.last)
        if self.left is not None:
            low = (rows + (self.offset - self.left)).clamp(self.first, self.last)
        if self.right is not None:
            high = (rows + (self.offset + self.right + 1)).clamp(self.first, self.last)
        return (high - low).clamp(min=0)


class Slab(NamedTuple):
    """Rows [row, row_end) of the batch entries [start, stop): they see keys by one diagonal."""

    start: int
    stop: int
    row: int
    row_end: int
    diagonal: Diagonal


class Block(NamedTuple):
    """Rows [row, row_end) of some heads, against the keys [key, key_end)."""

    batch: slice
    groups: slice
    row: int
    row_end: int
    key: int
    key_end: int
    diagonal: Diagonal
    index: int  # position in the order of all blocks: names the block's random numbers

    @property
    def may_be_blind(self) -> bool:
        """Whether the diagonal may leave some row without keys: only the outermost rows can be."""
        see = self.diagonal
        ends = (self.row, self.row_end - 1)
        return any(see.high(row) <= see.low(row) for row in ends)


Fringe = list[tuple[slice, Tensor]]


def slabs(
    settings: Settings, batch: int, queries: int, keys: int, key_lengths: Tensor | None
) -> list[Slab]:
    """Neighbours in the batch with the same number of keys go together."""
    if key_lengths is None:
        diagonal = _diagonal(settings, (0, queries), (0, keys))
        return [Slab(0, batch, 0, queries, diagonal)] if batch else []
    lengths = key_lengths.tolist()
    wrong = [length for length in lengths if not 0 <= length <= keys]
    if wrong:
        raise ArgumentError(f"key_lengths holds {wrong[0]}, outside [0, {keys}], the key count")
    result: list[Slab] = []
    for entry, length in enumerate(lengths):
        diagonal = _diagonal(settings, (0, queries), (0, length))
        if result and result[-1].diagonal == diagonal:
            result[-1] = result[-1]._replace(stop=entry + 1)
        else:
            result.append(Slab(entry, entry + 1, 0, queries, diagonal))
    return result


def packed_slabs(
    settings: Settings, queries: int, keys: int, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
) -> list[Slab]:
    """One slab a sequence of a packed batch, empty ones too."""
    rows, columns = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for name, ends, tokens in (
        ("cu_seqlens_q", rows, queries),
        ("cu_seqlens_k", columns, keys),
    ):
        if ends[0] != 0 or ends[-1] != tokens or any(b < a for a, b in itertools.pairwise(ends)):
            raise ArgumentError(
                f"{name} must rise from 0 to {tokens}, the number of tokens; got {ends}"
            )
    return [
        Slab(0, 1, *row, _diagonal(settings, row, column))
        for row, column in zip(itertools.pairwise(rows), itertools.pairwise(columns), strict=True)
    ]


def _diagonal(settings: Settings, rows: tuple[int, int], keys: tuple[int, int]) -> Diagonal:
    end = 1 if settings.bottom_right else 0
    return Diagonal(*keys, keys[end] - rows[end], settings.left, settings.right)


def blocks(parts: list[Slab], groups: int, repeats: int) -> Iterator[Block]:
    """All blocks that see a key, in an order that depends on sizes only."""
    index = 0
    step = max(ROWS // repeats, 16)
    for slab in parts:
        for row in range(slab.row, slab.row_end, step):
            row_end = min(row + step, slab.row_end)
            key, key_end = slab.diagonal.low(row), slab.diagonal.high(row_end - 1)
            if key >= key_end:
                continue
            scores = repeats * (row_end - row) * min(key_end - key, KEYS)
            heads = max(TILE // scores, 1)  # key heads a tile
            for batch, group in _head_slices(slab, groups, heads):
                yield Block(batch, group, row, row_end, key, key_end, slab.diagonal, index)
                index += 1


def _head_slices(slab: Slab, groups: int, heads: int) -> Iterator[tuple[slice, slice]]:
    if heads >= groups:
        step = heads // groups
        for start in range(slab.start, slab.stop, step):
            yield slice(start, min(start + step, slab.stop)), slice(0, groups)
        return
    for start in range(slab.start, slab.stop):
        for group in range(0, groups, heads):
            yield slice(start, start + 1), slice(group, min(group + heads, groups))


def key_tiles(block: Block) -> Iterator[tuple[int, int]]:
    for key in range(block.key, block.key_end, KEYS):
        yield key, min(key + KEYS, block.key_end)


def fringe(block: Block, key: int, key_end: int) -> Fringe:
    """The columns of a tile in which some pair is hidden, with the hidden pairs [rows, columns]."""
    diagonal, found = block.diagonal, []
    first = max(diagonal.high(block.row), key)
    if diagonal.right is not None and first < key_end:
        rows = torch.arange(block.row, block.row_end).unsqueeze(1)
        columns = torch.arange(first, key_end)
        hidden = columns > rows + (diagonal.offset + diagonal.right)
        found.append((slice(first - key, key_end - key), hidden))
    last = min(diagonal.low(block.row_end - 1), key_end)
    if diagonal.left is not None and last > key:
        rows = torch.arange(block.row, block.row_end).unsqueeze(1)
        columns = torch.arange(key, last)
        hidden = columns < rows + (diagonal.offset - diagonal.left)
        found.append((slice(0, last - key), hidden))
    return found
