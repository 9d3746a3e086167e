"""P, dA and dS of a tile of pairs, and the rows and products that they are made of."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from scaledot.backends.cuda.logits import (
    LOG2E,
    Matrix,
    capped,
    keeps,
    load_rows,
    masked_pairs,
    number,
)
from scaledot.backends.cuda.visible import visible


class Incoming(NamedTuple):
    """What a backward kernel reads besides the call: dO, laid out as in Heads, lse and delta."""

    ptr: Any
    stride_b: Any
    stride_h: Any
    stride_row: Any
    stride_column: Any
    lse_ptr: Any  # [B, H, Q], natural
    delta_ptr: Any  # [B, H, Q]


class Cut(NamedTuple):
    """What is compiled into a kernel besides the call."""

    D: Any  # what is read of a row of query and key
    V: Any  # of value and dO
    OUT_D: Any  # what is written of a row of dQ and dK
    OUT_V: Any  # of dV
    BLOCK_D: Any
    BLOCK_V: Any
    PARTS: Any  # blocks of columns that the wider of D and V takes
    BLOCK_M: Any
    BLOCK_N: Any
    PRECISION: Any  # of matrix products


class Rows(NamedTuple):
    """Some rows of a matrix; those from `end` on are read as 0."""

    matrix: Matrix
    rows: Any
    end: Any


# --- rows ----------------------------------------------------------------------------------------


@triton.jit
def load_lse2(lse_ptr, rows, end):
    """lse in base 2; +inf, which makes every P zero, in rows that see no key and past the end."""
    lse = tl.load(lse_ptr + rows, mask=rows < end, other=float("-inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)


@triton.jit
def alive_rows(rows, lse2, end):
    """The rows, with `end` for those that see nothing: not read, their NaN reaches no product."""
    return tl.where(lse2 == float("inf"), end, rows)


@triton.jit
def store_rows(ptr, first, rows, end, part, tile, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A part of the columns of rows [.., end) of a contiguous matrix [.., WIDTH] at row `first`."""
    columns = part * BLOCK + tl.arange(0, BLOCK)
    ptrs = ptr + (first + rows)[:, None] * WIDTH + columns[None, :]
    inside = (rows < end)[:, None] & (columns < WIDTH)[None, :]
    tl.store(ptrs, tile.to(ptr.dtype.element_ty), mask=inside)


# --- products ------------------------------------------------------------------------------------


@triton.jit
def product(a, b, call, cut):
    """a b^T."""
    return tl.dot(a, tl.trans(b), input_precision=cut.PRECISION, out_dtype=call.FLOAT)


@triton.jit
def wide_product(one, two, WIDTH: tl.constexpr, BLOCK: tl.constexpr, call, cut):
    """a b^T of rows too wide for one tile, part by part."""
    FLOAT: tl.constexpr = call.FLOAT
    result = tl.zeros([one.rows.shape[0], two.rows.shape[0]], FLOAT)
    for part in range(0, cut.PARTS):
        a = load_rows(one.matrix, one.rows, one.end, WIDTH, BLOCK, True, part)
        b = load_rows(two.matrix, two.rows, two.end, WIDTH, BLOCK, True, part)
        result = tl.dot(a, tl.trans(b), result, input_precision=cut.PRECISION, out_dtype=FLOAT)
    return result


@triton.jit
def one_by_one(rows, one, WIDTH: tl.constexpr, BLOCK: tl.constexpr, call, cut):
    """[n, 1]: the products of rows with one other, without a product of matrices."""
    result = tl.zeros([rows.rows.shape[0], 1], call.FLOAT)
    for part in range(0, cut.PARTS):
        a = load_rows(rows.matrix, rows.rows, rows.end, WIDTH, BLOCK, True, part)
        b = load_rows(one.matrix, one.rows, one.end, WIDTH, BLOCK, True, part)
        result += tl.sum(a.to(call.FLOAT) * b.to(call.FLOAT), 1, keep_dims=True)
    return result


@triton.jit
def seen_only(gradients, row):
    """gradients [n, 1] times a row [1, m]; 0 where the gradient is 0, whatever is in the row."""
    product = gradients.to(row.dtype).to(gradients.dtype) * row.to(gradients.dtype)
    return tl.where(gradients == 0.0, 0.0, product)


# --- pairs ---------------------------------------------------------------------------------------


@triton.jit
def pair_gradients(
    scores,
    grad_p,
    factor,
    lse2,
    delta,
    i,
    j,
    call,
    place,
    EDGE: tl.constexpr,
    PRECISE: tl.constexpr,
):
    """P (times dropout's factors), dA and dS of a tile; everything broadcasts from i and j.

    scores = q . k and grad_p = dO . v are [M, N] with i [M, 1] and j [1, N], or [N, M] with
    i [1, M] and j [N, 1]; factor, lse2 and delta are like i, or numbers. EDGE: some pairs are
    hidden.
    """
    x = scores * factor
    slope = x
    if call.softcap is not None:
        x, slope = capped(call, x, PRECISE)
    seen = i >= 0
    if EDGE and call.mask.ptr is None:
        seen = visible(i, j, place.seq, call.window)
    elif EDGE:
        bias, seen, _ = masked_pairs(call, place, i, j)
        x = x + bias
    # Rounding can lift x above lse2 where both are huge; min keeps NaN.
    p = tl.exp2(tl.minimum(x - lse2, 0.0, propagate_nan=tl.PropagateNan.ALL))
    if EDGE:
        p = tl.where(seen, p, 0.0)
    used = p
    if call.dropout.rate is not None:
        kept = keeps(call.dropout, place.b * call.heads + place.h, i, j)
        weight = number(call.dropout.factor, call.FLOAT)
        used = tl.where(kept, p * weight, 0.0)
        grad_p = tl.where(kept, grad_p * weight, 0.0)
    grad_a = p * (grad_p - delta)
    if EDGE:
        grad_a = tl.where(seen, grad_a, 0.0)  # 0 * NaN of what is hidden
    grad_s = grad_a
    if call.softcap is not None:
        grad_s = grad_a * slope
    return used, grad_a, grad_s
