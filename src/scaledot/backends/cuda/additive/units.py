"""score_ij = weight . tanh(q_i + k_j) of a tile, at three multiply-adds and half a division a unit.

The tanh of a sum costs one exponential and one division for each of Q K D units. The exponential
factors, so it is taken once a row and once a key, and the division is shared by two units:

    e^(2 (q + k)) = e^(2q) e^(2k) = g_i g_j        tanh(q + k) = 1 - 2 r,  r = 1 / (1 + g_i g_j)
    score = sum_d w - 2 sum_d w r        w r + w' r' = (w d' + w' d) / (d d'),  d = 1 + g_i g_j

All in plain float32: twice the rate, and two thousand times the precision, of one tanh.approx a
unit. A preparing kernel writes the growth g = 2^exponent, exponent = 2 log2(e) x, of every entry,
with tokens along the memory, because the kernels walk over the width and load one unit of all
their rows and keys at a time.

An entry beyond REACH, or not finite, would take d d' out of float32. Its token is marked `far`, and
tiles with far tokens take r = 1 / (1 + 2^(exponent_i + exponent_j)) unit by unit, as all tiles of
float64 do.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from scaledot.backends.cuda.arguments import (
    NO_HEADS,
    Call,
    compute_type,
    constants,
    describe_call,
    heads_of,
    padded,
)
from scaledot.backends.cuda.counts import with_counts
from scaledot.backends.cuda.logits import LOG2E, entry
from scaledot.backends.inputs import Inputs
from scaledot.problem import Settings

REACH = tl.constexpr(10.9)  # e^(2 * 2 * 10.9) is 2^62.9: a product of two stays in float32
PREPARED_TOKENS = 64  # of one program of the preparing kernel
WIDEST_TILE = 128  # tokens: so far may a tile reach past the last one


class Prepared(NamedTuple):
    """Of a whole tensor: [B, heads, units, tokens] twice, and [B, heads, tokens].

    There are more tokens than the tensor has, with entries of 0, so that a tile which ends past the
    last one loads like any other. Growth is finite whatever the entry: no product meets NaN by it.
    """

    exponent_ptr: Any
    growth_ptr: Any
    far_ptr: Any  # 1: some entry of the token is beyond REACH
    tokens: Any


class Score(NamedTuple):
    """What the score is made of, as kernels take it."""

    query: Prepared
    key: Prepared
    weight_ptr: Any  # [B|1, H, units]
    stride_weight_b: Any
    UNITS: Any  # an even number; what is not there weighs nothing
    FACTORED: Any  # the exponential
    PTX: Any


class Tokens(NamedTuple):
    """Some tokens of one head, prepared: the rows or the keys of a tile."""

    exponent_ptr: Any
    growth_ptr: Any
    far_ptr: Any
    stride: Any  # from a unit to the next, int64
    places: Any  # [tokens of the tile]
    inside: Any  # which of them count


# --- before the kernels --------------------------------------------------------------------------


def describe_score(inputs: Inputs, settings: Settings) -> tuple[Call, Score]:
    """The call, without queries and keys, and the score, with them."""
    assert inputs.weight is not None
    query, key = inputs.query, inputs.key
    units = max(-(-query.shape[-1] // 2), 1) * 2
    dtype = compute_type(query)
    weight = inputs.weight.new_zeros((*inputs.weight.shape[:2], units), dtype=dtype)
    weight[..., : query.shape[-1]] = inputs.weight
    # Tiles start at multiples of their size, those of a packed sequence anywhere.
    past = WIDEST_TILE - 1 if inputs.cu_seqlens_q is not None else 0
    score = Score(
        query=_prepare(query, units, past),
        key=_prepare(key, units, past),
        weight_ptr=weight,
        stride_weight_b=weight.stride(0) if weight.shape[0] != 1 else 0,
        **constants(
            UNITS=units,
            FACTORED=dtype == torch.float32,
            PTX=not triton.knobs.runtime.interpret and torch.version.cuda is not None,
        ),
    )
    call = with_counts(describe_call(inputs, settings))
    return call._replace(query=NO_HEADS, key=NO_HEADS), score


def _prepare(tensor: Tensor, units: int, past: int) -> Prepared:
    """Exponents and growth of the entries of [B, heads, tokens, D]; `past`: tokens to spare."""
    batch, heads, tokens, width = tensor.shape
    dtype = compute_type(tensor)
    tokens = -(-(tokens + past) // WIDEST_TILE) * WIDEST_TILE
    shape = (batch, heads, units, tokens)
    exponent = tensor.new_empty(shape, dtype=dtype)
    growth = tensor.new_empty(shape if dtype == torch.float32 else 0, dtype=dtype)
    far = tensor.new_empty((batch, heads, tokens), dtype=torch.int32)
    prepared = Prepared(exponent, growth, far, tokens)
    arguments: dict[str, Any] = {
        "entries": heads_of(tensor),
        "prepared": prepared,
        "heads": heads,
        "tokens": tensor.shape[2],
        "width": width,
        "units": units,
        "blocks": tokens // PREPARED_TOKENS,
        "FACTORED": dtype == torch.float32,
        "TOKENS": PREPARED_TOKENS,
        "BLOCK_D": min(padded(units), 64),
        "num_warps": 8,
    }
    if far.numel():
        with torch.cuda.device_of(tensor):
            _prepare_kernel[(batch * heads * tokens // PREPARED_TOKENS,)](**arguments)
    return prepared


@triton.jit
def _prepare_kernel(
    entries,
    prepared,
    heads,
    tokens,
    width,
    units,
    blocks,
    FACTORED: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    program = tl.program_id(0)
    head = (program // blocks).to(tl.int64)  # b * heads + h
    token = program % blocks * TOKENS + tl.arange(0, TOKENS)
    inside = token < tokens
    entries_ptr = entry(entries, head // heads, head % heads)
    first = head * units * prepared.tokens
    far = tl.zeros([TOKENS], tl.int32)
    for start in range(0, units, BLOCK_D):
        unit = start + tl.arange(0, BLOCK_D)
        offsets = token.to(tl.int64)[:, None] * entries.stride_row
        offsets = offsets + unit.to(tl.int64)[None, :] * entries.stride_column
        loaded = inside[:, None] & (unit < width)[None, :]
        x = tl.load(entries_ptr + offsets, mask=loaded, other=0.0).to(tl.float64)
        exponent = x * (2.0 * LOG2E)  # in float64: 2^x magnifies the rounding of x
        places = first + unit.to(tl.int64)[None, :] * prepared.tokens + token[:, None]
        stored = (unit < units)[None, :]
        exponents = exponent.to(prepared.exponent_ptr.dtype.element_ty)
        tl.store(prepared.exponent_ptr + places, exponents, mask=stored)
        if FACTORED:
            near = tl.abs(x) <= REACH  # NaN is not
            growth = tl.exp2(tl.where(near, exponent, 0.0)).to(tl.float32)
            tl.store(prepared.growth_ptr + places, growth, mask=stored)
            far = tl.maximum(far, tl.max(tl.where(near, 0, 1), 1))
    tl.store(prepared.far_ptr + head * prepared.tokens + token, far)


# --- in the kernels ------------------------------------------------------------------------------


@triton.jit
def tokens_of(prepared, head, places, inside, score):
    """Tokens of one head, head = b * heads + h in int64."""
    stride = tl.cast(prepared.tokens, tl.int64)
    first = head * score.UNITS * stride
    return Tokens(
        prepared.exponent_ptr + first,
        prepared.growth_ptr + first,
        prepared.far_ptr + head * stride,
        stride,
        places,
        inside,
    )


@triton.jit
def is_far(tokens):
    """Whether some of these tokens must be taken unit by unit: 0 or 1."""
    return tl.max(tl.load(tokens.far_ptr + tokens.places, mask=tokens.inside, other=0), 0)


@triton.jit
def raw_scores(one, two, far_one, call, place, score):
    """weight . tanh(q + k) of a tile [one, two]; and whether it has far tokens."""
    acc = tl.zeros([one.places.shape[0], two.places.shape[0]], call.FLOAT)  # sum w r
    total = tl.zeros([], call.FLOAT)  # sum w
    weight_ptr = score.weight_ptr + place.b * score.stride_weight_b + place.h * score.UNITS
    far = far_one + is_far(two) > 0
    if score.FACTORED and not far:
        for unit in range(0, score.UNITS, 2):
            weight = tl.load(weight_ptr + unit)
            weight_2 = tl.load(weight_ptr + unit + 1)
            d, d_2 = pair_of_units(one, two, unit)
            acc += (weight * d_2 + weight_2 * d) * reciprocal(d * d_2, score.PTX)
            total += weight + weight_2
    else:
        for unit in range(0, score.UNITS):
            weight = tl.load(weight_ptr + unit)
            acc += weight * far_unit(one, two, unit)
            total += weight
    return total - 2.0 * acc, far


@triton.jit
def pair_of_units(one, two, unit):
    """d = 1 + e^(2 (q + k)) of two units."""
    i, j = _load_growth(one, unit), _load_growth(two, unit)
    i_2, j_2 = _load_growth(one, unit + 1), _load_growth(two, unit + 1)
    return i[:, None] * j[None, :] + 1.0, i_2[:, None] * j_2[None, :] + 1.0


@triton.jit
def far_unit(one, two, unit):
    """r = 1 / (1 + e^(2 (q + k))) of one unit, whatever its entries."""
    i, j = _load_exponent(one, unit), _load_exponent(two, unit)
    return 1.0 / (1.0 + tl.exp2(i[:, None] + j[None, :]))


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
def _load_growth(tokens, unit):
    return tl.load(tokens.growth_ptr + unit * tokens.stride + tokens.places)


@triton.jit
def _load_exponent(tokens, unit):
    """0 outside, where an entry may be NaN."""
    ptrs = tokens.exponent_ptr + unit * tokens.stride + tokens.places
    return tl.load(ptrs, mask=tokens.inside, other=0.0)
