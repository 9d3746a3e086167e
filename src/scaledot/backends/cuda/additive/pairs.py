"""Gradients of a tile of pairs with additive scores, and the walks over its units and its values.

With r = 1 / (1 + e^(2 (q + k))) as in units.py, tanh = 1 - 2 r and tanh' = 4 r (1 - r). dR is the
gradient of the raw score weight . tanh(q + k):

    dq_id = 4 w_d sum_j dR_ij r (1 - r)        dk_jd = 4 w_d sum_i dR_ij r (1 - r)
    dw_d = sum_ij dR_ij (1 - 2 r)

A program adds each unit's sums to its own place in memory, for the width does not fit into
registers. dO . v and P^T dO are walked in the same way: a matrix product of the tensor cores would
be faster by itself, but its result is laid out in a way of its own, and every unit would follow
into that layout through shared memory.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from scaledot.backends.cuda.additive.units import (
    FAR,
    distance_of,
    far_unit,
    four_units,
    one_of,
    raw_scores,
    reciprocal,
    two_of,
)
from scaledot.backends.cuda.backward.pairs import across, down, pair_gradients
from scaledot.backends.cuda.logits import LN2


class Turned(NamedTuple):
    """What a backward kernel reads besides call and score; tokens lie along the memory.

    As many tokens as are prepared, with 0 to spare: a tile past the last one loads like any other.
    """

    value_ptr: Any  # [B, G, V, tokens]
    grad_out_ptr: Any  # [B, H, V, tokens]; 0 in rows that see no key
    pivot_ptr: Any  # [B, H, Q], see RowSoftmax
    above_ptr: Any
    delta_ptr: Any


class Cut(NamedTuple):
    """What is compiled into a kernel besides the call and the score."""

    V: Any
    BLOCK_M: Any
    BLOCK_N: Any


class Scores(NamedTuple):
    """Of a tile: raw scores and dP; rows i, keys j and the rows' factor broadcast against them."""

    raw: Any
    distance: Any
    grad_p: Any
    factor: Any
    i: Any
    j: Any


class Pairs(NamedTuple):
    """Of a tile: see pair_gradients. grad_raw is dR."""

    raw: Any
    distance: Any
    p: Any
    used: Any
    grad_a: Any
    grad_s: Any
    grad_raw: Any


@triton.jit
def group_of(call, place):
    """b * G + g of the key head."""
    return place.b * (call.heads // call.repeats) + place.h // call.repeats


@triton.jit
def tile_gradients(
    queries,
    keys,
    softmax,
    factor,
    call,
    place,
    score,
    turned,
    V: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
):
    """Tiles are [rows, keys] where ROWS_FIRST, else [keys, rows]; softmax and factor: of rows."""
    tile = tile_scores(queries, keys, factor, call, place, score, turned, V, ROWS_FIRST)
    softmax = down(softmax) if ROWS_FIRST else across(softmax)
    p, used, grad_a, grad_s = pair_gradients(
        tile.raw, tile.grad_p, tile.factor, softmax, tile.i, tile.j, call, place, True, True
    )
    grad_raw = grad_s * (tile.factor * LN2)
    return Pairs(tile.raw, tile.distance, p, used, grad_a, grad_s, grad_raw)


@triton.jit
def tile_scores(
    queries, keys, factor, call, place, score, turned, V: tl.constexpr, ROWS_FIRST: tl.constexpr
):
    """The raw scores of a tile, dP, and what `pair_arguments` takes besides."""
    do_ptr = turned.grad_out_ptr + (place.b * call.heads + place.h) * V * queries.stride
    v_ptr = turned.value_ptr + group_of(call, place) * V * keys.stride
    distance = tl.maximum(distance_of(queries), distance_of(keys))
    if ROWS_FIRST:
        zeros = tl.zeros([queries.places.shape[0], keys.places.shape[0]], call.FLOAT)
        raw = raw_scores(one_of(queries), two_of(keys), distance, zeros, call, place, score)
        grad_p = _products(do_ptr, v_ptr, queries, keys, V, call)
        i, j = queries.places[:, None], keys.places[None, :]
        inside = queries.inside[:, None]
    else:
        zeros = tl.zeros([keys.places.shape[0], queries.places.shape[0]], call.FLOAT)
        raw = raw_scores(one_of(keys), two_of(queries), distance, zeros, call, place, score)
        grad_p = _products(v_ptr, do_ptr, keys, queries, V, call)
        i, j = queries.places[None, :], keys.places[:, None]
        inside = queries.inside[None, :]
    # Rows past the end are another sequence's: farther off than the tile's own, their product of
    # four may have left float32.
    raw = tl.where(inside, raw, 0.0)
    if call.LOG_N and ROWS_FIRST:
        factor = factor[:, None]
    elif call.LOG_N:
        factor = factor[None, :]
    return Scores(raw, distance, grad_p, factor, i, j)


@triton.jit
def _products(one_ptr, two_ptr, one, two, V: tl.constexpr, call):
    """dO . v of a tile [one, two]."""
    acc = tl.zeros([one.places.shape[0], two.places.shape[0]], call.FLOAT)
    for column in range(0, V):
        a = tl.load(one_ptr + column * one.stride + one.places)
        b = tl.load(two_ptr + column * two.stride + two.places)
        acc += a[:, None] * b[None, :]
    return acc


@triton.jit
def add_values(p, do_ptr, queries, keys, sums_ptr, tokens, V: tl.constexpr):
    """sums[column of v, key] += sum_i p_ij dO_i; p [M, N], sums [V, tokens]."""
    for column in range(0, V):
        ptrs = do_ptr + column * queries.stride + queries.places
        do = tl.load(ptrs, mask=queries.inside, other=0.0)
        ptrs = sums_ptr + column * tl.cast(tokens, tl.int64) + keys.places
        sums = tl.load(ptrs, mask=keys.inside, other=0.0)
        part = tl.where(p == 0.0, 0.0, p * do[:, None])  # NaN of a row that does not see the key
        tl.store(ptrs, sums + tl.sum(part, 0), mask=keys.inside)


@triton.jit
def add_units(grad_raw, one, two, distance, sums_ptr, weight_sums_ptr, tokens, score):
    """sums[unit, two] += sum_one dR r (1 - r) and weight_sums[unit, two] += sum_one dR (1 - 2 r).

    grad_raw [one, two], sums [units, tokens]. A thread meets its own places in memory only.
    """
    stride = tl.cast(tokens, tl.int64)
    if score.FACTORED and distance < FAR:
        for unit in range(0, score.UNITS, 4):
            d, d_2, d_3, d_4 = four_units(one_of(one), two_of(two), unit)
            both = reciprocal(d * d_2, score.PTX)
            place = unit * stride + two.places
            _add_unit(grad_raw, d_2 * both, sums_ptr, weight_sums_ptr, place, two.inside)
            place += stride
            _add_unit(grad_raw, d * both, sums_ptr, weight_sums_ptr, place, two.inside)
            both = reciprocal(d_3 * d_4, score.PTX)
            place += stride
            _add_unit(grad_raw, d_4 * both, sums_ptr, weight_sums_ptr, place, two.inside)
            place += stride
            _add_unit(grad_raw, d_3 * both, sums_ptr, weight_sums_ptr, place, two.inside)
    else:
        for unit in range(0, score.UNITS):
            r = far_unit(one_of(one), two_of(two), unit)
            r = tl.where(grad_raw == 0.0, 0.0, r)  # NaN of a hidden pair stays hidden
            place = unit * stride + two.places
            _add_unit(grad_raw, r, sums_ptr, weight_sums_ptr, place, two.inside)


@triton.jit
def _add_unit(grad_raw, r, sums_ptr, weight_sums_ptr, place, inside):
    part = grad_raw * r
    sums = tl.load(sums_ptr + place, mask=inside, other=0.0)
    tl.store(sums_ptr + place, sums + tl.sum(part - part * r, 0), mask=inside)
    if weight_sums_ptr is not None:
        sums = tl.load(weight_sums_ptr + place, mask=inside, other=0.0)
        tl.store(weight_sums_ptr + place, sums + tl.sum(grad_raw - 2.0 * part, 0), mask=inside)
