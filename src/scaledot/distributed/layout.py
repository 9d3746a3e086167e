"""Who holds which tokens of a sequence.

contiguous: rank r holds one stretch, after those of the ranks before it; stretches may differ in
length. zigzag: the sequence is cut into 2R chunks and rank r holds chunk r and chunk 2R-1-r, so
that under a causal mask every rank has the same work.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from scaledot.errors import ArgumentError

LAYOUTS = ("contiguous", "zigzag")


class Segment(NamedTuple):
    """A stretch of the sequence that lies in one piece in a rank's shard."""

    start: int  # position of its first token in the sequence
    length: int


Shard = tuple[Segment, ...]  # in the order in which the rank holds them


def check(layout: str) -> None:
    if layout not in LAYOUTS:
        names = " or ".join(repr(name) for name in LAYOUTS)
        raise ArgumentError(f"layout={layout!r}; use {names}")


def cut(tokens: int, ranks: int, layout: str) -> list[Shard]:
    """The shards of a sequence, one a rank, as even as they can be."""
    check(layout)
    if layout == "contiguous":
        return [(segment,) for segment in _stretches(tokens, ranks)]
    chunks = _stretches(tokens, 2 * ranks)
    return [(chunks[rank], chunks[2 * ranks - 1 - rank]) for rank in range(ranks)]


def of_lengths(lengths: Sequence[int], layout: str, what: str) -> list[Shard]:
    """The shards of ranks that hold so many tokens each."""
    check(layout)
    if layout == "contiguous":
        starts = itertools.accumulate(lengths, initial=0)
        return [(Segment(start, length),) for start, length in zip(starts, lengths, strict=False)]
    shards = cut(sum(lengths), len(lengths), layout)
    for rank, (shard, length) in enumerate(zip(shards, lengths, strict=True)):
        if tokens_of(shard) != length:
            raise ArgumentError(
                f"rank {rank} holds {length} {what}, but a zigzag of {sum(lengths)} over "
                f"{len(lengths)} ranks gives it {tokens_of(shard)}; cut the sequence with "
                f"scaledot.distributed.shard(tensor, mesh, dim, layout='zigzag')"
            )
    return shards


def tokens_of(shard: Shard) -> int:
    return sum(segment.length for segment in shard)


def _stretches(tokens: int, parts: int) -> list[Segment]:
    """As torch.tensor_split cuts: the first ones are longer by one where it does not come out."""
    least, more = divmod(tokens, parts)
    lengths = [least + (part < more) for part in range(parts)]
    starts = itertools.accumulate(lengths, initial=0)
    return [Segment(start, length) for start, length in zip(starts, lengths, strict=False)]
