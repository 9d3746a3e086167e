"""Find each row's softmax for the backward pass: its lse, and delta_i = sum_j P_ij dP_ij.

The rows of P must sum to 1 and those of dA to 0, or what keys have in common does not cancel in dQ
and dscale. By the forward pass delta is dO . O, and P = e^(x - lse). That is right near 0. Far from
0 it keeps two errors: O is rounded to the type of the output, where a sum of products that nearly
cancel should stand, and lse is rounded as its size asks. So rows far from 0 take lse and delta from
the logits of this pass, in a walk over their keys of its own. Blocks without such rows end at once.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from scaledot.backends.cuda.arguments import Call, heads_of, padded
from scaledot.backends.cuda.backward.pairs import (
    Cut,
    Incoming,
    Rows,
    is_far,
    kept_pairs,
    load_softmax,
    pair_arguments,
    product,
    wide_product,
)
from scaledot.backends.cuda.logits import LOG2E, entry, load_rows, matrix_of, row_scale
from scaledot.backends.cuda.tile import load_sink
from scaledot.backends.cuda.visible import Place, blocks_of, find_rows, key_tiles, span_of

TILE = 8192  # numbers of dO at a time
MOST_ROWS = 64


class Renewed(NamedTuple):
    """Sums over the keys of a row so far: 2^(x - pivot), and that times dP."""

    pivot: Any
    total: Any
    weighted: Any


class Planes(NamedTuple):
    """Hold RowSoftmax of all rows, each [B, H, Q]."""

    pivot: Tensor
    above: Tensor
    delta: Tensor


def row_softmax(grad_out: Tensor, out: Tensor, lse: Tensor) -> Planes:
    """Compute it from the forward pass; delta is 0 in rows that see no key, whatever comes in."""
    batch, heads, queries, width = out.shape
    planes = Planes(*(torch.empty_like(lse) for _ in Planes._fields))
    block_v = padded(width)
    block_m = max(min(TILE // block_v, MOST_ROWS), 1)
    blocks = triton.cdiv(queries, block_m)
    arguments: dict[str, Any] = {
        "grad_out": heads_of(grad_out),
        "out": heads_of(out),
        "lse_ptr": lse,
        "planes": planes,
        "heads": heads,
        "queries": queries,
        "blocks": blocks,
        "V": width,
        "BLOCK_V": block_v,
        "BLOCK_M": block_m,
    }
    _softmax_kernel[(batch * heads * blocks,)](**arguments)
    return planes


def renew_far_rows(call: Call, incoming: Incoming, cut: Cut, **options: Any) -> None:
    """Find lse and delta of rows far from 0 anew, in place. call: with its sinks."""
    blocks = blocks_of(call, call.queries, cut.BLOCK_M.value)
    arguments = {"call": call, "incoming": incoming, "blocks": blocks, "cut": cut}
    _renew_kernel[(call.batch * call.heads * blocks,)](**arguments, **options)


@triton.jit(do_not_specialize=["heads", "queries", "blocks"])
def _softmax_kernel(
    grad_out,
    out,
    lse_ptr,
    planes,
    heads,
    queries,
    blocks,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    program = tl.program_id(0)
    rows = program % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    h = (program // blocks % heads).to(tl.int64)
    b = (program // blocks // heads).to(tl.int64)
    places = (b * heads + h) * queries + rows
    inside = rows < queries
    lse = tl.load(lse_ptr + places, mask=inside, other=0.0)
    blind = lse == float("-inf")
    do = load_rows(matrix_of(grad_out, b, h), rows, queries, V, BLOCK_V, True).to(lse.dtype)
    o = load_rows(matrix_of(out, b, h), rows, queries, V, BLOCK_V, True).to(lse.dtype)
    tl.store(planes.pivot + places, tl.where(blind, float("inf"), lse * LOG2E), mask=inside)
    tl.store(planes.above + places, tl.zeros_like(lse), mask=inside)
    tl.store(planes.delta + places, tl.where(blind, 0.0, tl.sum(do * o, 1)), mask=inside)


@triton.jit(do_not_specialize=["blocks"])
def _renew_kernel(call, incoming, blocks, cut):
    """Renew BLOCK_M rows over the keys that they see."""
    program = tl.program_id(0)
    block = blocks - 1 - program % blocks  # the last rows see the most keys
    h = (program // blocks % call.heads).to(tl.int64)
    b = (program // blocks // call.heads).to(tl.int64)
    row, seq = find_rows(call, b, block, cut.BLOCK_M)
    if row >= seq.row_end:
        return
    row_end = tl.minimum(row + cut.BLOCK_M, seq.row_end)
    rows = row + tl.arange(0, cut.BLOCK_M)
    lines = (b * call.heads + h) * call.queries
    far = far_rows(load_softmax(incoming, lines, rows, row_end))
    if tl.max(tl.where(far, 1, 0), 0) == 0:
        return
    place = Place(b, h, seq)
    factor = row_scale(call, place, rows)
    if call.LOG_N:
        factor = factor[:, None]
    some = tl.where(far, rows, row_end)  # others are not read
    queries = Rows(matrix_of(call.query, b, h), some, row_end)
    grads = Rows(matrix_of(incoming, b, h), some, row_end)
    q = load_rows(queries.matrix, some, row_end, cut.D, cut.BLOCK_D, True)  # [M, D]
    do = load_rows(grads.matrix, some, row_end, cut.V, cut.BLOCK_V, True)  # [M, V]
    sums = start_pairs(call, b, h, cut.BLOCK_M)
    MASKED: tl.constexpr = tl.constexpr(call.mask.ptr is not None)
    BEFORE: tl.constexpr = tl.constexpr(call.window.left is not None)
    tiles = key_tiles(row, row_end, seq, call.window, MASKED, cut.BLOCK_N)
    for part in tl.static_range(3):
        if (part == 0 and not MASKED) or part == 1 or (part == 2 and BEFORE):
            begin, end = span_of(tiles, part)
            sums = _add_key_tiles(
                sums,
                begin,
                end,
                q,
                do,
                queries,
                grads,
                factor,
                rows,
                call,
                place,
                part != 0,
                cut,
            )
    store_renewed(incoming, lines + rows, sums, far)


@triton.jit
def _add_key_tiles(
    sums,
    begin,
    end,
    q,
    do,
    queries,
    grads,
    factor,
    rows,
    call,
    place,
    EDGE: tl.constexpr,
    cut,
):
    """Add the keys from `begin` to `end` to the sums."""
    FLOAT: tl.constexpr = call.FLOAT
    key_end = place.seq.key_end
    key = matrix_of(call.key, place.b, place.h // call.repeats)
    value = matrix_of(call.value, place.b, place.h // call.repeats)
    for start in range(begin, end, cut.BLOCK_N):
        columns = start + tl.arange(0, cut.BLOCK_N)
        if cut.PARTS == 1:
            v = load_rows(value, columns, key_end, cut.V, cut.BLOCK_V, EDGE)  # [N, V]
            grad_p = product(do, v, call, cut)  # [M, N]
            k = load_rows(key, columns, key_end, cut.D, cut.BLOCK_D, EDGE)  # [N, D]
            scores = product(q, k, call, cut)  # [M, N]
        else:
            values = Rows(value, columns, key_end)
            grad_p = wide_product(grads, values, cut.V, cut.BLOCK_V, call, cut)
            keys = Rows(key, columns, key_end)
            scores = wide_product(queries, keys, cut.D, cut.BLOCK_D, call, cut)
        sums = add_pairs(
            sums,
            scores,
            grad_p,
            factor,
            rows[:, None],
            columns[None, :],
            call,
            place,
            EDGE,
            q.dtype == FLOAT,
            1,
        )
    return sums


@triton.jit
def add_pairs(
    sums,
    scores,
    grad_p,
    factor,
    i,
    j,
    call,
    place,
    EDGE: tl.constexpr,
    PRECISE: tl.constexpr,
    AXIS: tl.constexpr,
):
    """Add a tile of scores to the sums; AXIS: that of its keys."""
    x, _, seen = pair_arguments(scores, factor, i, j, call, place, EDGE, PRECISE)
    shown = x
    if EDGE:
        shown = tl.where(seen, x, float("-inf"))
    pivot = tl.maximum(sums.pivot, tl.max(shown, AXIS))
    base = tl.where(pivot == float("-inf"), 0.0, pivot)  # no key was seen yet
    # Hidden afterwards, as in `pair_gradients`: x - base may become one multiply-add, which rounds
    # once, and P must be the same in both.
    p = tl.exp2(x - tl.expand_dims(base, AXIS))
    if EDGE:
        p = tl.where(seen, p, 0.0)
    _, grad_p = kept_pairs(p, grad_p, i, j, call, place)
    products = p * grad_p
    if EDGE:
        products = tl.where(seen, products, 0.0)  # 0 * NaN of what is hidden
    before = tl.exp2(sums.pivot - base)
    return Renewed(
        pivot,
        sums.total * before + tl.sum(p, AXIS),
        sums.weighted * before + tl.sum(products, AXIS),
    )


@triton.jit
def start_pairs(call, b, h, BLOCK: tl.constexpr):
    """Start the sums of rows, with their sink and no key."""
    pivot = tl.full([BLOCK], float("-inf"), call.FLOAT)
    total = tl.zeros([BLOCK], call.FLOAT)
    if call.sinks.ptr is not None:
        pivot = tl.maximum(pivot, load_sink(entry(call.sinks, b, h), call.FLOAT))
        total = tl.where(pivot > float("-inf"), 1.0, total)
    return Renewed(pivot, total, tl.zeros([BLOCK], call.FLOAT))


@triton.jit
def far_rows(softmax):
    """Tell which rows are renewed."""
    return is_far(softmax.pivot)


@triton.jit
def store_renewed(incoming, places, sums, far):
    far = far & (sums.total > 0.0)
    tl.store(incoming.pivot_ptr + places, sums.pivot, mask=far)
    tl.store(incoming.above_ptr + places, tl.log2(sums.total), mask=far)
    tl.store(incoming.delta_ptr + places, sums.weighted / sums.total, mask=far)
