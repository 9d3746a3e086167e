"""The squares of query and key: what their root mean squares are made of."""

import triton
import triton.language as tl

from scaledot.backends.cuda.summary.places import batch_of, first_of, span_of
from scaledot.backends.cuda.summary.rows import which_count

LEAST_SQUARES = tl.constexpr(1e-30)  # a float32 sum below this may have lost entries


@triton.jit
def sum_squares(
    tokens,
    rows,
    entry,
    head,
    chunk,
    chunks,
    COUNTED_ONLY: tl.constexpr,
    AT_A_TIME: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Sum of the squares of finite entries, and how many there are, in one of a head's chunks.

    Chunk c of n takes the tiles c, c + n, c + 2n ... of the head's tokens; of a query those that
    are counted rows. Where the sum leaves float32, some entry is not finite, or some square was too
    large or too small: then the same entries are taken again, one by one and in float64.
    """
    start, stop = span_of(tokens, entry)
    first, step = start + chunk * AT_A_TIME, chunks * AT_A_TIME
    first_row = first_of(tokens, entry, head)
    entries_ptr = tokens.ptr + batch_of(tokens, entry) * tokens.stride_b + head * tokens.stride_h
    squares = tl.zeros([AT_A_TIME, WIDTH], tl.float32)
    if entries_ptr.dtype.element_ty == tl.float64:
        squares = squares.to(tl.float64)
    inside = tl.zeros([AT_A_TIME], tl.float64)
    for token in range(first, stop, step):
        places = token + tl.arange(0, AT_A_TIME)
        mask = _which_enter(rows, first_row, places, stop, COUNTED_ONLY)
        entries = _load_entries(tokens, entries_ptr, places, mask, WIDTH).to(squares.dtype)
        squares += entries * entries
        inside += mask
    total = tl.sum(tl.sum(squares, 1), 0).to(tl.float64)
    number = tl.sum(inside, 0) * tokens.width
    if not trusted(total):
        total = tl.zeros([], tl.float64)
        number = tl.zeros([], tl.float64)
        for token in range(first, stop, step):
            places = token + tl.arange(0, AT_A_TIME)
            mask = _which_enter(rows, first_row, places, stop, COUNTED_ONLY)
            entries = _load_entries(tokens, entries_ptr, places, mask, WIDTH)
            usable = mask[:, None] & (tl.arange(0, WIDTH) < tokens.width)[None, :]
            usable &= tl.abs(entries.to(squares.dtype)) < float("inf")
            exact = tl.where(usable, entries, 0.0).to(tl.float64)
            total += tl.sum(tl.sum(exact * exact, 1), 0)
            number += tl.sum(tl.sum(usable.to(tl.int32), 1), 0)
    return total, number


@triton.jit
def trusted(total):
    """Whether a sum of squares in float32 has neither overflowed nor lost small entries."""
    return (total >= LEAST_SQUARES) & (total < float("inf"))


@triton.jit
def _which_enter(rows, first_row, places, stop, COUNTED_ONLY: tl.constexpr):
    mask = places < stop
    if COUNTED_ONLY:
        mask = which_count(rows, first_row + places, mask)
    return mask


@triton.jit
def _load_entries(tokens, entries_ptr, places, mask, WIDTH: tl.constexpr):
    """[places, WIDTH], zeros outside of the mask and of the width."""
    offs_d = tl.arange(0, WIDTH)
    columns = offs_d * tl.cast(tokens.stride_column, tl.int64)
    offsets = places[:, None] * tokens.stride_row + columns[None, :]
    inside = mask[:, None] & (offs_d < tokens.width)[None, :]
    return tl.load(entries_ptr + offsets, inside, other=0.0)
