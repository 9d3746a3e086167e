"""Attention forward in Triton, for every call with dot scores: q . k.

One program owns BLOCK_M rows of a head and walks over the tiles of keys that they may see,
FlashAttention's way (Dao 2023), with the statistics of tile.py from the same scores:

    S = Q K_j^T        x = scale S (cap, bias)        m' = max(m, rowmax x)
    P = 2^(x - m')     l, w, p2, s1, s2 as in tile.py        acc = alpha acc + P V_j

Tiles inside the reach of all rows hide nothing: their loop has no comparison of positions and, for
16-bit types, one FMA an argument (`add_scores`). The tiles at the edges, and all tiles of a call
with a mask tensor, go through the general step (`add_arguments`). The few rows whose logits are too
large for the short step are done again with the general one.
"""

from typing import Any, NamedTuple

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
    RESIDUAL_LIMIT,
    Dropout,
    Matrix,
    Window,
    add_arguments,
    add_scores,
    capped,
    close_sums,
    find_sequence,
    keeps,
    key_tiles,
    load_mask,
    load_rows,
    load_sink,
    lowest,
    number,
    packed_blocks,
    reachable_pairs,
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

L2_SHARE = 16 * 2**20  # bytes of keys and values that programs running together should share


class Config(NamedTuple):
    """The cut of the work: what may be tuned, and changes no result but its rounding."""

    block_m: int
    block_n: int
    warps: int
    stages: int


# By bytes of an element and the larger of the padded widths.
CONFIGS = {
    (2, 64): Config(128, 128, 8, 3),
    (2, 128): Config(128, 128, 8, 2),
    (2, 256): Config(128, 64, 8, 2),
    (2, 512): Config(32, 32, 8, 1),
    (4, 64): Config(64, 32, 8, 2),
    (4, 128): Config(32, 32, 8, 1),
    (4, 256): Config(16, 16, 8, 1),
    (4, 512): Config(16, 32, 4, 1),
    (8, 64): Config(32, 32, 4, 1),
    (8, 128): Config(16, 32, 4, 1),
}
# Where every tile goes through the general step with a mask tensor or a cap: fewer registers.
GENERAL_CONFIGS = {(2, 128): Config(128, 64, 8, 2)}
SMALLEST = Config(16, 16, 8, 1)


def config_for(query: Tensor, widest: int, general: bool = False) -> Config:
    """The table's entry for these widths; wider than the table, the smallest tiles."""
    size = query.element_size()
    widths = [width for bytes_, width in CONFIGS if bytes_ == size and width >= widest]
    if not widths:
        return SMALLEST
    place = (size, min(widths))
    return GENERAL_CONFIGS.get(place, CONFIGS[place]) if general else CONFIGS[place]


def forward(
    inputs: Inputs,
    settings: Settings,
    out: Tensor | None,
    wants_vitals: bool,
    moments: bool = True,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """Fills `out` (None: scores only); returns lse [B, H, Q] and statistics [9 | 7, B, H, Q].

    The statistics are empty where no vitals are wanted, and lack mean and m2 without `moments`.
    """
    query, value = inputs.query, inputs.value
    batch, heads, queries, width = query.shape
    dtype = compute_type(query)
    lse = query.new_empty((batch, heads, queries), dtype=dtype)
    planes = (PLANES if moments else PLANES - 2,) if wants_vitals else (0,)
    statistics = query.new_empty((*planes, batch, heads, queries), dtype=dtype)
    if not wants_vitals:
        statistics = query.new_empty(0, dtype=dtype)
    if not lse.numel():
        return lse, statistics
    if out is not None and not out.numel():
        out = None
    value_width = 0 if out is None or value is None else value.shape[-1]
    block_d, block_v = padded(width), padded(value_width)
    if config is None:
        general = inputs.mask is not None or bool(settings.softcap)
        config = config_for(query, max(block_d, block_v), general)
    shared = shared_arguments(inputs if out is not None else inputs._replace(value=None), settings)
    blocks = triton.cdiv(queries, config.block_m)
    if inputs.cu_seqlens_q is not None:
        blocks = packed_blocks(queries, shared["sequences"], config.block_m)
    arguments: dict[str, Any] = {
        **shared,
        **counts_for(inputs, settings, shared),
        "out_ptr": out,
        "lse_ptr": lse,
        "statistics_ptr": statistics if wants_vitals else None,
        **strides("o", out, "bhmd"),
        "blocks": blocks,
        "heads_together": _heads_together(inputs, settings),
        "LOG_N": settings.log_n,
        "BOTTOM_RIGHT": settings.bottom_right,
        "NEGATIVE": settings.scale < 0.0,
        "SHORT_STEP": query.element_size() == 2 and inputs.mask is None and not settings.softcap,
        "MOMENTS": moments,
        "PRECISION": dot_precision(query),
        "D": width,
        "V": value_width,
        "BLOCK_D": block_d,
        "BLOCK_V": block_v,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "num_warps": config.warps,
        "num_stages": config.stages,
    }
    _forward_kernel[(batch * heads * blocks,)](**arguments)
    return lse, statistics


def _heads_together(inputs: Inputs, settings: Settings) -> int:
    """Heads whose blocks are interleaved, heavy ones first; 1 where all blocks weigh the same."""
    if settings.right is None and inputs.cu_seqlens_q is None:
        return 1
    key, value = inputs.key, inputs.value
    width = key.shape[-1] + (0 if value is None else value.shape[-1])
    own = key.shape[2] * width * key.element_size()
    repeats = inputs.query.shape[1] // max(key.shape[1], 1)
    together = max(L2_SHARE // max(own, 1), 1) * repeats
    return min(together, inputs.query.shape[0] * inputs.query.shape[1])


@triton.jit
def _forward_kernel(
    query_ptr,
    key_ptr,
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
    heads_together,
    LOG_N: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
    NEGATIVE: tl.constexpr,
    SHORT_STEP: tl.constexpr,
    MOMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    FLOAT = tl.float64 if query_ptr.dtype.element_ty == tl.float64 else tl.float32
    block, b, h = _place(tl.program_id(0), blocks, batch * heads, heads, heads_together)
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

    query = Matrix(query_ptr + b * stride_qb + h * stride_qh, stride_qm, stride_qd)
    key = Matrix(key_ptr + b * stride_kb + h // repeats * stride_kh, stride_kn, stride_kd)
    value = Matrix(None, 0, 0)
    if value_ptr is not None:
        value = Matrix(value_ptr + b * stride_vb + h // repeats * stride_vh, stride_vn, stride_vd)
    mask = Matrix(None, 0, 0)
    if mask_ptr is not None:
        mask_ptr += b * stride_mask_b + h * stride_mask_h
        mask = Matrix(mask_ptr, stride_mask_m, stride_mask_n)
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
    dropout = Dropout(None, None, 0, 0)
    if rate is not None:
        dropout = Dropout(seed_ptr, rate, b * heads + h, number(kept, FLOAT))
    window = Window(left, right)

    factor = row_scale(scale, head_scale_ptr, rows, seq, left, right, counts_ptr, LOG_N, FLOAT)
    if LOG_N:
        factor = factor[:, None]  # [M, 1]
    q = load_rows(query, rows, row_end, D, BLOCK_D, True)  # [M, D]
    if SHORT_STEP and (NEGATIVE or head_scale_ptr is not None):
        # The short step wants a scale that is not negative: the query takes the sign.
        q = (q.to(FLOAT) * tl.where(factor < 0.0, -1.0, 1.0)).to(q.dtype)
        factor = tl.abs(factor)

    tiles = key_tiles(row, row_end, seq, left, right, mask_ptr is not None, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_V], FLOAT)
    sums = start_sums(sink2, BLOCK_M, FLOAT)
    # Tiles that hide nothing, tiles at the right edge, and with a window tiles at the left edge.
    for part in tl.static_range(3):
        if part == 0:
            begin, end = tiles.full, tiles.full_end
        elif part == 1:
            begin, end = tiles.full_end, tiles.end
        else:
            begin, end = tiles.begin, tl.minimum(tiles.full, tiles.end)
        if (part == 0 and mask_ptr is None) or part == 1 or (part == 2 and left is not None):
            acc, sums = _add_tiles(
                acc,
                sums,
                begin,
                end,
                q,
                factor,
                rows,
                seq,
                window,
                key,
                value,
                mask,
                cap,
                dropout,
                part != 0,
                SHORT_STEP and part == 0,
                statistics_ptr is not None,
                MOMENTS,
                sinks_ptr is not None,
                PRECISION,
                D,
                V,
                BLOCK_D,
                BLOCK_V,
                BLOCK_N,
                FLOAT,
            )
    if SHORT_STEP:
        large = (tl.abs(sums.row_max) > RESIDUAL_LIMIT) & (sums.row_max > lowest(FLOAT))
        if tl.max(large.to(tl.int32), 0) > 0:
            acc, sums = _add_tiles(
                tl.zeros([BLOCK_M, BLOCK_V], FLOAT),
                start_sums(sink2, BLOCK_M, FLOAT),
                tiles.begin,
                tiles.end,
                q,
                factor,
                rows,
                seq,
                window,
                key,
                value,
                mask,
                cap,
                dropout,
                True,
                False,
                statistics_ptr is not None,
                MOMENTS,
                sinks_ptr is not None,
                PRECISION,
                D,
                V,
                BLOCK_D,
                BLOCK_V,
                BLOCK_N,
                FLOAT,
            )

    closed = close_sums(sums, sink2)
    offsets = (b * heads + h) * queries + rows
    tl.store(lse_ptr + offsets, closed.lse2 * LN2, mask=inside)
    if value_ptr is not None:
        out = acc / closed.divisor[:, None]
        if rate is not None:
            out = out * dropout.factor
        out = tl.where(closed.empty[:, None], 0.0, out)
        out_ptr += b * stride_ob + h * stride_oh
        offs_v = tl.arange(0, BLOCK_V).to(tl.int64)
        out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * stride_om + offs_v[None, :] * stride_od
        stored = inside[:, None] & (offs_v[None, :] < V)
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=stored)
    if statistics_ptr is not None:
        first_key = load_rows(key, seq.key + tl.arange(0, 1), seq.key_end, D, BLOCK_D, True)
        scores = tl.sum(q.to(FLOAT) * first_key.to(FLOAT), 1, keep_dims=True)  # [M, 1]
        columns = seq.key + tl.arange(0, 1)
        first, _, _ = _arguments(
            scores, factor, rows, columns, seq, window, mask, cap, True, q.dtype == FLOAT, FLOAT
        )
        store_statistics(
            statistics_ptr,
            tl.cast(batch, tl.int64) * heads * queries,
            offsets,
            inside,
            sums,
            closed,
            tl.reshape(first, [BLOCK_M]),
            sinks_ptr is not None,
            softcap is not None,
            MOMENTS,
            FLOAT,
        )


@triton.jit
def _place(program, blocks, all_heads, heads, heads_together):
    """block, b, h: heads go together in groups, and in a group the last rows go first."""
    group = program // (heads_together * blocks)
    size = tl.minimum(heads_together, all_heads - group * heads_together)
    rest = program - group * heads_together * blocks
    head = group * heads_together + rest % size
    return blocks - 1 - rest // size, (head // heads).to(tl.int64), (head % heads).to(tl.int64)


@triton.jit
def _add_tiles(
    acc,
    sums,
    begin,
    end,
    q,
    factor,
    rows,
    seq,
    window,
    key,
    value,
    mask,
    cap,
    dropout,
    EDGE: tl.constexpr,
    SHORT_STEP: tl.constexpr,
    STATISTICS: tl.constexpr,
    MOMENTS: tl.constexpr,
    SINK: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FLOAT: tl.constexpr,
):
    """The tiles of keys from `begin` to `end` into acc and sums; EDGE: some pairs are hidden."""
    for start in range(begin, end, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        k = load_rows(key, columns, seq.key_end, D, BLOCK_D, EDGE)  # [N, D]
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=FLOAT)  # [M, N]
        if SHORT_STEP:
            sums, p, alpha = add_scores(sums, scores, factor, STATISTICS, MOMENTS, FLOAT, SINK)
        else:
            x, z, read = _arguments(
                scores, factor, rows, columns, seq, window, mask, cap, EDGE, q.dtype == FLOAT, FLOAT
            )
            counts = None
            if EDGE and mask.ptr is None:
                counts = visible_counts(rows, start, seq, window.left, window.right, BLOCK_N)
            sums, p, alpha = add_arguments(
                sums,
                x,
                z if cap is not None else None,
                read if EDGE else None,
                STATISTICS,
                MOMENTS,
                FLOAT,
                counts,
                SINK,
            )
        if value.ptr is not None:
            if dropout.rate is not None:
                kept = keeps(dropout.seed_ptr, dropout.rate, dropout.head, rows, columns)
                p = tl.where(kept, p, 0.0)
            v = load_rows(value, columns, seq.key_end, V, BLOCK_V, EDGE)  # [N, V]
            acc = acc * alpha[:, None]
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION, out_dtype=FLOAT)
    return acc, sums


@triton.jit
def _arguments(
    scores,
    factor,
    rows,
    columns,
    seq,
    window,
    mask,
    cap,
    EDGE: tl.constexpr,
    PRECISE: tl.constexpr,
    FLOAT: tl.constexpr,
):
    """x, z and read of raw scores [M, N], as `add_arguments` takes them."""
    z = scores * factor
    x = z
    if cap is not None:
        x, _ = capped(z, cap, PRECISE)
    read = rows[:, None] >= 0
    if EDGE and mask.ptr is None:
        seen = reachable_pairs(rows[:, None], columns[None, :], seq, window.left, window.right)
        read = seen
        x = tl.where(seen, x, float("-inf"))
    elif EDGE:
        seen = visible(rows, columns, seq, window.left, window.right)
        loaded = load_mask(mask.ptr, mask.stride_row, mask.stride_column, rows, columns, seen)
        bias, seen, read = split_mask(loaded, seen, FLOAT)
        x = tl.where(seen, x + bias, float("-inf"))
        z = z + bias
    return x, z, read
