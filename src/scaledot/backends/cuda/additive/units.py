"""score_ij = weight . tanh(q_i + k_j) of a tile, at fifteen instructions for four units.

The tanh of a sum costs one exponential and one division for each of Q K D units. The exponential
factors, so it is taken once a row and once a key, and the division is shared by four units:

    e^(2 (q + k)) = e^(2q) e^(2k) = g_i g_j        tanh(q + k) = 1 - 2 r,  r = 1 / (1 + g_i g_j)
    score = sum_d w - 2 sum_d w r        w r + w' r' = n / (d d'),  d = 1 / r,  n = w d' + w' d
    n / (d d') + m / (e e') = (n e e' + m d d') / (d d' e e')

All in plain float32: twice the rate, and two thousand times the precision, of one tanh.approx a
unit. prepare.py writes the growth g = 2^exponent, exponent = 2 log2(e) x, of every entry.

The product of four d stays in float32 while no entry is beyond NEAR_REACH, that of two up to
FAR_REACH. Past it, or where an entry is not finite, r = 1 / (1 + 2^(exponent_i + exponent_j)) is
taken unit by unit, as in all tiles of float64. A tile goes as its farthest token must.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

NEAR_REACH = tl.constexpr(5.4)  # e^(2 * 2 * 5.4) is 2^31.2: a product of four stays in float32
FAR_REACH = tl.constexpr(10.9)  # 2^62.9: a product of two does
NEAR, APART, FAR = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # within, between, beyond


class Prepared(NamedTuple):
    """Of a whole tensor: [B, heads, units / 4, tokens, 4] twice, and [B, heads, tokens].

    There are more tokens than the tensor has, with entries of 0, so that a tile which ends past the
    last one loads like any other. Growth is finite whatever the entry: no product meets NaN by it.
    """

    exponent_ptr: Any
    growth_ptr: Any
    distance_ptr: Any  # NEAR, APART or FAR: of the token's entry that is farthest from 0
    tokens: Any


class Score(NamedTuple):
    """What the score is made of, as kernels take it."""

    query: Prepared
    key: Prepared
    weight_ptr: Any  # [B|1, H, units + 1], the last one their sum
    stride_weight_b: Any
    UNITS: Any  # a multiple of 4; what is not there weighs nothing
    FACTORED: Any  # the exponential
    PTX: Any


class Tokens(NamedTuple):
    """Some tokens of one head, prepared: the rows or the keys of a tile."""

    exponent_ptr: Any
    growth_ptr: Any
    distance_ptr: Any
    stride: Any  # from a unit to the next, on average, int64
    places: Any
    inside: Any  # which of them count


@triton.jit
def tokens_of(prepared, head, first, places, inside, score):
    """The tokens first + places of one head, head = b * heads + h in int64."""
    stride = tl.cast(prepared.tokens, tl.int64)
    start = head * score.UNITS * stride + 4 * first
    return Tokens(
        prepared.exponent_ptr + start,
        prepared.growth_ptr + start,
        prepared.distance_ptr + head * stride + first,
        stride,
        places,
        inside,
    )


@triton.jit
def one_of(tokens):
    """Tokens [n] along the first dimension of a tile."""
    return _placed(tokens, tokens.places[:, None], tokens.inside[:, None])


@triton.jit
def two_of(tokens):
    """Tokens [n] along the second dimension of a tile."""
    return _placed(tokens, tokens.places[None, :], tokens.inside[None, :])


@triton.jit
def _placed(tokens, places, inside):
    return Tokens(
        tokens.exponent_ptr, tokens.growth_ptr, tokens.distance_ptr, tokens.stride, places, inside
    )


@triton.jit
def distance_of(tokens):
    """Of the farthest of some tokens [n]."""
    return tl.max(tl.load(tokens.distance_ptr + tokens.places, mask=tokens.inside, other=0), 0)


@triton.jit
def raw_scores(one, two, distance, acc, call, place, score):
    """weight . tanh(q + k) of a tile: places of `one` and `two` broadcast to it. acc: its zeros.

    Which products are rounded is written down, not left to the compiler: P is made again in several
    kernels, and must be the same.
    """
    weight_ptr = score.weight_ptr + place.b * score.stride_weight_b
    weight_ptr += place.h * (score.UNITS + 1)
    # One of three loops runs. Branches instead would be compiled once for each order of threads
    # that something after them asks for.
    near, apart, far = 0, 0, score.UNITS
    if score.FACTORED:
        near = tl.where(distance == NEAR, score.UNITS, 0)
        apart = tl.where(distance == APART, score.UNITS, 0)
        far = tl.where(distance == FAR, score.UNITS, 0)
    for unit in range(0, near, 4):
        w, w_2, w_3, w_4 = _load_weights(weight_ptr + unit)
        d, d_2, d_3, d_4 = four_units(one, two, unit)
        first, second = d * d_2, d_3 * d_4
        n = _crossed(w_3, d_4, w_4, d_3) * first
        n = tl.fma(_crossed(w, d_2, w_2, d), second, n)
        acc = tl.fma(n, reciprocal(first * second, score.PTX), acc)
    for unit in range(0, apart, 4):
        w, w_2, w_3, w_4 = _load_weights(weight_ptr + unit)
        d, d_2, d_3, d_4 = four_units(one, two, unit)
        acc = tl.fma(_crossed(w, d_2, w_2, d), reciprocal(d * d_2, score.PTX), acc)
        acc = tl.fma(_crossed(w_3, d_4, w_4, d_3), reciprocal(d_3 * d_4, score.PTX), acc)
    for unit in range(0, far):
        acc = tl.fma(tl.load(weight_ptr + unit), far_unit(one, two, unit), acc)
    return tl.load(weight_ptr + score.UNITS) - 2.0 * acc


@triton.jit
def four_units(one, two, unit):
    """d = 1 + e^(2 (q + k)) of four units."""
    i, i_2, i_3, i_4 = _load_growth(one, unit)
    j, j_2, j_3, j_4 = _load_growth(two, unit)
    return tl.fma(i, j, 1.0), tl.fma(i_2, j_2, 1.0), tl.fma(i_3, j_3, 1.0), tl.fma(i_4, j_4, 1.0)


@triton.jit
def _crossed(w, d_2, w_2, d):
    return tl.fma(w, d_2, w_2 * d)


@triton.jit
def far_unit(one, two, unit):
    """r = 1 / (1 + e^(2 (q + k))) of one unit, whatever its entries."""
    return 1.0 / (1.0 + tl.exp2(_load_exponent(one, unit) + _load_exponent(two, unit)))


@triton.jit
def reciprocal(x, PTX: tl.constexpr):
    """1 / x within one unit in the last place, of normal numbers."""
    if PTX and x.dtype == tl.float32:
        result = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        result = 1.0 / x
    return result


@triton.jit
def _load_weights(ptr):
    return tl.load(ptr), tl.load(ptr + 1), tl.load(ptr + 2), tl.load(ptr + 3)


@triton.jit
def _load_growth(tokens, unit):
    """Of four units, in one load of 16 bytes a token."""
    offsets = tl.expand_dims(tokens.places * 4, -1) + tl.arange(0, 4)
    fours = tl.load(tokens.growth_ptr + unit * tokens.stride + offsets)
    # Triton has no star of tuples.
    shape: tl.constexpr = fours.shape[:-1] + (2, 2)  # noqa: RUF005
    even, odd = tl.split(tl.reshape(fours, shape))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _load_exponent(tokens, unit):
    """0 outside, where an entry may be NaN."""
    start = unit // 4 * 4 * tokens.stride + unit % 4
    ptrs = tokens.exponent_ptr + start + tokens.places * 4
    return tl.load(ptrs, mask=tokens.inside, other=0.0)
