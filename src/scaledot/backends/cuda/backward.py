"""Gradients of attention with dot scores, in Triton; the probabilities are computed anew.

With P = 2^(x - lse2) (x the softmax's argument in base 2), delta_i = dO_i . O_i, and dropout's
factors on P where it is multiplied by V and on dP:

    dP = dO V^T      dA = P (dP - delta)      dS = dA, times 1 - (c / cap)^2 where there is a cap
    dV = P^T dO      dQ = scale dS K          dK = scale dS^T Q
    dscale_h = sum_i q_i . (dS K)_i           dsink_h = -sum_i p_sink,i delta_i
    dbias = dA, summed over what was broadcast

Three kernels, in which every number has one writer, so that the same inputs give the same bits: one
program a block of keys for dK and dV (it walks over all query heads of its key head), one a block
of rows for dQ, one a tile of the mask for dbias. Where a head is too wide for shared memory, each
program owns a part of the columns of its result and multiplies part by part.

Rows that see no key pass nothing on: their lse of -inf is read as +inf, which makes P zero, and
nothing else of them is read.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from scaledot.backends.cuda.arguments import (
    dot_precision,
    padded,
    shared_arguments,
    strides,
)
from scaledot.backends.cuda.counts import counts_for
from scaledot.backends.cuda.tile import (
    LN2,
    LOG2E,
    Dropout,
    Matrix,
    Window,
    capped,
    find_sequence,
    keeps_pairs,
    key_tiles,
    load_mask_pairs,
    load_rows,
    number,
    packed_blocks,
    reachable_pairs,
    row_scale,
    row_tiles,
    sequence_of,
    split_mask,
    visible_pairs,
)
from scaledot.backends.inputs import Gradients, Inputs, Wanted
from scaledot.problem import Settings


class Config(NamedTuple):
    """The cut of the work: rows and keys of a tile, for dK and dV, then for dQ."""

    keys_m: int
    keys_n: int
    rows_m: int
    rows_n: int
    warps: int
    stages: int


# By bytes of an element and the larger of the padded widths.
CONFIGS = {
    (2, 64): Config(64, 128, 128, 64, 8, 2),
    (2, 128): Config(32, 128, 128, 64, 8, 2),
    (2, 256): Config(32, 64, 128, 32, 8, 1),
    (2, 512): Config(32, 32, 32, 32, 8, 1),
    (4, 64): Config(32, 32, 32, 32, 8, 2),
    (4, 128): Config(16, 16, 32, 16, 8, 1),
    (8, 64): Config(16, 32, 32, 16, 4, 1),
}
SMALLEST = Config(16, 16, 16, 16, 8, 1)
WIDEST = {2: 512, 4: 256, 8: 256}  # columns of a head whose four tiles fit in shared memory


def config_for(query: Tensor, widest: int) -> Config:
    size = query.element_size()
    widths = [width for bytes_, width in CONFIGS if bytes_ == size and width >= widest]
    return CONFIGS[size, min(widths)] if widths else SMALLEST


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
    query, key, value = inputs.query, inputs.key, inputs.value
    assert value is not None
    batch, heads, queries, width = query.shape
    groups, keys = key.shape[1], key.shape[2]
    if not (batch and heads and groups and queries and keys):
        return _nothing(inputs, wanted)
    block_d = min(padded(width), WIDEST[query.element_size()])
    block_v = min(padded(value.shape[-1]), WIDEST[query.element_size()])
    parts = max(triton.cdiv(width, block_d), triton.cdiv(value.shape[-1], block_v), 1)
    if config is None:
        config = config_for(query, max(block_d, block_v))
    lse = lse.contiguous()
    delta = row_deltas(grad_out, out, lse)
    grad_query, grad_key, grad_value = (
        torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (query, key, value)
    )
    row_scales = None
    if wanted.head_scale:
        row_scales = delta.new_empty((parts, *delta.shape))
    shared = shared_arguments(inputs, settings)
    del shared["sinks_ptr"], shared["stride_sink_b"], shared["stride_sink_h"]
    packed = inputs.cu_seqlens_q is not None
    common: dict[str, Any] = {
        **shared,
        **counts_for(inputs, settings, shared),
        "grad_out_ptr": grad_out,
        "lse_ptr": lse,
        "delta_ptr": delta,
        **strides("do", grad_out, "bhmd"),
        "LOG_N": settings.log_n,
        "BOTTOM_RIGHT": settings.bottom_right,
        "PRECISION": dot_precision(query),
        "D": width,
        "V": value.shape[-1],
        "BLOCK_D": block_d,
        "BLOCK_V": block_v,
        "PARTS": parts,
        "num_warps": config.warps,
        "num_stages": config.stages,
    }

    def blocks_of(tokens: int, block: int) -> int:
        if packed:
            return packed_blocks(tokens, shared["sequences"], block)
        return triton.cdiv(tokens, block)

    key_blocks = blocks_of(keys, config.keys_n)
    of_keys: dict[str, Any] = {
        "grad_key_ptr": grad_key,
        "grad_value_ptr": grad_value,
        "blocks": key_blocks,
        "BLOCK_M": config.keys_m,
        "BLOCK_N": config.keys_n,
    }
    _keys_kernel[(batch * groups * key_blocks * parts,)](**common, **of_keys)
    row_blocks = blocks_of(queries, config.rows_m)
    of_rows: dict[str, Any] = {
        "grad_query_ptr": grad_query,
        "row_scales_ptr": row_scales,
        "blocks": row_blocks,
        "BLOCK_M": config.rows_m,
        "BLOCK_N": config.rows_n,
    }
    _rows_kernel[(batch * heads * row_blocks * parts,)](**common, **of_rows)
    return Gradients(
        query=grad_query,
        key=grad_key,
        value=grad_value,
        mask=_mask_gradient(inputs, common, config) if wanted.mask else None,
        head_scale=_scale_gradient(inputs, settings, row_scales),
        sinks=_sink_gradient(inputs, lse, delta) if wanted.sinks else None,
        weight=None,
    )


def _nothing(inputs: Inputs, wanted: Wanted) -> Gradients:
    """No pair exists: every gradient is 0."""

    def zeros(tensor: Tensor | None, asked: bool) -> Tensor | None:
        return torch.zeros_like(tensor) if asked and tensor is not None else None

    assert inputs.value is not None
    return Gradients(
        torch.zeros_like(inputs.query),
        torch.zeros_like(inputs.key),
        torch.zeros_like(inputs.value),
        zeros(inputs.mask, wanted.mask),
        zeros(inputs.head_scale, wanted.head_scale),
        zeros(inputs.sinks, wanted.sinks),
        None,
    )


def _scale_gradient(inputs: Inputs, settings: Settings, row_scales: Tensor | None) -> Tensor | None:
    if row_scales is None:
        return None
    assert inputs.head_scale is not None
    each = row_scales.sum((0, -1)) * settings.scale  # [B, H]
    return each.sum_to_size(inputs.head_scale.shape).to(inputs.head_scale.dtype)


def _sink_gradient(inputs: Inputs, lse: Tensor, delta: Tensor) -> Tensor:
    """delta is 0 in rows that see no key, and their lse must not be read."""
    assert inputs.sinks is not None
    blind = lse == float("-inf")
    off = (inputs.sinks.to(lse.dtype).unsqueeze(-1) - lse).exp()
    each = -torch.where(blind, 0.0, off * delta).sum(-1)  # [B, H]
    return each.sum_to_size(inputs.sinks.shape).to(inputs.sinks.dtype)


# --- delta = rowsum(dO * O) ----------------------------------------------------------------------


def row_deltas(grad_out: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """[B, H, Q]; 0 in rows that see no key, whatever comes in."""
    batch, heads, queries, width = out.shape
    delta = torch.empty_like(lse)
    block_v = padded(width)
    block_m = max(min(8192 // block_v, 64), 1)
    blocks = triton.cdiv(queries, block_m)
    arguments: dict[str, Any] = {
        "grad_out_ptr": grad_out,
        "out_ptr": out,
        "lse_ptr": lse,
        "delta_ptr": delta,
        "heads": heads,
        "queries": queries,
        "blocks": blocks,
        **strides("do", grad_out, "bhmd"),
        **strides("o", out, "bhmd"),
        "V": width,
        "BLOCK_V": block_v,
        "BLOCK_M": block_m,
    }
    _delta_kernel[(batch * heads * blocks,)](**arguments)
    return delta


@triton.jit
def _delta_kernel(
    grad_out_ptr,
    out_ptr,
    lse_ptr,
    delta_ptr,
    heads,
    queries,
    blocks,
    stride_dob,
    stride_doh,
    stride_dom,
    stride_dod,
    stride_ob,
    stride_oh,
    stride_om,
    stride_od,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    program = tl.program_id(0)
    rows = program % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    h = (program // blocks % heads).to(tl.int64)
    b = (program // blocks // heads).to(tl.int64)
    grad_out = Matrix(grad_out_ptr + b * stride_dob + h * stride_doh, stride_dom, stride_dod)
    out = Matrix(out_ptr + b * stride_ob + h * stride_oh, stride_om, stride_od)
    lse_ptr += (b * heads + h) * queries
    delta_ptr += (b * heads + h) * queries
    lse = tl.load(lse_ptr + rows, mask=rows < queries, other=0.0)
    do = load_rows(grad_out, rows, queries, V, BLOCK_V, True).to(lse.dtype)
    o = load_rows(out, rows, queries, V, BLOCK_V, True).to(lse.dtype)
    delta = tl.where(lse == float("-inf"), 0.0, tl.sum(do * o, 1))
    tl.store(delta_ptr + rows, delta, mask=rows < queries)


# --- what all gradients share --------------------------------------------------------------------


@triton.jit
def load_lse2(lse_ptr, rows, end):
    """lse in base 2; +inf, which makes every P zero, in rows that see no key and past the end."""
    lse = tl.load(lse_ptr + rows, mask=rows < end, other=float("-inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)


@triton.jit
def _alive(rows, lse2, end):
    """The rows, with `end` for those that see nothing: not read, their NaN reaches no product."""
    return tl.where(lse2 == float("inf"), end, rows)


@triton.jit
def _load_part(matrix, rows, end, part, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The columns [part * BLOCK, ...) of rows, 0 past the width and from `end` on."""
    columns = part * BLOCK + tl.arange(0, BLOCK)
    offsets = rows.to(tl.int64)[:, None] * matrix.stride_row
    offsets = offsets + columns.to(tl.int64)[None, :] * matrix.stride_column
    inside = (rows < end)[:, None] & (columns < WIDTH)[None, :]
    return tl.load(matrix.ptr + offsets, mask=inside, other=0.0)


@triton.jit
def _wide_product(
    a,
    rows_a,
    end_a,
    b,
    rows_b,
    end_b,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    FLOAT: tl.constexpr,
):
    """a . b^T of rows too wide for one tile, part by part."""
    result = tl.zeros([rows_a.shape[0], rows_b.shape[0]], FLOAT)
    for part in range(0, PARTS):
        one = _load_part(a, rows_a, end_a, part, WIDTH, BLOCK)
        two = _load_part(b, rows_b, end_b, part, WIDTH, BLOCK)
        result = tl.dot(one, tl.trans(two), result, input_precision=PRECISION, out_dtype=FLOAT)
    return result


@triton.jit
def score_gradients(
    scores,
    grad_p,
    factor,
    lse2,
    delta,
    i,
    j,
    seq,
    window,
    mask,
    cap,
    dropout,
    EDGE: tl.constexpr,
    PRECISE: tl.constexpr,
    FLOAT: tl.constexpr,
):
    """P (times dropout's factors), dA and dS of a tile; everything broadcasts from i and j.

    scores = q . k and grad_p = dO . v are [M, N] with i [M, 1] and j [1, N], or [N, M] with
    i [1, M] and j [N, 1]; factor, lse2 and delta are like i, or numbers.
    """
    x = scores * factor
    slope = x
    if cap is not None:
        x, slope = capped(x, cap, PRECISE)
    seen = i >= 0
    if EDGE and mask.ptr is None:
        seen = reachable_pairs(i, j, seq, window.left, window.right)
    elif EDGE:
        seen = visible_pairs(i, j, seq, window.left, window.right)
        loaded = load_mask_pairs(mask.ptr, mask.stride_row, mask.stride_column, i, j, seen)
        bias, seen, _ = split_mask(loaded, seen, FLOAT)
        x = x + bias
    # Rounding can lift x above lse2 where both are huge; min keeps NaN.
    p = tl.exp2(tl.minimum(x - lse2, 0.0, propagate_nan=tl.PropagateNan.ALL))
    if EDGE:
        p = tl.where(seen, p, 0.0)
    used = p
    if dropout.rate is not None:
        kept = keeps_pairs(dropout.seed_ptr, dropout.rate, dropout.head, i, j)
        used = tl.where(kept, p * dropout.factor, 0.0)
        grad_p = tl.where(kept, grad_p * dropout.factor, 0.0)
    grad_a = p * (grad_p - delta)
    if EDGE:
        grad_a = tl.where(seen, grad_a, 0.0)  # 0 * NaN of what is hidden
    grad_s = grad_a
    if cap is not None:
        grad_s = grad_a * slope
    return used, grad_a, grad_s


# --- dK and dV -----------------------------------------------------------------------------------


@triton.jit
def _keys_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    grad_out_ptr,
    lse_ptr,
    delta_ptr,
    grad_key_ptr,
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
    sequences,
    left,
    right,
    scale,
    softcap,
    rate,
    kept,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_qd,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_kd,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_vd,
    stride_dob,
    stride_doh,
    stride_dom,
    stride_dod,
    stride_mask_b,
    stride_mask_h,
    stride_mask_m,
    stride_mask_n,
    stride_scale_b,
    stride_scale_h,
    stride_count_b,
    stride_count_h,
    blocks,
    LOG_N: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dK and dV of BLOCK_N keys, over all rows and query heads that see them."""
    FLOAT = tl.float64 if query_ptr.dtype.element_ty == tl.float64 else tl.float32
    groups = heads // repeats
    own_part = tl.program_id(0) % PARTS  # of the columns of dK and dV
    program = tl.program_id(0) // PARTS
    block = program % blocks  # the first keys are seen by the most rows
    g = (program // blocks % groups).to(tl.int64)
    b = (program // blocks // groups).to(tl.int64)
    index, start = 0, block * BLOCK_N
    if cu_seqlens_k_ptr is not None:
        index, start = find_sequence(cu_seqlens_k_ptr, sequences, block, BLOCK_N)
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
    # Keys past a length, or of no sequence, get a gradient of 0 too.
    stored_end = tl.cast(keys, tl.int32)
    if cu_seqlens_k_ptr is not None:
        stored_end = tl.where(index < sequences, seq.key_end, stored_end)
    if start >= stored_end:
        return
    columns = start + tl.arange(0, BLOCK_N)
    key = Matrix(key_ptr + b * stride_kb + g * stride_kh, stride_kn, stride_kd)
    value = Matrix(value_ptr + b * stride_vb + g * stride_vh, stride_vn, stride_vd)
    k = _load_part(key, columns, seq.key_end, 0, D, BLOCK_D)  # [N, D]
    v = _load_part(value, columns, seq.key_end, 0, V, BLOCK_V)  # [N, V]
    cap = None
    if softcap is not None:
        cap = number(softcap, FLOAT)
    window = Window(left, right)

    end = tl.minimum(start + BLOCK_N, seq.key_end)
    tiles = row_tiles(start, end, seq, left, right, mask_ptr is not None, BLOCK_M)
    # A block that the sequence does not fill has hidden keys in every tile.
    whole = start + BLOCK_N <= seq.key_end
    full = tl.where(whole, tiles.full, tiles.begin)
    full_end = tl.where(whole, tiles.full_end, tiles.begin)
    last = tl.where(start < seq.key_end, tiles.end, tiles.begin)
    grad_k = tl.zeros([BLOCK_N, BLOCK_D], FLOAT)
    grad_v = tl.zeros([BLOCK_N, BLOCK_V], FLOAT)
    for repeat in range(0, repeats):
        h = g * repeats + repeat
        query = Matrix(query_ptr + b * stride_qb + h * stride_qh, stride_qm, stride_qd)
        grad_out = Matrix(grad_out_ptr + b * stride_dob + h * stride_doh, stride_dom, stride_dod)
        mask = Matrix(None, 0, 0)
        if mask_ptr is not None:
            own_mask = mask_ptr + b * stride_mask_b + h * stride_mask_h
            mask = Matrix(own_mask, stride_mask_m, stride_mask_n)
        own_scale = None
        if head_scale_ptr is not None:
            own_scale = head_scale_ptr + b * stride_scale_b + h * stride_scale_h
        own_counts = None
        if counts_ptr is not None:
            own_counts = counts_ptr + b * stride_count_b + h * stride_count_h
        dropout = Dropout(None, None, 0, 0)
        if rate is not None:
            dropout = Dropout(seed_ptr, rate, b * heads + h, number(kept, FLOAT))
        lines = (b * heads + h) * queries
        for part in tl.static_range(3):
            if part == 0:
                first, stop = full, full_end
            elif part == 1:
                first, stop = full_end, last
            else:
                first, stop = tiles.begin, tl.minimum(full, last)
            if (part == 0 and mask_ptr is None) or part == 1 or (part == 2 and right is not None):
                grad_k, grad_v = _add_row_tiles(
                    grad_k,
                    grad_v,
                    first,
                    stop,
                    k,
                    v,
                    key,
                    value,
                    columns,
                    own_part,
                    query,
                    grad_out,
                    lse_ptr + lines,
                    delta_ptr + lines,
                    scale,
                    own_scale,
                    own_counts,
                    seq,
                    window,
                    mask,
                    cap,
                    dropout,
                    LOG_N,
                    LOG_N or head_scale_ptr is not None,
                    part != 0,
                    PRECISION,
                    D,
                    V,
                    BLOCK_D,
                    BLOCK_V,
                    PARTS,
                    BLOCK_M,
                    FLOAT,
                )
    if not LOG_N and head_scale_ptr is None:  # one factor for the whole call
        grad_k = grad_k * number(scale, FLOAT)
    first = (b * groups + g) * keys
    _store_part(grad_key_ptr, first, columns, stored_end, own_part, grad_k, D, BLOCK_D)
    _store_part(grad_value_ptr, first, columns, stored_end, own_part, grad_v, V, BLOCK_V)


@triton.jit
def _add_row_tiles(
    grad_k,
    grad_v,
    begin,
    end,
    k,
    v,
    key,
    value,
    columns,
    own_part,
    query,
    grad_out,
    lse_ptr,
    delta_ptr,
    scale,
    head_scale_ptr,
    counts_ptr,
    seq,
    window,
    mask,
    cap,
    dropout,
    LOG_N: tl.constexpr,
    ROW_FACTOR: tl.constexpr,
    EDGE: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    FLOAT: tl.constexpr,
):
    """The rows from `begin` to `end` of one head into dK and dV. Tiles are [keys, rows]."""
    for start in range(begin, end, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        lse2 = load_lse2(lse_ptr, rows, seq.row_end)
        alive = rows
        if EDGE:
            alive = _alive(rows, lse2, seq.row_end)
        delta = tl.load(delta_ptr + rows, mask=alive < seq.row_end, other=0.0)
        factor = row_scale(
            scale, head_scale_ptr, rows, seq, window.left, window.right, counts_ptr, LOG_N, FLOAT
        )
        if LOG_N:
            factor = factor[None, :]
        if PARTS == 1:
            q = load_rows(query, alive, seq.row_end, D, BLOCK_D, EDGE)  # [M, D]
            scores = tl.dot(k, tl.trans(q), input_precision=PRECISION, out_dtype=FLOAT)  # [N, M]
            do = load_rows(grad_out, alive, seq.row_end, V, BLOCK_V, EDGE)  # [M, V]
            grad_p = tl.dot(v, tl.trans(do), input_precision=PRECISION, out_dtype=FLOAT)  # [N, M]
        else:
            key_end, row_end = seq.key_end, seq.row_end
            scores = _wide_product(
                key, columns, key_end, query, alive, row_end, D, BLOCK_D, PARTS, PRECISION, FLOAT
            )
            grad_p = _wide_product(
                value,
                columns,
                key_end,
                grad_out,
                alive,
                row_end,
                V,
                BLOCK_V,
                PARTS,
                PRECISION,
                FLOAT,
            )
            q = _load_part(query, alive, row_end, own_part, D, BLOCK_D)
            do = _load_part(grad_out, alive, row_end, own_part, V, BLOCK_V)
        p, _, grad_s = score_gradients(
            scores,
            grad_p,
            factor,
            lse2[None, :],
            delta[None, :],
            rows[None, :],
            columns[:, None],
            seq,
            window,
            mask,
            cap,
            dropout,
            EDGE,
            q.dtype == FLOAT,
            FLOAT,
        )
        grad_v = tl.dot(p.to(do.dtype), do, grad_v, input_precision=PRECISION, out_dtype=FLOAT)
        if ROW_FACTOR:
            grad_s = grad_s * (factor * LN2)
        grad_k = tl.dot(grad_s.to(q.dtype), q, grad_k, input_precision=PRECISION, out_dtype=FLOAT)
    return grad_k, grad_v


@triton.jit
def _store_part(ptr, first, rows, end, part, tile, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Columns of rows [.., end) of a contiguous matrix [tokens, WIDTH] that starts at `first`."""
    columns = part * BLOCK + tl.arange(0, BLOCK)
    ptrs = ptr + (first + rows)[:, None] * WIDTH + columns[None, :]
    inside = (rows < end)[:, None] & (columns < WIDTH)[None, :]
    tl.store(ptrs, tile.to(ptr.dtype.element_ty), mask=inside)


# --- dQ ------------------------------------------------------------------------------------------


@triton.jit
def _rows_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    grad_out_ptr,
    lse_ptr,
    delta_ptr,
    grad_query_ptr,
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
    sequences,
    left,
    right,
    scale,
    softcap,
    rate,
    kept,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_qd,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_kd,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_vd,
    stride_dob,
    stride_doh,
    stride_dom,
    stride_dod,
    stride_mask_b,
    stride_mask_h,
    stride_mask_m,
    stride_mask_n,
    stride_scale_b,
    stride_scale_h,
    stride_count_b,
    stride_count_h,
    blocks,
    LOG_N: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dQ of BLOCK_M rows, and q . (dS K) of each where the scale's gradient is wanted."""
    FLOAT = tl.float64 if query_ptr.dtype.element_ty == tl.float64 else tl.float32
    own_part = tl.program_id(0) % PARTS  # of the columns of dQ
    program = tl.program_id(0) // PARTS
    block = blocks - 1 - program % blocks  # the last rows see the most keys
    h = (program // blocks % heads).to(tl.int64)
    b = (program // blocks // heads).to(tl.int64)
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
    query = Matrix(query_ptr + b * stride_qb + h * stride_qh, stride_qm, stride_qd)
    key = Matrix(key_ptr + b * stride_kb + h // repeats * stride_kh, stride_kn, stride_kd)
    value = Matrix(value_ptr + b * stride_vb + h // repeats * stride_vh, stride_vn, stride_vd)
    grad_out = Matrix(grad_out_ptr + b * stride_dob + h * stride_doh, stride_dom, stride_dod)
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
        dropout = Dropout(seed_ptr, rate, b * heads + h, number(kept, FLOAT))
    window = Window(left, right)
    lines = (b * heads + h) * queries

    lse2 = load_lse2(lse_ptr + lines, rows, row_end)
    delta = tl.load(delta_ptr + lines + rows, mask=rows < row_end, other=0.0)
    factor = row_scale(scale, head_scale_ptr, rows, seq, left, right, counts_ptr, LOG_N, FLOAT)
    if LOG_N:
        factor = factor[:, None]
    alive = _alive(rows, lse2, seq.row_end)
    q = _load_part(query, alive, row_end, own_part, D, BLOCK_D)  # [M, D]
    do = _load_part(grad_out, alive, row_end, own_part, V, BLOCK_V)  # [M, V]
    tiles = key_tiles(row, row_end, seq, left, right, mask_ptr is not None, BLOCK_N)
    grad_q = tl.zeros([BLOCK_M, BLOCK_D], FLOAT)  # before the scale
    for part in tl.static_range(3):
        if part == 0:
            begin, end = tiles.full, tiles.full_end
        elif part == 1:
            begin, end = tiles.full_end, tiles.end
        else:
            begin, end = tiles.begin, tl.minimum(tiles.full, tiles.end)
        if (part == 0 and mask_ptr is None) or part == 1 or (part == 2 and left is not None):
            grad_q = _add_key_tiles(
                grad_q,
                begin,
                end,
                q,
                do,
                query,
                grad_out,
                alive,
                own_part,
                lse2[:, None],
                delta[:, None],
                factor,
                rows,
                key,
                value,
                seq,
                window,
                mask,
                cap,
                dropout,
                part != 0,
                PRECISION,
                D,
                V,
                BLOCK_D,
                BLOCK_V,
                PARTS,
                BLOCK_N,
                FLOAT,
            )
    grad_q = tl.where((lse2 == float("inf"))[:, None], 0.0, grad_q)
    if row_scales_ptr is not None:
        each = tl.sum(grad_q * q.to(FLOAT), 1)
        plane = tl.cast(batch, tl.int64) * heads * queries
        tl.store(row_scales_ptr + own_part * plane + lines + rows, each, mask=rows < row_end)
    grad_q = grad_q * (factor * LN2)
    _store_part(grad_query_ptr, lines, rows, row_end, own_part, grad_q, D, BLOCK_D)


@triton.jit
def _add_key_tiles(
    grad_q,
    begin,
    end,
    q,
    do,
    query,
    grad_out,
    alive,
    own_part,
    lse2,
    delta,
    factor,
    rows,
    key,
    value,
    seq,
    window,
    mask,
    cap,
    dropout,
    EDGE: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FLOAT: tl.constexpr,
):
    """The keys from `begin` to `end` into dQ. Tiles are [rows, keys]."""
    for start in range(begin, end, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        if PARTS == 1:
            v = load_rows(value, columns, seq.key_end, V, BLOCK_V, EDGE)  # [N, V]
            grad_p = tl.dot(do, tl.trans(v), input_precision=PRECISION, out_dtype=FLOAT)  # [M, N]
            k = load_rows(key, columns, seq.key_end, D, BLOCK_D, EDGE)  # [N, D]
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=FLOAT)  # [M, N]
        else:
            key_end, row_end = seq.key_end, seq.row_end
            grad_p = _wide_product(
                grad_out,
                alive,
                row_end,
                value,
                columns,
                key_end,
                V,
                BLOCK_V,
                PARTS,
                PRECISION,
                FLOAT,
            )
            scores = _wide_product(
                query, alive, row_end, key, columns, key_end, D, BLOCK_D, PARTS, PRECISION, FLOAT
            )
            k = _load_part(key, columns, key_end, own_part, D, BLOCK_D)
        _, _, grad_s = score_gradients(
            scores,
            grad_p,
            factor,
            lse2,
            delta,
            rows[:, None],
            columns[None, :],
            seq,
            window,
            mask,
            cap,
            dropout,
            EDGE,
            q.dtype == FLOAT,
            FLOAT,
        )
        grad_q = tl.dot(grad_s.to(k.dtype), k, grad_q, input_precision=PRECISION, out_dtype=FLOAT)
    return grad_q


# --- dbias ---------------------------------------------------------------------------------------


def _mask_gradient(inputs: Inputs, common: dict[str, Any], config: Config) -> Tensor:
    """One program a tile of the mask as the caller made it, over all that was broadcast from it."""
    mask = inputs.mask
    assert mask is not None
    grad = torch.empty(mask.shape, dtype=mask.dtype, device=mask.device)
    own_batch, own_heads, own_rows, own_keys = mask.shape
    block_m, block_n = config.rows_m, config.rows_n
    row_blocks = triton.cdiv(own_rows, block_m) if own_rows > 1 else 1
    key_blocks = triton.cdiv(own_keys, block_n) if own_keys > 1 else 1
    arguments: dict[str, Any] = {
        **common,
        "grad_mask_ptr": grad,
        "own_batch": own_batch,
        "own_heads": own_heads,
        "row_blocks": row_blocks,
        "key_blocks": key_blocks,
        "ONE_ROW": own_rows == 1,
        "ONE_KEY": own_keys == 1,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
    }
    _mask_kernel[(own_batch * own_heads * row_blocks * key_blocks,)](**arguments)
    return grad


@triton.jit
def _mask_kernel(
    query_ptr,
    key_ptr,
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
    sequences,
    left,
    right,
    scale,
    softcap,
    rate,
    kept,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_qd,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_kd,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_vd,
    stride_dob,
    stride_doh,
    stride_dom,
    stride_dod,
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
    ONE_ROW: tl.constexpr,
    ONE_KEY: tl.constexpr,
    LOG_N: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The gradient of one tile of the mask: dA of the pairs that read it, summed."""
    FLOAT = tl.float64 if query_ptr.dtype.element_ty == tl.float64 else tl.float32
    program = tl.program_id(0)
    key_block = program % key_blocks
    row_block = program // key_blocks % row_blocks
    own_h = program // key_blocks // row_blocks % own_heads
    own_b = program // key_blocks // row_blocks // own_heads
    # The batch entries, heads, rows and keys that read this tile.
    b_first, b_stop = own_b, own_b + 1
    if own_batch == 1:
        b_stop = tl.cast(batch, tl.int32)
    h_first, h_stop = own_h, own_h + 1
    if own_heads == 1:
        h_stop = tl.cast(heads, tl.int32)
    row_first = row_block * BLOCK_M
    row_stop = row_first + BLOCK_M
    if ONE_ROW:
        row_stop = tl.cast(queries, tl.int32)
    key_first = key_block * BLOCK_N
    key_stop = key_first + BLOCK_N
    if ONE_KEY:
        key_stop = tl.cast(keys, tl.int32)
    cap = None
    if softcap is not None:
        cap = number(softcap, FLOAT)
    window = Window(left, right)
    total = tl.zeros([BLOCK_M, BLOCK_N], FLOAT)
    for b32 in range(b_first, b_stop):
        for index in range(0, tl.maximum(sequences, 1)):
            b = tl.cast(b32, tl.int64)
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
            for h32 in range(h_first, h_stop):
                h = tl.cast(h32, tl.int64)
                total = _add_pairs(
                    total,
                    tl.maximum(row_first, seq.row // BLOCK_M * BLOCK_M),
                    tl.minimum(row_stop, seq.row_end),
                    key_first,
                    key_stop,
                    Matrix(query_ptr + b * stride_qb + h * stride_qh, stride_qm, stride_qd),
                    Matrix(
                        key_ptr + b * stride_kb + h // repeats * stride_kh, stride_kn, stride_kd
                    ),
                    Matrix(
                        value_ptr + b * stride_vb + h // repeats * stride_vh, stride_vn, stride_vd
                    ),
                    Matrix(grad_out_ptr + b * stride_dob + h * stride_doh, stride_dom, stride_dod),
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
                    window,
                    cap,
                    Dropout(None, None, 0, 0)
                    if rate is None
                    else Dropout(seed_ptr, rate, b * heads + h, number(kept, FLOAT)),
                    LOG_N,
                    PRECISION,
                    D,
                    V,
                    BLOCK_D,
                    BLOCK_V,
                    PARTS,
                    BLOCK_M,
                    BLOCK_N,
                    FLOAT,
                )
    rows = row_first + tl.arange(0, BLOCK_M)
    columns = key_first + tl.arange(0, BLOCK_N)
    own_queries = tl.cast(queries, tl.int64)
    own_keys = tl.cast(keys, tl.int64)
    if ONE_ROW:
        total = tl.sum(total, 0, keep_dims=True)
        rows = tl.arange(0, 1)
        own_queries = tl.full([], 1, tl.int64)
    if ONE_KEY:
        total = tl.sum(total, 1, keep_dims=True)
        columns = tl.arange(0, 1)
        own_keys = tl.full([], 1, tl.int64)
    first = (tl.cast(own_b, tl.int64) * own_heads + own_h) * own_queries
    ptrs = grad_mask_ptr + (first + rows)[:, None] * own_keys + columns[None, :]
    inside = (rows < own_queries)[:, None] & (columns < own_keys)[None, :]
    tl.store(ptrs, total.to(grad_mask_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add_pairs(
    total,
    row_first,
    row_stop,
    key_first,
    key_stop,
    query,
    key,
    value,
    grad_out,
    mask,
    lse_ptr,
    delta_ptr,
    scale,
    head_scale_ptr,
    counts_ptr,
    seq,
    window,
    cap,
    dropout,
    LOG_N: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FLOAT: tl.constexpr,
):
    """dA of one head's rows and keys in the given ranges onto `total`, tile on tile."""
    for row in range(row_first, row_stop, BLOCK_M):
        rows = row + tl.arange(0, BLOCK_M)
        mine = (rows >= seq.row) & (rows < seq.row_end)
        lse2 = load_lse2(lse_ptr, tl.where(mine, rows, seq.row_end), seq.row_end)
        alive = _alive(rows, lse2, seq.row_end)
        delta = tl.load(delta_ptr + rows, mask=alive < seq.row_end, other=0.0)
        factor = row_scale(
            scale, head_scale_ptr, rows, seq, window.left, window.right, counts_ptr, LOG_N, FLOAT
        )
        if LOG_N:
            factor = factor[:, None]
        # Tiles of keys that none of these rows reaches add nothing.
        reach = key_tiles(
            tl.maximum(row, seq.row),
            tl.minimum(row + BLOCK_M, seq.row_end),
            seq,
            window.left,
            window.right,
            True,
            BLOCK_N,
        )
        begin = tl.maximum(key_first, reach.begin // BLOCK_N * BLOCK_N)
        for start in range(begin, tl.minimum(key_stop, reach.end), BLOCK_N):
            columns = start + tl.arange(0, BLOCK_N)
            inside = tl.where(columns >= seq.key, columns, seq.key_end)
            key_end, row_end = seq.key_end, seq.row_end
            scores = _wide_product(
                query, alive, row_end, key, inside, key_end, D, BLOCK_D, PARTS, PRECISION, FLOAT
            )
            grad_p = _wide_product(
                grad_out,
                alive,
                row_end,
                value,
                inside,
                key_end,
                V,
                BLOCK_V,
                PARTS,
                PRECISION,
                FLOAT,
            )
            _, grad_a, _ = score_gradients(
                scores,
                grad_p,
                factor,
                lse2[:, None],
                delta[:, None],
                rows[:, None],
                inside[None, :],
                seq,
                window,
                mask,
                cap,
                dropout,
                True,
                query.ptr.dtype.element_ty == FLOAT,
                FLOAT,
            )
            total += tl.where(mine[:, None], grad_a, 0.0)
    return total
