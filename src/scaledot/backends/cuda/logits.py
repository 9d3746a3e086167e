"""What a logit is: heads in memory, a row's scale, the cap, mask tensors and dropout.

Logits live in base 2 (x = logit * log2 e), so that e^logit is one exp2.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from scaledot.backends.cuda.visible import reachable, row_bounds, visible

LOG2E = tl.constexpr(1.4426950408889634)  # e^x = 2^(x * LOG2E)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST_32 = tl.constexpr(-3.4028234663852886e38)
LOWEST_64 = tl.constexpr(-1.7976931348623157e308)
LOWEST_BF16 = tl.constexpr(-3.3895313892515355e38)
LOWEST_16 = tl.constexpr(-65504.0)
PHILOX_ROUNDS = tl.constexpr(7)  # the fewest that pass BigCrush (Salmon et al. 2011, table 2)


class Matrix(NamedTuple):
    """One head's matrix in memory."""

    ptr: Any
    stride_row: Any
    stride_column: Any


@triton.jit
def number(value, dtype: tl.constexpr):
    """A number of the call in the compute type.

    Triton passes floats as float32, so float64 calls bring their numbers as tensors.
    """
    return tl.load(value) if dtype == tl.float64 else tl.zeros([], dtype) + value


@triton.jit
def lowest(dtype: tl.constexpr):
    """The lowest finite number of a float type."""
    result: tl.constexpr = (
        LOWEST_64
        if dtype == tl.float64
        else (
            LOWEST_16
            if dtype == tl.float16
            else (LOWEST_BF16 if dtype == tl.bfloat16 else LOWEST_32)
        )
    )
    return result


# --- heads in memory -----------------------------------------------------------------------------


@triton.jit
def entry(tensor, b, h):
    """The address of head h of batch entry b, both int64."""
    return tensor.ptr + b * tensor.stride_b + h * tensor.stride_h


@triton.jit
def matrix_of(tensor, b, h):
    return Matrix(entry(tensor, b, h), tensor.stride_row, tensor.stride_column)


@triton.jit
def load_rows(
    matrix,
    rows,
    end,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    EDGE: tl.constexpr,
    part=0,
):
    """[rows, BLOCK] of a matrix [tokens, WIDTH]: 0 past its width and, at an EDGE, past `end`.

    part: which BLOCK of the columns, where the width takes several.
    """
    columns = part * BLOCK + tl.arange(0, BLOCK)
    ptrs = (
        matrix.ptr
        + rows.to(tl.int64)[:, None] * matrix.stride_row
        + columns.to(tl.int64)[None, :] * matrix.stride_column
    )
    if EDGE:
        inside = (rows < end)[:, None] & (columns < WIDTH)[None, :]
        tile = tl.load(ptrs, mask=inside, other=0.0)
    elif WIDTH != BLOCK:
        tile = tl.load(ptrs, mask=(columns < WIDTH)[None, :], other=0.0)
    else:
        tile = tl.load(ptrs)
    return tile


@triton.jit
def holds_broken(
    matrix, begin, end, stop, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """Whether a number of the rows [begin, end) before `stop` is not finite."""
    found = tl.zeros([ROWS], tl.int32)
    for start in range(begin, end, ROWS):
        rows = start + tl.arange(0, ROWS)
        for part in range(0, (WIDTH + BLOCK - 1) // BLOCK):
            tile = load_rows(matrix, rows, stop, WIDTH, BLOCK, True, part)
            # 0 times what is not finite is NaN
            broken = tile.to(tl.float32) * 0.0 != 0.0
            found = tl.maximum(found, tl.max(broken.to(tl.int32), 1))
    return tl.max(found, 0) > 0


# --- from scores to logits -----------------------------------------------------------------------


@triton.jit
def row_scale(call, place, rows):
    """What turns a row's raw scores into logits of base 2: one number, or like rows where LOG_N.

    ln(n) * log2 e is log2(n).
    """
    factor = number(call.scale, call.FLOAT)
    if call.head_scale.ptr is not None:
        factor = factor * tl.load(entry(call.head_scale, place.b, place.h)).to(call.FLOAT)
    if call.LOG_N:
        if call.counts.ptr is not None:
            counts_ptr = entry(call.counts, place.b, place.h)
            count = tl.load(counts_ptr + rows, mask=rows < place.seq.row_end, other=1)
        else:
            low, high = row_bounds(rows, place.seq, call.window)
            count = tl.maximum(high - low, 0) + tl.zeros_like(rows)
        factor = factor * tl.log2(tl.maximum(count, 1).to(call.FLOAT))
    else:
        factor = factor * LOG2E
    return factor


@triton.jit
def tanh(x, PRECISE: tl.constexpr):
    """1 - 2 / (e^2x + 1); where that cancels, x - x^3 / 3, or if PRECISE Lambert's fraction."""
    exponential = tl.exp2(x * (2.0 * LOG2E))
    result = 1.0 - 2.0 / (exponential + 1.0)
    square = x * x
    if PRECISE:  # below 1/2 the fraction's relative error is 2e-16
        top = x * (135135.0 + square * (17325.0 + square * (378.0 + square)))
        bottom = 135135.0 + square * (62370.0 + square * (3150.0 + square * 28.0))
        result = tl.where(tl.abs(x) < 0.5, top / bottom, result)
    else:  # below 1/50 the series' is 2e-8, above it the formula's 5e-6
        result = tl.where(square < 4e-4, x - x * square * (1.0 / 3.0), result)
    return result


@triton.jit
def capped(call, z, PRECISE: tl.constexpr):
    """cap * tanh(z / cap) for logits of base 2, and the derivative."""
    softcap = number(call.softcap, call.FLOAT)
    bent = tanh(z * (LN2 / softcap), PRECISE)
    return bent * (softcap * LOG2E), 1.0 - bent * bent


@triton.jit
def _apart_from_load(x, dtype: tl.constexpr):
    """The numbers [M, N], as a sum of one term each where products of `dtype` cannot take them.

    Triton 3.6 lays out a product's operands by the narrowest type that was loaded for them, and
    cannot compile a float64 product if that has less than 32 bits. It looks through no sum.
    """
    if dtype == tl.float64 and x.dtype.primitive_bitwidth < 32:
        x = tl.sum(x[:, :, None], 2)
    return x


@triton.jit
def masked_pairs(call, place, i, j):
    """(bias in base 2, visible, read) of pairs, by position and by the mask tensor.

    The mask is not read where position hides. A bias of -inf hides. One at or below half of its
    type's lowest number is not read by the statistics; times log2 e it could leave float32, so it
    stops at the lowest number instead.
    """
    seen = visible(i, j, place.seq, call.window)
    offsets = i.to(tl.int64) * call.mask.stride_row + j.to(tl.int64) * call.mask.stride_column
    loaded = tl.load(entry(call.mask, place.b, place.h) + offsets, mask=seen, other=0)
    mask = _apart_from_load(loaded, call.FLOAT)
    if loaded.dtype.is_int():
        seen = seen & (mask != 0)
        bias = tl.zeros(mask.shape, call.FLOAT)
        read = seen
    else:
        half: tl.constexpr = lowest(loaded.dtype) / 2
        hidden = mask.to(call.FLOAT) == float("-inf")
        seen = seen & (hidden == 0)
        read = seen & ((mask.to(call.FLOAT) <= half) == 0)  # NaN is read, and shows
        bias = mask.to(call.FLOAT) * LOG2E
        bias = tl.where(bias < lowest(call.FLOAT), lowest(call.FLOAT), bias)
    return bias, seen, read


@triton.jit
def see_keys(rows, tiles, call, place, BLOCK: tl.constexpr):
    """[M]: which rows see a key, by position and by the mask tensor."""
    low, high = row_bounds(rows, place.seq, call.window)
    sees = (rows < place.seq.row_end) & (high > low)
    if call.mask.ptr is not None:
        found = tl.zeros(rows.shape, tl.int32)
        for start in range(tiles.begin, tiles.end, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            _, seen, _ = masked_pairs(call, place, rows[:, None], columns[None, :])
            found = tl.maximum(found, tl.max(seen.to(tl.int32), 1))
        sees = found > 0
    return sees


@triton.jit
def arguments_of(
    scores, factor, rows, columns, call, place, EDGE: tl.constexpr, PRECISE: tl.constexpr
):
    """x, z and read of raw scores [M, N], as `add_arguments` takes them."""
    z = scores * factor
    x = z
    if call.softcap is not None:
        x, _ = capped(call, z, PRECISE)
    i, j = rows[:, None], columns[None, :]
    read = i >= 0
    if EDGE and call.mask.ptr is None:
        seen = reachable(i, j, place.seq, call.window)
        read = seen
        x = tl.where(seen, x, float("-inf"))
    elif EDGE:
        bias, seen, read = masked_pairs(call, place, i, j)
        x = tl.where(seen, x + bias, float("-inf"))
        z = z + bias
    return x, z, read


@triton.jit
def keeps(dropout, head, i, j):
    """Which pairs dropout keeps; the same for a pair in every kernel and tile size.

    head: b * H + h. What is kept counts 1 / (1 - rate) times.
    """
    seed = tl.load(dropout.seed_ptr)
    place = tl.zeros_like(i + j)
    bits, _, _, _ = tl.philox(
        seed, place + j, place + i, place + tl.cast(head, tl.int32), place, PHILOX_ROUNDS
    )
    return tl.uint_to_uniform_float(bits) >= dropout.rate
