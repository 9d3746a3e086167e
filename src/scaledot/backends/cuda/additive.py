"""Additive attention forward in Triton: score_ij = weight . tanh(q_i + k_j), never all of them.

The tanh of a sum costs one exponential and one division for each of Q K D units. The exponential
factors, so it is taken once a row and once a key, and the division is shared by two units:

    e^(2 (q + k)) = e^(2q) e^(2k) = g_i g_j        tanh(q + k) = 1 - 2 r,  r = 1 / (1 + g_i g_j)
    score = sum_d w - 2 sum_d w r        w r + w' r' = (w d' + w' d) / (d d'),  d = 1 + g_i g_j

That is three multiply-adds and half a reciprocal a unit, in plain float32: twice the rate, and two
thousand times the precision, of one tanh.approx a unit. A preparing kernel writes the growth
g = 2^exponent, exponent = 2 log2(e) x, of every entry, with tokens along the memory, because the
kernels walk over the width and load one unit of all their rows and keys at a time.

An entry beyond REACH, or not finite, would take d d' out of float32. Its token is marked `far`, and
tiles with far tokens take r = 1 / (1 + 2^(exponent_i + exponent_j)) unit by unit, as all tiles of
float64 do. Everything after the score is tile.py.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from scaledot.backends.cuda.arguments import (
    compute_type,
    dot_precision,
    padded,
    shared_arguments,
    strides,
)
from scaledot.backends.cuda.counts import counts_for
from scaledot.backends.cuda.statistics import PLANES
from scaledot.backends.cuda.tile import (
    LN2,
    LOG2E,
    Matrix,
    add_arguments,
    capped,
    close_sums,
    find_sequence,
    keeps,
    key_tiles,
    load_mask,
    load_rows,
    load_sink,
    number,
    packed_blocks,
    row_scale,
    sequence_of,
    split_mask,
    start_sums,
    store_statistics,
    visible,
    visible_counts,
)
from scaledot.backends.inputs import Inputs
from scaledot.problem import Settings

REACH = tl.constexpr(10.9)  # e^(2 * 2 * 10.9) is 2^62.9: a product of two stays in float32
PREPARED_TOKENS = 64  # of one program of the preparing kernel
WIDEST_TILE = 128  # tokens: so far may a tile reach past the last one


class Config(NamedTuple):
    """The cut of the work: what may be tuned, and changes no result but its rounding."""

    block_m: int
    block_n: int
    warps: int
    stages: int = 2


# 128 threads, a key each, 16 rows: of a unit a thread loads its key's growth and, in four loads of
# 16 bytes, that of all rows. More rows would leave multiprocessors idle at 8 heads of 1024.
FLOAT32 = Config(16, 128, 4)
FLOAT64 = Config(16, 32, 4)
VALUE_BYTES = 64 * 2**10  # of a tile of values: two programs share a multiprocessor's memory


def config_for(query: Tensor, value_width: int) -> Config:
    """Fewer keys at a time where their values are wide."""
    config = FLOAT64 if query.dtype == torch.float64 else FLOAT32
    keys = max(VALUE_BYTES // (padded(value_width) * query.element_size()), 16)
    return config._replace(block_n=min(config.block_n, keys))


class Units(NamedTuple):
    """The prepared entries of the tokens of one head, [units, tokens]."""

    exponent_ptr: tl.tensor
    growth_ptr: tl.tensor
    far_ptr: tl.tensor  # [tokens], 1: some entry is beyond REACH
    stride: tl.tensor  # of a unit


class Prepared(NamedTuple):
    """Of a whole tensor: [B, heads, units, tokens] twice, and [B, heads, tokens].

    There are more tokens than the tensor has, with entries of 0, so that a tile which ends past the
    last one loads like any other. Growth is finite whatever the entry: no product meets NaN by it.
    """

    exponent: Tensor
    growth: Tensor
    far: Tensor


def forward(
    inputs: Inputs,
    settings: Settings,
    out: Tensor | None,
    wants_vitals: bool,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """Fills `out` (None: scores only); returns lse [B, H, Q] and statistics [9, B, H, Q]."""
    query, value = inputs.query, inputs.value
    batch, heads, queries, _ = query.shape
    dtype = compute_type(query)
    lse = query.new_empty((batch, heads, queries), dtype=dtype)
    shape = (PLANES, batch, heads, queries) if wants_vitals else (0,)
    statistics = query.new_empty(shape, dtype=dtype)
    if not lse.numel():
        return lse, statistics
    if out is not None and not out.numel():
        out = None
    value_width = 0 if out is None or value is None else value.shape[-1]
    if config is None:
        config = config_for(query, value_width)
    shared = additive_arguments(
        inputs if out is not None else inputs._replace(value=None), settings
    )
    blocks = row_blocks(inputs, config.block_m)
    arguments: dict[str, Any] = {
        **shared,
        "out_ptr": out,
        "lse_ptr": lse,
        "statistics_ptr": statistics if wants_vitals else None,
        **strides("o", out, "bhmd"),
        "blocks": blocks,
        "V": value_width,
        "BLOCK_V": padded(value_width),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "num_warps": config.warps,
        "num_stages": config.stages,
    }
    with torch.cuda.device_of(query):
        _forward_kernel[(batch * heads * blocks,)](**arguments)
    return lse, statistics


def row_blocks(inputs: Inputs, size: int) -> int:
    """Blocks of rows that the programs of a head share."""
    queries = inputs.query.shape[2]
    if inputs.cu_seqlens_q is not None:
        return packed_blocks(queries, inputs.cu_seqlens_q.shape[0] - 1, size)
    return -(-queries // size)


def additive_arguments(inputs: Inputs, settings: Settings) -> dict[str, Any]:
    """What forward and backward kernels take alike."""
    assert inputs.weight is not None
    query, key = inputs.query, inputs.key
    units = max(-(-query.shape[-1] // 2), 1) * 2  # in pairs; what is not there weighs nothing
    dtype = compute_type(query)
    weight = inputs.weight.new_zeros((*inputs.weight.shape[:2], units), dtype=dtype)
    weight[..., : query.shape[-1]] = inputs.weight
    # Tiles start at multiples of their size, those of a packed sequence anywhere.
    past = WIDEST_TILE - 1 if inputs.cu_seqlens_q is not None else 0
    q, k = prepare(query, units, past), prepare(key, units, past)
    shared = shared_arguments(inputs, settings)
    for name in ("query_ptr", "key_ptr", *strides("q", query, "bhmd"), *strides("k", key, "bhnd")):
        del shared[name]
    return {
        **shared,
        **counts_for(inputs, settings, shared),
        "weight_ptr": weight,
        "q_exponent_ptr": q.exponent,
        "q_growth_ptr": q.growth,
        "q_far_ptr": q.far,
        "k_exponent_ptr": k.exponent,
        "k_growth_ptr": k.growth,
        "k_far_ptr": k.far,
        "prepared_queries": q.far.shape[-1],
        "prepared_keys": k.far.shape[-1],
        "stride_weight_b": weight.stride(0) if weight.shape[0] != 1 else 0,
        "UNITS": units,
        "LOG_N": settings.log_n,
        "BOTTOM_RIGHT": settings.bottom_right,
        "FACTORED": dtype == torch.float32,
        "PRECISION": dot_precision(query),
        "PTX": not triton.knobs.runtime.interpret and torch.version.cuda is not None,
    }


def prepare(tensor: Tensor, units: int, past: int) -> Prepared:
    """Exponents and growth of the entries of [B, heads, tokens, D]; `past`: tokens to spare."""
    batch, heads, tokens, width = tensor.shape
    dtype = compute_type(tensor)
    prepared = -(-(tokens + past) // WIDEST_TILE) * WIDEST_TILE
    shape = (batch, heads, units, prepared)
    exponent = tensor.new_empty(shape, dtype=dtype)
    growth = tensor.new_empty(shape if dtype == torch.float32 else 0, dtype=dtype)
    far = tensor.new_empty((batch, heads, prepared), dtype=torch.int32)
    blocks = prepared // PREPARED_TOKENS
    arguments: dict[str, Any] = {
        "entries_ptr": tensor,
        "exponent_ptr": exponent,
        "growth_ptr": growth if dtype == torch.float32 else None,
        "far_ptr": far,
        "heads": heads,
        "tokens": tokens,
        "prepared": prepared,
        "width": width,
        "units": units,
        "blocks": blocks,
        **strides("", tensor, "bhnd"),
        "TOKENS": PREPARED_TOKENS,
        "BLOCK_D": min(padded(units), 64),
        "num_warps": 8,
    }
    if far.numel():
        with torch.cuda.device_of(tensor):
            _prepare_kernel[(batch * heads * blocks,)](**arguments)
    return Prepared(exponent, growth, far)


@triton.jit
def _prepare_kernel(
    entries_ptr,
    exponent_ptr,
    growth_ptr,
    far_ptr,
    heads,
    tokens,
    prepared,
    width,
    units,
    blocks,
    stride_b,
    stride_h,
    stride_n,
    stride_d,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    program = tl.program_id(0)
    head = (program // blocks).to(tl.int64)  # b * heads + h
    token = program % blocks * TOKENS + tl.arange(0, TOKENS)
    inside = token < tokens
    entries_ptr += head // heads * stride_b + head % heads * stride_h
    first = head * units * prepared
    far = tl.zeros([TOKENS], tl.int32)
    for start in range(0, units, BLOCK_D):
        unit = start + tl.arange(0, BLOCK_D)
        offsets = token.to(tl.int64)[:, None] * stride_n + unit.to(tl.int64)[None, :] * stride_d
        loaded = inside[:, None] & (unit < width)[None, :]
        entries = tl.load(entries_ptr + offsets, mask=loaded, other=0.0).to(tl.float64)
        exponent = entries * (2.0 * LOG2E)  # in float64: 2^x magnifies the rounding of x
        places = first + unit.to(tl.int64)[None, :] * prepared + token[:, None]
        stored = (unit < units)[None, :]
        tl.store(exponent_ptr + places, exponent.to(exponent_ptr.dtype.element_ty), mask=stored)
        if growth_ptr is not None:
            near = tl.abs(entries) <= REACH  # NaN is not
            growth = tl.exp2(tl.where(near, exponent, 0.0)).to(tl.float32)
            tl.store(growth_ptr + places, growth, mask=stored)
            far = tl.maximum(far, tl.max(tl.where(near, 0, 1), 1))
    tl.store(far_ptr + head * prepared + token, far)


@triton.jit
def units_of(exponent_ptr, growth_ptr, far_ptr, head, tokens, UNITS: tl.constexpr):
    """The prepared entries of one head, head = b * heads + h in int64."""
    stride = tl.cast(tokens, tl.int64)
    first = head * UNITS * stride
    return Units(exponent_ptr + first, growth_ptr + first, far_ptr + head * stride, stride)


@triton.jit
def load_growth(units, unit, tokens):
    return tl.load(units.growth_ptr + unit * units.stride + tokens)


@triton.jit
def load_exponent(units, unit, tokens, inside):
    """0 outside, where an entry may be NaN."""
    return tl.load(units.exponent_ptr + unit * units.stride + tokens, mask=inside, other=0.0)


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
def is_far(units, tokens, inside):
    """Whether some of these tokens must be taken unit by unit: 0 or 1."""
    return tl.max(tl.load(units.far_ptr + tokens, mask=inside, other=0), 0)


@triton.jit
def raw_scores(
    one,
    two,
    weight_ptr,
    tokens_one,
    tokens_two,
    inside_one,
    inside_two,
    far_one,
    UNITS: tl.constexpr,
    FACTORED: tl.constexpr,
    PTX: tl.constexpr,
    FLOAT: tl.constexpr,
):
    """weight . tanh(q + k) of a tile [tokens_one, tokens_two]; and whether it has far tokens."""
    acc = tl.zeros([tokens_one.shape[0], tokens_two.shape[0]], FLOAT)  # sum w r
    total = tl.zeros([], FLOAT)  # sum w
    far = far_one + is_far(two, tokens_two, inside_two) > 0
    if FACTORED and not far:
        for unit in range(0, UNITS, 2):
            weight = tl.load(weight_ptr + unit)
            weight_2 = tl.load(weight_ptr + unit + 1)
            d, d_2 = pair_of_units(one, two, unit, tokens_one, tokens_two)
            acc += (weight * d_2 + weight_2 * d) * reciprocal(d * d_2, PTX)
            total += weight + weight_2
    else:
        for unit in range(0, UNITS):
            weight = tl.load(weight_ptr + unit)
            acc += weight * far_unit(one, two, unit, tokens_one, tokens_two, inside_one, inside_two)
            total += weight
    return total - 2.0 * acc, far


@triton.jit
def pair_of_units(one, two, unit, tokens_one, tokens_two):
    """d = 1 + e^(2 (q + k)) of two units."""
    i, j = load_growth(one, unit, tokens_one), load_growth(two, unit, tokens_two)
    i_2, j_2 = load_growth(one, unit + 1, tokens_one), load_growth(two, unit + 1, tokens_two)
    return i[:, None] * j[None, :] + 1.0, i_2[:, None] * j_2[None, :] + 1.0


@triton.jit
def far_unit(one, two, unit, tokens_one, tokens_two, inside_one, inside_two):
    """r = 1 / (1 + e^(2 (q + k))) of one unit, whatever its entries."""
    i = load_exponent(one, unit, tokens_one, inside_one)
    j = load_exponent(two, unit, tokens_two, inside_two)
    return 1.0 / (1.0 + tl.exp2(i[:, None] + j[None, :]))


@triton.jit
def arguments_of(
    raw,
    factor,
    rows,
    columns,
    seq,
    left,
    right,
    mask,
    cap,
    PRECISE: tl.constexpr,
    FLOAT: tl.constexpr,
):
    """(x, z, seen, read, slope) of raw scores [M, N]: as tile.py takes them; slope of the cap."""
    z = raw * factor
    x = z
    slope = tl.full(raw.shape, 1.0, FLOAT)
    if cap is not None:
        x, slope = capped(z, cap, PRECISE)
    seen = visible(rows, columns, seq, left, right)
    read = seen
    if mask.ptr is not None:
        loaded = load_mask(mask.ptr, mask.stride_row, mask.stride_column, rows, columns, seen)
        bias, seen, read = split_mask(loaded, seen, FLOAT)
        x = x + bias
        z = z + bias
    return tl.where(seen, x, float("-inf")), z, seen, read, slope


@triton.jit
def _forward_kernel(
    q_exponent_ptr,
    q_growth_ptr,
    q_far_ptr,
    k_exponent_ptr,
    k_growth_ptr,
    k_far_ptr,
    weight_ptr,
    value_ptr,
    out_ptr,
    lse_ptr,
    statistics_ptr,
    mask_ptr,
    head_scale_ptr,
    sinks_ptr,
    key_lengths_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    seed_ptr,
    counts_ptr,
    batch,
    heads,
    repeats,
    queries,
    keys,
    prepared_queries,
    prepared_keys,
    sequences,
    left,
    right,
    scale,
    softcap,
    rate,
    kept,
    stride_weight_b,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_vd,
    stride_ob,
    stride_oh,
    stride_om,
    stride_od,
    stride_mask_b,
    stride_mask_h,
    stride_mask_m,
    stride_mask_n,
    stride_scale_b,
    stride_scale_h,
    stride_sink_b,
    stride_sink_h,
    stride_count_b,
    stride_count_h,
    blocks,
    LOG_N: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
    FACTORED: tl.constexpr,
    PTX: tl.constexpr,
    PRECISION: tl.constexpr,
    UNITS: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: BLOCK_M rows of a head over all the keys that they may see."""
    FLOAT: tl.constexpr = lse_ptr.dtype.element_ty
    program = tl.program_id(0)
    head = (program // blocks).to(tl.int64)  # b * H + h
    b = head // heads
    h = head % heads
    block = blocks - 1 - program % blocks  # under a causal mask the last rows have most to do
    index, row = 0, block * BLOCK_M
    if cu_seqlens_q_ptr is not None:
        index, row = find_sequence(cu_seqlens_q_ptr, sequences, block, BLOCK_M)
    seq = sequence_of(
        index,
        b,
        queries,
        keys,
        key_lengths_ptr,
        cu_seqlens_q_ptr,
        cu_seqlens_k_ptr,
        sequences,
        BOTTOM_RIGHT,
    )
    if row >= seq.row_end:
        return
    row_end = tl.minimum(row + BLOCK_M, seq.row_end)
    rows = row + tl.arange(0, BLOCK_M)
    inside = rows < row_end

    group = b * (heads // repeats) + h // repeats
    query = units_of(q_exponent_ptr, q_growth_ptr, q_far_ptr, head, prepared_queries, UNITS)
    key = units_of(k_exponent_ptr, k_growth_ptr, k_far_ptr, group, prepared_keys, UNITS)
    far_rows = is_far(query, rows, inside)
    weight_ptr += b * stride_weight_b + h * UNITS
    mask = Matrix(None, 0, 0)
    if mask_ptr is not None:
        mask_ptr += b * stride_mask_b + h * stride_mask_h
        mask = Matrix(mask_ptr, stride_mask_m, stride_mask_n)
    value = Matrix(None, 0, 0)
    if value_ptr is not None:
        value = Matrix(value_ptr + b * stride_vb + h // repeats * stride_vh, stride_vn, stride_vd)
    if head_scale_ptr is not None:
        head_scale_ptr += b * stride_scale_b + h * stride_scale_h
    if counts_ptr is not None:
        counts_ptr += b * stride_count_b + h * stride_count_h
    sink2 = None
    if sinks_ptr is not None:
        sink2 = load_sink(sinks_ptr + b * stride_sink_b + h * stride_sink_h, FLOAT)
    cap = None
    if softcap is not None:
        cap = number(softcap, FLOAT)
    factor = row_scale(scale, head_scale_ptr, rows, seq, left, right, counts_ptr, LOG_N, FLOAT)
    if LOG_N:
        factor = factor[:, None]  # [M, 1]

    acc = tl.zeros([BLOCK_M, BLOCK_V], FLOAT)
    sums = start_sums(sink2, BLOCK_M, FLOAT)
    first = tl.full([BLOCK_M], float("-inf"), FLOAT)
    tiles = key_tiles(row, row_end, seq, left, right, True, BLOCK_N)
    for start in range(tiles.begin, tiles.end, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        raw, _ = raw_scores(
            query,
            key,
            weight_ptr,
            rows,
            columns,
            inside,
            columns < seq.key_end,
            far_rows,
            UNITS,
            FACTORED,
            PTX,
            FLOAT,
        )
        x, z, _, read, _ = arguments_of(
            raw, factor, rows, columns, seq, left, right, mask, cap, True, FLOAT
        )
        if statistics_ptr is not None:
            is_first = (columns == seq.key)[None, :]
            first = tl.maximum(first, tl.max(tl.where(is_first, x, float("-inf")), 1))
        seen_keys = None
        if mask_ptr is None:
            seen_keys = visible_counts(rows, start, seq, left, right, BLOCK_N)
        sums, p, alpha = add_arguments(
            sums,
            x,
            z if cap is not None else None,
            read,
            statistics_ptr is not None,
            True,
            FLOAT,
            seen_keys,
            sinks_ptr is not None,
        )
        if value_ptr is not None:
            if rate is not None:
                p = tl.where(keeps(seed_ptr, rate, head, rows, columns), p, 0.0)
            v = load_rows(value, columns, seq.key_end, V, BLOCK_V, True)  # [N, V]
            acc = acc * alpha[:, None]
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION, out_dtype=FLOAT)

    closed = close_sums(sums, sink2)
    offsets = head * queries + rows
    tl.store(lse_ptr + offsets, closed.lse2 * LN2, mask=inside)
    if value_ptr is not None:
        out = acc / closed.divisor[:, None]
        if rate is not None:
            out = out * number(kept, FLOAT)
        out = tl.where(closed.empty[:, None], 0.0, out)
        out_ptr += b * stride_ob + h * stride_oh
        offs_v = tl.arange(0, BLOCK_V).to(tl.int64)
        out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * stride_om + offs_v[None, :] * stride_od
        stored = inside[:, None] & (offs_v[None, :] < V)
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=stored)
    if statistics_ptr is not None:
        store_statistics(
            statistics_ptr,
            tl.cast(batch, tl.int64) * heads * queries,
            offsets,
            inside,
            sums,
            closed,
            first,
            sinks_ptr is not None,
            softcap is not None,
            True,
            FLOAT,
        )
