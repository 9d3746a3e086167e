"""Gradients of additive attention, in Triton; every tanh is computed anew, none is kept.

With r = 1 / (1 + e^(2 (q + k))) as in additive.py, tanh = 1 - 2 r and tanh' = 4 r (1 - r). dS is
the gradient of weight . tanh(q + k), found as in backward.py:

    dq_id = 4 w_d sum_j dS_ij r (1 - r)        dk_jd = 4 w_d sum_i dS_ij r (1 - r)
    dw_d = sum_ij dS_ij (1 - 2 r)              dscale_h = sum_ij dS_ij score_ij / scale_h

A program owns BLOCK tokens of one side, lays them along its threads and walks over tiles of the
other side, so that a sum over the other side stays within a thread. Of a tile it finds dS first,
then walks over the units and adds each unit's sums to its own place in memory: the width does not
fit into registers. dO . v and P^T dO are walked in the same way. A matrix product of the tensor
cores would be faster by itself, but its result is laid out in a way of its own, and every unit
would follow into that layout through shared memory. Few long heads are shared by several programs
(`splits`), each with a copy of the sums, added up in order at the end: the same inputs give the
same bits.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from scaledot.backends.cuda.additive import (
    additive_arguments,
    far_unit,
    is_far,
    pair_of_units,
    raw_scores,
    reciprocal,
    units_of,
)
from scaledot.backends.cuda.arguments import compute_type, strides
from scaledot.backends.cuda.backward import (
    load_lse2,
    row_deltas,
    score_gradients,
)
from scaledot.backends.cuda.tile import (
    LN2,
    Dropout,
    Matrix,
    Window,
    find_sequence,
    key_tiles,
    number,
    packed_blocks,
    row_scale,
    row_tiles,
    sequence_of,
)
from scaledot.backends.inputs import Gradients, Inputs, Wanted
from scaledot.problem import Settings

ENOUGH_PROGRAMS = 512  # about four for each multiprocessor of a large GPU
MAX_SPLITS = 8


class Config(NamedTuple):
    """The cut of the work: tokens that a program owns, and of the other side at a time."""

    own: int
    other: int
    warps: int


FLOAT32 = Config(128, 16, 4)
FLOAT64 = Config(32, 16, 4)


def backward(
    inputs: Inputs,
    settings: Settings,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    wanted: Wanted,
    config: Config | None = None,
) -> Gradients:
    """The gradients of the inputs, each of its tensor's type and shape, contiguous."""
    query, key, value, weight = inputs.query, inputs.key, inputs.value, inputs.weight
    assert value is not None
    assert weight is not None
    batch, heads, queries, width = query.shape
    groups, keys = key.shape[1], key.shape[2]
    if not (batch and heads and groups and queries and keys):
        return _nothing(inputs, wanted)
    dtype = compute_type(query)
    if config is None:
        config = FLOAT64 if dtype == torch.float64 else FLOAT32
    lse = lse.contiguous()
    delta = row_deltas(grad_out, out, lse)
    common = additive_arguments(inputs, settings)
    for name in (*strides("v", value, "bhnd"), *strides("sink_", None, "bh"), "sinks_ptr"):
        del common[name]
    del common["PRECISION"]
    blind = (lse == -math.inf).unsqueeze(-1)  # their NaN may reach no product
    common |= {
        "value_ptr": _turned(value, common["prepared_keys"], dtype),
        "grad_out_ptr": _turned(
            grad_out.masked_fill(blind, 0.0), common["prepared_queries"], dtype
        ),
        "lse_ptr": lse,
        "delta_ptr": delta,
        "V": value.shape[-1],
        "num_warps": config.warps,
    }
    units, slope = common["UNITS"], 4.0 * weight.to(dtype).unsqueeze(-1)  # [B|1, H, D, 1]

    def blocks_of(tokens: int) -> int:
        if inputs.cu_seqlens_q is not None:
            return packed_blocks(tokens, common["sequences"], config.own)
        return -(-tokens // config.own)

    def zeros(*shape: int) -> Tensor:
        return query.new_zeros(shape, dtype=dtype)

    blocks = blocks_of(queries)
    splits = _splits(batch * heads * blocks)
    row_units = zeros(splits, batch, heads, units, queries)
    weight_units = zeros(splits, batch, heads, units, queries) if wanted.weight else None
    row_scales = zeros(splits, batch, heads, queries) if wanted.head_scale else None
    rows: dict[str, Any] = {
        "row_units_ptr": row_units,
        "weight_units_ptr": weight_units,
        "row_scales_ptr": row_scales,
        "blocks": blocks,
        "splits": splits,
        "BLOCK_M": config.own,
        "BLOCK_N": config.other,
    }
    with torch.cuda.device_of(query):
        _rows_kernel[(splits * batch * heads * blocks,)](**common, **rows)
    grad_query = (row_units.sum(0)[:, :, :width] * slope).mT.to(query.dtype)

    blocks = blocks_of(keys)
    splits = _splits(batch * groups * blocks)
    repeats = heads // groups
    # A key's units are weighted by each query head's weight apart.
    key_units = zeros(splits, batch, heads, units, keys)
    values = zeros(splits, batch, groups, value.shape[-1], keys)
    owners: dict[str, Any] = {
        "key_units_ptr": key_units,
        "grad_value_ptr": values,
        "blocks": blocks,
        "splits": splits,
        "BLOCK_M": config.other,
        "BLOCK_N": config.own,
    }
    with torch.cuda.device_of(query):
        _keys_kernel[(splits * batch * groups * blocks,)](**common, **owners)
    each = key_units.sum(0)[:, :, :width] * slope
    grad_key = each.unflatten(1, (groups, repeats)).sum(2).mT.to(key.dtype)

    return Gradients(
        query=grad_query.contiguous(),
        key=grad_key.contiguous(),
        value=values.sum(0).mT.to(value.dtype).contiguous(),
        mask=_mask_gradient(inputs, common, config) if wanted.mask else None,
        head_scale=None
        if row_scales is None
        else _summed(row_scales.sum((0, -1)) * settings.scale, inputs.head_scale),
        sinks=_sink_gradient(inputs, lse, delta) if wanted.sinks else None,
        weight=None
        if weight_units is None
        else _summed(weight_units.sum((0, -1))[:, :, :width], weight),
    )


def _nothing(inputs: Inputs, wanted: Wanted) -> Gradients:
    """No pair exists: every gradient is 0."""
    asked = (True, True, True, *wanted)
    tensors = (*inputs[:3], inputs.mask, inputs.head_scale, inputs.sinks, inputs.weight)
    return Gradients._make(
        torch.zeros_like(tensor) if want and tensor is not None else None
        for tensor, want in zip(tensors, asked, strict=True)
    )


def _summed(each: Tensor, tensor: Tensor | None) -> Tensor:
    """What belongs to each batch entry, summed to the shape of the tensor that they share."""
    assert tensor is not None
    return each.sum_to_size(tensor.shape).to(tensor.dtype)


def _sink_gradient(inputs: Inputs, lse: Tensor, delta: Tensor) -> Tensor:
    """-sum_i p_sink,i delta_i; rows that see no key have no part in it."""
    assert inputs.sinks is not None
    off = (inputs.sinks.to(lse.dtype).unsqueeze(-1) - lse).exp()
    each = -(off * delta).masked_fill(lse == -math.inf, 0.0).sum(-1)  # [B, H]
    return _summed(each, inputs.sinks)


def _splits(programs: int) -> int:
    return min(max(ENOUGH_PROGRAMS // programs, 1), MAX_SPLITS)


def _turned(tensor: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """[B, heads, n, width] as [B, heads, width, tokens], tokens along the memory, 0 to spare."""
    turned = tensor.new_zeros((*tensor.shape[:2], tensor.shape[-1], tokens), dtype=dtype)
    turned[..., : tensor.shape[2]] = tensor.mT
    return turned


# --- units ---------------------------------------------------------------------------------------


@triton.jit
def _add_units(
    grad_s,
    one,
    two,
    tokens_one,
    tokens_two,
    inside_one,
    inside_two,
    far,
    sums_ptr,
    weight_sums_ptr,
    tokens,
    UNITS: tl.constexpr,
    FACTORED: tl.constexpr,
    PTX: tl.constexpr,
):
    """sums[unit, two] += sum_one dS r (1 - r) and weight_sums[unit, two] += sum_one dS (1 - 2 r).

    grad_s [one, two]. A thread meets its own places in memory only.
    """
    if FACTORED and not far:
        for unit in range(0, UNITS, 2):
            d, d_2 = pair_of_units(one, two, unit, tokens_one, tokens_two)
            both = reciprocal(d * d_2, PTX)
            place = unit * tl.cast(tokens, tl.int64) + tokens_two
            _add_unit(grad_s, d_2 * both, sums_ptr, weight_sums_ptr, place, inside_two)
            _add_unit(grad_s, d * both, sums_ptr, weight_sums_ptr, place + tokens, inside_two)
    else:
        for unit in range(0, UNITS):
            r = far_unit(one, two, unit, tokens_one, tokens_two, inside_one, inside_two)
            r = tl.where(grad_s == 0.0, 0.0, r)  # NaN of a hidden pair stays hidden
            place = unit * tl.cast(tokens, tl.int64) + tokens_two
            _add_unit(grad_s, r, sums_ptr, weight_sums_ptr, place, inside_two)


@triton.jit
def _add_unit(grad_s, r, sums_ptr, weight_sums_ptr, place, inside):
    part = grad_s * r
    sums = tl.load(sums_ptr + place, mask=inside, other=0.0)
    tl.store(sums_ptr + place, sums + tl.sum(part - part * r, 0), mask=inside)
    if weight_sums_ptr is not None:
        sums = tl.load(weight_sums_ptr + place, mask=inside, other=0.0)
        tl.store(weight_sums_ptr + place, sums + tl.sum(grad_s - 2.0 * part, 0), mask=inside)


@triton.jit
def _products(
    one_ptr,
    two_ptr,
    tokens_one,
    tokens_two,
    stride_one,
    stride_two,
    V: tl.constexpr,
    FLOAT: tl.constexpr,
):
    """dO . v of a tile [one, two], from turned tensors."""
    acc = tl.zeros([tokens_one.shape[0], tokens_two.shape[0]], FLOAT)
    for column in range(0, V):
        i = tl.load(one_ptr + column * tl.cast(stride_one, tl.int64) + tokens_one)
        j = tl.load(two_ptr + column * tl.cast(stride_two, tl.int64) + tokens_two)
        acc += i[:, None] * j[None, :]
    return acc


@triton.jit
def _add_values(
    p, grad_out_ptr, rows, inside, stride, sums_ptr, columns, key_mask, keys, V: tl.constexpr
):
    """sums[column of v, key] += sum_i p_ij dO_i; p [M, N]."""
    for column in range(0, V):
        do_ptrs = grad_out_ptr + column * tl.cast(stride, tl.int64) + rows
        do = tl.load(do_ptrs, mask=inside, other=0.0)
        ptrs = sums_ptr + column * tl.cast(keys, tl.int64) + columns
        sums = tl.load(ptrs, mask=key_mask, other=0.0)
        tl.store(ptrs, sums + tl.sum(p * do[:, None], 0), mask=key_mask)


# --- dq, dw, dscale ------------------------------------------------------------------------------


@triton.jit
def _rows_kernel(
    q_exponent_ptr,
    q_growth_ptr,
    q_far_ptr,
    k_exponent_ptr,
    k_growth_ptr,
    k_far_ptr,
    weight_ptr,
    value_ptr,
    grad_out_ptr,
    lse_ptr,
    delta_ptr,
    row_units_ptr,
    weight_units_ptr,
    row_scales_ptr,
    mask_ptr,
    head_scale_ptr,
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
    stride_mask_b,
    stride_mask_h,
    stride_mask_m,
    stride_mask_n,
    stride_scale_b,
    stride_scale_h,
    stride_count_b,
    stride_count_h,
    blocks,
    splits,
    LOG_N: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
    FACTORED: tl.constexpr,
    PTX: tl.constexpr,
    UNITS: tl.constexpr,
    V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The sums of BLOCK_M rows over every splits-th tile of the keys that they see."""
    FLOAT: tl.constexpr = lse_ptr.dtype.element_ty
    program = tl.program_id(0)
    split = program % splits
    block = program // splits % blocks
    head = (program // splits // blocks).to(tl.int64)  # b * H + h
    b = head // heads
    h = head % heads
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
    weight_ptr += b * stride_weight_b + h * UNITS
    value_ptr += group * V * prepared_keys
    grad_out_ptr += head * V * prepared_queries
    mask = Matrix(None, 0, 0)
    if mask_ptr is not None:
        mask_ptr += b * stride_mask_b + h * stride_mask_h
        mask = Matrix(mask_ptr, stride_mask_m, stride_mask_n)
    if head_scale_ptr is not None:
        head_scale_ptr += b * stride_scale_b + h * stride_scale_h
    if counts_ptr is not None:
        counts_ptr += b * stride_count_b + h * stride_count_h
    cap = None
    if softcap is not None:
        cap = number(softcap, FLOAT)
    dropout = Dropout(None, None, 0, 0)
    if rate is not None:
        dropout = Dropout(seed_ptr, rate, head, number(kept, FLOAT))
    copy = tl.cast(split, tl.int64) * batch * heads + head
    row_units_ptr += copy * UNITS * queries
    if weight_units_ptr is not None:
        weight_units_ptr += copy * UNITS * queries

    lse2 = load_lse2(lse_ptr + head * queries, rows, row_end)
    delta = tl.load(delta_ptr + head * queries + rows, mask=inside, other=0.0)
    factor = row_scale(scale, head_scale_ptr, rows, seq, left, right, counts_ptr, LOG_N, FLOAT)
    if LOG_N:
        factor = factor[None, :]  # [1, M]
    scales = tl.zeros([BLOCK_M], FLOAT)
    tiles = key_tiles(row, row_end, seq, left, right, True, BLOCK_N)
    for start in range(tiles.begin + split * BLOCK_N, tiles.end, splits * BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        key_mask = columns < seq.key_end
        raw, far = raw_scores(
            key,
            query,
            weight_ptr,
            columns,
            rows,
            key_mask,
            inside,
            is_far(key, columns, key_mask),
            UNITS,
            FACTORED,
            PTX,
            FLOAT,
        )  # [N, M]
        grad_p = _products(
            value_ptr, grad_out_ptr, columns, rows, prepared_keys, prepared_queries, V, FLOAT
        )
        _, _, grad_s = score_gradients(
            raw,
            grad_p,
            factor,
            lse2[None, :],
            delta[None, :],
            rows[None, :],
            columns[:, None],
            seq,
            Window(left, right),
            mask,
            cap,
            dropout,
            True,
            True,
            FLOAT,
        )
        if row_scales_ptr is not None:
            scales += tl.sum(tl.where(grad_s == 0.0, 0.0, grad_s * raw), 0)
        _add_units(
            grad_s * (factor * LN2),
            key,
            query,
            columns,
            rows,
            key_mask,
            inside,
            far,
            row_units_ptr,
            weight_units_ptr,
            queries,
            UNITS,
            FACTORED,
            PTX,
        )
    if row_scales_ptr is not None:
        tl.store(row_scales_ptr + copy * queries + rows, scales, mask=inside)


# --- dk and dv -----------------------------------------------------------------------------------


@triton.jit
def _keys_kernel(
    q_exponent_ptr,
    q_growth_ptr,
    q_far_ptr,
    k_exponent_ptr,
    k_growth_ptr,
    k_far_ptr,
    weight_ptr,
    value_ptr,
    grad_out_ptr,
    lse_ptr,
    delta_ptr,
    key_units_ptr,
    grad_value_ptr,
    mask_ptr,
    head_scale_ptr,
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
    stride_mask_b,
    stride_mask_h,
    stride_mask_m,
    stride_mask_n,
    stride_scale_b,
    stride_scale_h,
    stride_count_b,
    stride_count_h,
    blocks,
    splits,
    LOG_N: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
    FACTORED: tl.constexpr,
    PTX: tl.constexpr,
    UNITS: tl.constexpr,
    V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The sums of BLOCK_N keys over every splits-th tile of the rows that see them."""
    FLOAT: tl.constexpr = lse_ptr.dtype.element_ty
    program = tl.program_id(0)
    split = program % splits
    block = program // splits % blocks
    group = (program // splits // blocks).to(tl.int64)  # b * G + g
    groups = heads // repeats
    b = group // groups
    g = group % groups
    index, key_first = 0, block * BLOCK_N
    if cu_seqlens_k_ptr is not None:
        index, key_first = find_sequence(cu_seqlens_k_ptr, sequences, block, BLOCK_N)
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
    if key_first >= seq.key_end:
        return
    key_stop = tl.minimum(key_first + BLOCK_N, seq.key_end)
    columns = key_first + tl.arange(0, BLOCK_N)
    key_mask = columns < key_stop
    key = units_of(k_exponent_ptr, k_growth_ptr, k_far_ptr, group, prepared_keys, UNITS)
    value_ptr += group * V * prepared_keys
    values_ptr = grad_value_ptr + (tl.cast(split, tl.int64) * batch * groups + group) * V * keys
    cap = None
    if softcap is not None:
        cap = number(softcap, FLOAT)
    tiles = row_tiles(key_first, key_stop, seq, left, right, True, BLOCK_M)
    for repeat in range(0, repeats):
        h = g * repeats + repeat
        head = b * heads + h
        query = units_of(q_exponent_ptr, q_growth_ptr, q_far_ptr, head, prepared_queries, UNITS)
        own_weight_ptr = weight_ptr + b * stride_weight_b + h * UNITS
        own_grad_ptr = grad_out_ptr + head * V * prepared_queries
        mask = Matrix(None, 0, 0)
        if mask_ptr is not None:
            own_mask_ptr = mask_ptr + b * stride_mask_b + h * stride_mask_h
            mask = Matrix(own_mask_ptr, stride_mask_m, stride_mask_n)
        own_scale_ptr = None
        if head_scale_ptr is not None:
            own_scale_ptr = head_scale_ptr + b * stride_scale_b + h * stride_scale_h
        own_counts_ptr = None
        if counts_ptr is not None:
            own_counts_ptr = counts_ptr + b * stride_count_b + h * stride_count_h
        dropout = Dropout(None, None, 0, 0)
        if rate is not None:
            dropout = Dropout(seed_ptr, rate, head, number(kept, FLOAT))
        copy = tl.cast(split, tl.int64) * batch * heads + head
        for start in range(tiles.begin + split * BLOCK_M, tiles.end, splits * BLOCK_M):
            rows = start + tl.arange(0, BLOCK_M)
            inside = rows < seq.row_end
            lse2 = load_lse2(lse_ptr + head * queries, rows, seq.row_end)
            delta = tl.load(delta_ptr + head * queries + rows, mask=inside, other=0.0)
            factor = row_scale(
                scale, own_scale_ptr, rows, seq, left, right, own_counts_ptr, LOG_N, FLOAT
            )
            if LOG_N:
                factor = factor[:, None]  # [M, 1]
            raw, far = raw_scores(
                query,
                key,
                own_weight_ptr,
                rows,
                columns,
                inside,
                key_mask,
                is_far(query, rows, inside),
                UNITS,
                FACTORED,
                PTX,
                FLOAT,
            )  # [M, N]
            grad_p = _products(
                own_grad_ptr, value_ptr, rows, columns, prepared_queries, prepared_keys, V, FLOAT
            )
            used, _, grad_s = score_gradients(
                raw,
                grad_p,
                factor,
                lse2[:, None],
                delta[:, None],
                rows[:, None],
                columns[None, :],
                seq,
                Window(left, right),
                mask,
                cap,
                dropout,
                True,
                True,
                FLOAT,
            )
            _add_values(
                used,
                own_grad_ptr,
                rows,
                inside,
                prepared_queries,
                values_ptr,
                columns,
                key_mask,
                keys,
                V,
            )
            _add_units(
                grad_s * (factor * LN2),
                query,
                key,
                rows,
                columns,
                inside,
                key_mask,
                far,
                key_units_ptr + copy * UNITS * keys,
                None,
                keys,
                UNITS,
                FACTORED,
                PTX,
            )


# --- dbias ---------------------------------------------------------------------------------------


def _mask_gradient(inputs: Inputs, common: dict[str, Any], config: Config) -> Tensor:
    """One program a tile of the mask as the caller made it, over all that was broadcast from it."""
    mask = inputs.mask
    assert mask is not None
    grad = torch.empty(mask.shape, dtype=mask.dtype, device=mask.device)
    own_batch, own_heads, own_rows, own_keys = mask.shape
    row_blocks = -(-own_rows // config.other)
    key_blocks = -(-own_keys // config.own)
    arguments: dict[str, Any] = {
        **common,
        "grad_mask_ptr": grad,
        "own_batch": own_batch,
        "own_heads": own_heads,
        "row_blocks": row_blocks,
        "key_blocks": key_blocks,
        "ONE_ROW": own_rows == 1,
        "ONE_KEY": own_keys == 1,
        "BLOCK_M": config.other,
        "BLOCK_N": config.own,
    }
    with torch.cuda.device_of(mask):
        _mask_kernel[(own_batch * own_heads * row_blocks * key_blocks,)](**arguments)
    return grad


@triton.jit
def _mask_kernel(
    q_exponent_ptr,
    q_growth_ptr,
    q_far_ptr,
    k_exponent_ptr,
    k_growth_ptr,
    k_far_ptr,
    weight_ptr,
    value_ptr,
    grad_out_ptr,
    lse_ptr,
    delta_ptr,
    grad_mask_ptr,
    mask_ptr,
    head_scale_ptr,
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
    stride_mask_b,
    stride_mask_h,
    stride_mask_m,
    stride_mask_n,
    stride_scale_b,
    stride_scale_h,
    stride_count_b,
    stride_count_h,
    own_batch,
    own_heads,
    row_blocks,
    key_blocks,
    LOG_N: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
    FACTORED: tl.constexpr,
    PTX: tl.constexpr,
    UNITS: tl.constexpr,
    V: tl.constexpr,
    ONE_ROW: tl.constexpr,
    ONE_KEY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dA of the pairs that read a tile of the mask, summed over batch entries, heads, and, where
    the mask has but one of them, rows or keys."""
    FLOAT: tl.constexpr = lse_ptr.dtype.element_ty
    program = tl.program_id(0)
    key_block = program % key_blocks
    row_block = program // key_blocks % row_blocks
    own_h = program // key_blocks // row_blocks % own_heads
    own_b = program // key_blocks // row_blocks // own_heads
    b_stop = own_b + 1
    if own_batch == 1:
        b_stop = own_b + batch
    h_stop = own_h + 1
    if own_heads == 1:
        h_stop = own_h + heads
    row_first = row_block * BLOCK_M
    row_stop = row_first + BLOCK_M
    if ONE_ROW:
        row_stop = row_first + queries
    key_first = key_block * BLOCK_N
    key_stop = key_first + BLOCK_N
    if ONE_KEY:
        key_stop = key_first + keys
    cap = None
    if softcap is not None:
        cap = number(softcap, FLOAT)
    total = tl.zeros([BLOCK_M, BLOCK_N], FLOAT)
    for b32 in range(own_b, b_stop):
        b = tl.cast(b32, tl.int64)
        for index in range(0, tl.maximum(sequences, 1)):
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
            # Tiles lie where the mask's lie; what is not of this sequence is hidden.
            first = tl.maximum(row_first, seq.row // BLOCK_M * BLOCK_M)
            stop = tl.minimum(row_stop, seq.row_end)
            for h32 in range(own_h, h_stop):
                h = tl.cast(h32, tl.int64)
                for row in range(first, stop, BLOCK_M):
                    for column in range(key_first, key_stop, BLOCK_N):
                        total += _pair_gradients(
                            row + tl.arange(0, BLOCK_M),
                            column + tl.arange(0, BLOCK_N),
                            q_exponent_ptr,
                            q_growth_ptr,
                            q_far_ptr,
                            k_exponent_ptr,
                            k_growth_ptr,
                            k_far_ptr,
                            prepared_queries,
                            prepared_keys,
                            b * heads + h,
                            b * (heads // repeats) + h // repeats,
                            weight_ptr + b * stride_weight_b + h * UNITS,
                            value_ptr + (b * (heads // repeats) + h // repeats) * V * prepared_keys,
                            grad_out_ptr + (b * heads + h) * V * prepared_queries,
                            Matrix(
                                mask_ptr + b * stride_mask_b + h * stride_mask_h,
                                stride_mask_m,
                                stride_mask_n,
                            ),
                            lse_ptr + (b * heads + h) * queries,
                            delta_ptr + (b * heads + h) * queries,
                            scale,
                            None
                            if head_scale_ptr is None
                            else head_scale_ptr + b * stride_scale_b + h * stride_scale_h,
                            None
                            if counts_ptr is None
                            else counts_ptr + b * stride_count_b + h * stride_count_h,
                            seq,
                            Window(left, right),
                            cap,
                            seed_ptr,
                            rate,
                            kept,
                            LOG_N,
                            FACTORED,
                            PTX,
                            UNITS,
                            V,
                            FLOAT,
                        )
    own_rows = 1 if ONE_ROW else queries
    own_keys = 1 if ONE_KEY else keys
    grad_mask_ptr += (tl.cast(own_b, tl.int64) * own_heads + own_h) * own_rows * own_keys
    rows = row_first + tl.arange(0, BLOCK_M)
    columns = key_first + tl.arange(0, BLOCK_N)
    if ONE_ROW:
        total = tl.sum(total, 0, keep_dims=True)
        rows = tl.arange(0, 1)
    if ONE_KEY:
        total = tl.sum(total, 1, keep_dims=True)
        columns = tl.arange(0, 1)
    offsets = rows.to(tl.int64)[:, None] * own_keys + columns[None, :]
    stored = (rows < own_rows)[:, None] & (columns < own_keys)[None, :]
    tl.store(grad_mask_ptr + offsets, total.to(grad_mask_ptr.dtype.element_ty), mask=stored)


@triton.jit
def _pair_gradients(
    rows,
    columns,
    q_exponent_ptr,
    q_growth_ptr,
    q_far_ptr,
    k_exponent_ptr,
    k_growth_ptr,
    k_far_ptr,
    prepared_queries,
    prepared_keys,
    head,
    group,
    weight_ptr,
    value_ptr,
    grad_out_ptr,
    mask,
    lse_ptr,
    delta_ptr,
    scale,
    head_scale_ptr,
    counts_ptr,
    seq,
    window,
    cap,
    seed_ptr,
    rate,
    kept,
    LOG_N: tl.constexpr,
    FACTORED: tl.constexpr,
    PTX: tl.constexpr,
    UNITS: tl.constexpr,
    V: tl.constexpr,
    FLOAT: tl.constexpr,
):
    """dA [M, N] of rows and keys of one head; 0 where they are not of the sequence."""
    query = units_of(q_exponent_ptr, q_growth_ptr, q_far_ptr, head, prepared_queries, UNITS)
    key = units_of(k_exponent_ptr, k_growth_ptr, k_far_ptr, group, prepared_keys, UNITS)
    dropout = Dropout(None, None, 0, 0)
    if rate is not None:
        dropout = Dropout(seed_ptr, rate, head, number(kept, FLOAT))
    inside = (rows >= seq.row) & (rows < seq.row_end)
    key_mask = (columns >= seq.key) & (columns < seq.key_end)
    lse = tl.load(lse_ptr + rows, mask=inside, other=float("-inf"))
    lse2 = tl.where(lse == float("-inf"), float("inf"), lse / LN2)
    delta = tl.load(delta_ptr + rows, mask=inside, other=0.0)
    factor = row_scale(
        scale, head_scale_ptr, rows, seq, window.left, window.right, counts_ptr, LOG_N, FLOAT
    )
    if LOG_N:
        factor = factor[:, None]
    raw, _ = raw_scores(
        query,
        key,
        weight_ptr,
        rows,
        columns,
        inside,
        key_mask,
        is_far(query, rows, inside),
        UNITS,
        FACTORED,
        PTX,
        FLOAT,
    )
    grad_p = _products(
        grad_out_ptr, value_ptr, rows, columns, prepared_queries, prepared_keys, V, FLOAT
    )
    _, grad_a, _ = score_gradients(
        raw,
        grad_p,
        factor,
        lse2[:, None],
        delta[:, None],
        rows[:, None],
        columns[None, :],
        seq,
        window,
        mask,
        cap,
        dropout,
        True,
        True,
        FLOAT,
    )
    return tl.where(inside[:, None] & key_mask[None, :], grad_a, 0.0)
