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

FAR = tl.constexpr(32.0)  # |lse| from which a row is renewed


class Incoming(NamedTuple):
    """What a backward kernel reads besides the call: dO, laid out as in Heads, and RowSoftmax."""

    ptr: Any
    stride_b: Any
    stride_h: Any
    stride_row: Any
    stride_column: Any
    pivot_ptr: Any  # [B, H, Q]
    above_ptr: Any
    delta_ptr: Any


class RowSoftmax(NamedTuple):
    """What P = 2^(x - pivot - above) and dA = P (dP - delta) of a row are counted from.

    Pivot and above are the lse in base 2. Far from 0 their sum would lose the digits of the second.
    A pivot of +inf makes every P zero: in rows that see no key, and past the end.
    """

    pivot: Any
    above: Any
    delta: Any


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


class Scales(NamedTuple):
    """Sums over the keys of a row, of which `totals.scale_gradient` makes the scale's gradient.

    off: the score about the row's centre.
    """

    product: Any  # dS off
    rest: Any  # dS, which should be 0
    shift: Any  # P off
    total: Any  # P


class Rows(NamedTuple):
    """Some rows of a matrix; those from `end` on are read as 0."""

    matrix: Matrix
    rows: Any
    end: Any


# --- rows ----------------------------------------------------------------------------------------


@triton.jit
def load_softmax(incoming, first, rows, end):
    """RowSoftmax of rows of the head whose numbers begin at `first`."""
    inside = rows < end
    places = first + rows
    return RowSoftmax(
        tl.load(incoming.pivot_ptr + places, mask=inside, other=float("inf")),
        tl.load(incoming.above_ptr + places, mask=inside, other=0.0),
        tl.load(incoming.delta_ptr + places, mask=inside, other=0.0),
    )


@triton.jit
def is_far(pivot):
    """Tell where a row lies so far from 0 that its lse and delta are renewed (softmax.py)."""
    size = tl.abs(pivot)
    return (size > FAR * LOG2E) & (size < float("inf"))


@triton.jit
def score_centre(pivot, factor, CENTRED: tl.constexpr):
    """The raw score at the pivot of a row far from 0, else 0; pivot and factor broadcast.

    Where a row's dS sum to 0 its scores may count from any number, and lose the least by one that
    is near them.
    """
    centre = tl.zeros_like(pivot)
    if CENTRED:
        at_pivot = pivot / factor
        centre = tl.where(is_far(pivot) & (tl.abs(at_pivot) < float("inf")), at_pivot, 0.0)
    return centre


@triton.jit
def start_scales(BLOCK: tl.constexpr, dtype: tl.constexpr):
    zeros = tl.zeros([BLOCK], dtype)
    return Scales(zeros, zeros, zeros, zeros)


@triton.jit
def add_scales(scales, p, grad_s, off, AXIS: tl.constexpr):
    """Add a tile; off: its scores about the rows' centres. AXIS: that of its keys."""
    return Scales(
        # 0 times a hidden score that is not finite
        scales.product + tl.sum(tl.where(grad_s == 0.0, 0.0, grad_s * off), AXIS),
        scales.rest + tl.sum(grad_s, AXIS),
        scales.shift + tl.sum(tl.where(p == 0.0, 0.0, p * off), AXIS),
        scales.total + tl.sum(p, AXIS),
    )


@triton.jit
def store_scales(ptrs, plane, scales, mask):
    tl.store(ptrs, scales.product, mask=mask)
    tl.store(ptrs + plane, scales.rest, mask=mask)
    tl.store(ptrs + 2 * plane, scales.shift, mask=mask)
    tl.store(ptrs + 3 * plane, scales.total, mask=mask)


@triton.jit
def down(softmax):
    """The rows as a column [M, 1]."""
    return RowSoftmax(softmax.pivot[:, None], softmax.above[:, None], softmax.delta[:, None])


@triton.jit
def across(softmax):
    """The rows as [1, M]."""
    return RowSoftmax(softmax.pivot[None, :], softmax.above[None, :], softmax.delta[None, :])


@triton.jit
def alive_rows(rows, softmax, end):
    """The rows, with `end` for those that see nothing: not read, their NaN reaches no product."""
    return tl.where(softmax.pivot == float("inf"), end, rows)


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
def add_one_by_one(
    acc, gradients, others, part, SPAN: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """acc + gradients [n, SPAN] times SPAN other rows, which join those with a gradient alone.

    In a product of matrices 0 times what is not finite would be NaN in all of them.
    """
    order = tl.arange(0, SPAN)
    for place in range(0, SPAN):
        one = tl.max(tl.where(order == place, others.rows, 0), 0) + tl.arange(0, 1)
        row = load_rows(others.matrix, one, others.end, WIDTH, BLOCK, True, part)  # [1, BLOCK]
        mine = tl.sum(tl.where((order == place)[None, :], gradients, 0.0), 1, keep_dims=True)
        product = mine.to(row.dtype).to(mine.dtype) * row.to(mine.dtype)
        acc += tl.where(mine == 0.0, 0.0, product)
    return acc


# --- pairs ---------------------------------------------------------------------------------------


@triton.jit
def pair_arguments(scores, factor, i, j, call, place, EDGE: tl.constexpr, PRECISE: tl.constexpr):
    """x, its slope over the uncapped one, and which pairs are seen; see `pair_gradients`."""
    x = scores * factor
    if PRECISE:  # rounded here in every kernel, whatever it is added to: P must be the same in all
        x = tl.fma(scores, factor, 0.0)
    slope = x
    if call.softcap is not None:
        x, slope = capped(call, x, PRECISE)
    seen = i >= 0
    if EDGE and call.mask.ptr is None:
        seen = visible(i, j, place.seq, call.window)
    elif EDGE:
        bias, seen, _ = masked_pairs(call, place, i, j)
        x = x + bias
    return x, slope, seen


@triton.jit
def kept_pairs(p, grad_p, i, j, call, place):
    """P and dP times dropout's factors."""
    if call.dropout.rate is not None:
        kept = keeps(call.dropout, place.b * call.heads + place.h, i, j)
        weight = number(call.dropout.factor, call.FLOAT)
        p = tl.where(kept, p * weight, 0.0)
        grad_p = tl.where(kept, grad_p * weight, 0.0)
    return p, grad_p


@triton.jit
def pair_gradients(
    scores,
    grad_p,
    factor,
    softmax,
    i,
    j,
    call,
    place,
    EDGE: tl.constexpr,
    PRECISE: tl.constexpr,
):
    """P, P times dropout's factors, dA and dS of a tile; everything broadcasts from i and j.

    scores = q . k and grad_p = dO . v are [M, N] with i [M, 1] and j [1, N], or [N, M] with
    i [1, M] and j [N, 1]; factor and softmax are like i, or numbers. EDGE: some pairs are hidden.
    """
    x, slope, seen = pair_arguments(scores, factor, i, j, call, place, EDGE, PRECISE)
    # Rounding can lift x above the lse where both are huge; min keeps NaN.
    u = x - softmax.pivot - softmax.above
    p = tl.exp2(tl.minimum(u, 0.0, propagate_nan=tl.PropagateNan.ALL))
    if EDGE:
        p = tl.where(seen, p, 0.0)
    used, grad_p = kept_pairs(p, grad_p, i, j, call, place)
    grad_a = p * (grad_p - softmax.delta)
    grad_s = grad_a
    if call.softcap is not None:
        grad_s = grad_a * slope
    if EDGE:  # 0 * NaN of what is hidden
        grad_a = tl.where(seen, grad_a, 0.0)
        grad_s = tl.where(seen, grad_s, 0.0)
    return p, used, grad_a, grad_s
