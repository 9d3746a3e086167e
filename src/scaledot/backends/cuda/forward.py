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
    NO_HEADS,
    aligned,
    compute_type,
    constants,
    describe_call,
    dot_precision,
    heads_of,
    padded,
)
from scaledot.backends.cuda.counts import with_counts
from scaledot.backends.cuda.logits import (
    LN2,
    arguments_of,
    entry,
    keeps,
    load_rows,
    lowest,
    matrix_of,
    row_scale,
)
from scaledot.backends.cuda.statistics import PLANES
from scaledot.backends.cuda.tile import (
    RESIDUAL_LIMIT,
    add_arguments,
    add_scores,
    close_sums,
    load_sink,
    start_sums,
    store_output,
    store_statistics,
)
from scaledot.backends.cuda.visible import (
    Place,
    blocks_of,
    find_rows,
    key_tiles,
    span_of,
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


class Cut(NamedTuple):
    """What is compiled into a kernel besides the call."""

    D: Any
    V: Any
    BLOCK_D: Any
    BLOCK_V: Any
    BLOCK_M: Any
    BLOCK_N: Any
    PRECISION: Any  # of matrix products
    NEGATIVE: Any  # the scale
    SHORT_STEP: Any  # tiles that hide nothing take `add_scores`
    MOMENTS: Any


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
    inputs = aligned(inputs)
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
    call = with_counts(describe_call(inputs, settings))
    if out is None:
        call = call._replace(value=NO_HEADS)
    blocks = blocks_of(call, queries, config.block_m)
    cut = Cut(
        **constants(
            D=width,
            V=value_width,
            BLOCK_D=block_d,
            BLOCK_V=block_v,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            PRECISION=dot_precision(query),
            NEGATIVE=settings.scale < 0.0,
            SHORT_STEP=query.element_size() == 2 and inputs.mask is None and not settings.softcap,
            MOMENTS=moments,
        )
    )
    arguments: dict[str, Any] = {
        "call": call,
        "out": heads_of(out),
        "lse_ptr": lse,
        "statistics_ptr": statistics if wants_vitals else None,
        "blocks": blocks,
        "heads_together": _heads_together(inputs, settings),
        "cut": cut,
        "num_warps": config.warps,
        "num_stages": config.stages,
        # A fused s * scale - max is off by the rounding of the max: 2^12 where logits are 2^36.
        # The short step knows that, and gives such rows to the general one.
        "enable_fp_fusion": query.element_size() == 2,
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
def _forward_kernel(call, out, lse_ptr, statistics_ptr, blocks, heads_together, cut):
    """One program: BLOCK_M rows of a head over all the keys that they may see."""
    FLOAT: tl.constexpr = call.FLOAT
    SINK: tl.constexpr = tl.constexpr(call.sinks.ptr is not None)
    block, b, h = _order(call, tl.program_id(0), blocks, heads_together)
    row, seq = find_rows(call, b, block, cut.BLOCK_M)
    if row >= seq.row_end:
        return
    row_end = tl.minimum(row + cut.BLOCK_M, seq.row_end)
    rows = row + tl.arange(0, cut.BLOCK_M)
    inside = rows < row_end
    place = Place(b, h, seq)

    key = matrix_of(call.key, b, h // call.repeats)
    value = call.value if call.value.ptr is None else matrix_of(call.value, b, h // call.repeats)
    sink2 = None
    if SINK:
        sink2 = load_sink(entry(call.sinks, b, h), FLOAT)
    factor = row_scale(call, place, rows)
    if call.LOG_N:
        factor = factor[:, None]  # [M, 1]
    q = load_rows(matrix_of(call.query, b, h), rows, row_end, cut.D, cut.BLOCK_D, True)  # [M, D]
    if cut.SHORT_STEP and (cut.NEGATIVE or call.head_scale.ptr is not None):
        # The short step wants a scale that is not negative: the query takes the sign.
        q = (q.to(FLOAT) * tl.where(factor < 0.0, -1.0, 1.0)).to(q.dtype)
        factor = tl.abs(factor)

    MASKED: tl.constexpr = tl.constexpr(call.mask.ptr is not None)
    STATISTICS: tl.constexpr = tl.constexpr(statistics_ptr is not None)
    tiles = key_tiles(row, row_end, seq, call.window, MASKED, cut.BLOCK_N)
    acc = tl.zeros([cut.BLOCK_M, cut.BLOCK_V], FLOAT)
    sums = start_sums(sink2, cut.BLOCK_M, FLOAT)
    # Tiles that hide nothing, tiles at the right edge, and with a window tiles at the left edge.
    for part in tl.static_range(3):
        if (part == 0 and not MASKED) or part == 1 or (part == 2 and call.window.left is not None):
            begin, end = span_of(tiles, part)
            acc, sums = _add_tiles(
                acc,
                sums,
                begin,
                end,
                q,
                factor,
                rows,
                key,
                value,
                call,
                place,
                part != 0,
                cut.SHORT_STEP and part == 0,
                STATISTICS,
                cut,
            )
    if cut.SHORT_STEP:
        large = (tl.abs(sums.row_max) > RESIDUAL_LIMIT) & (sums.row_max > lowest(FLOAT))
        if tl.max(large.to(tl.int32), 0) > 0:
            acc, sums = _add_tiles(
                tl.zeros([cut.BLOCK_M, cut.BLOCK_V], FLOAT),
                start_sums(sink2, cut.BLOCK_M, FLOAT),
                tiles.begin,
                tiles.end,
                q,
                factor,
                rows,
                key,
                value,
                call,
                place,
                True,
                False,
                STATISTICS,
                cut,
            )

    closed = close_sums(sums, sink2)
    offsets = (b * call.heads + h) * call.queries + rows
    tl.store(lse_ptr + offsets, closed.lse2 * LN2, mask=inside)
    if call.value.ptr is not None:
        store_output(call, out, b, h, rows, inside, acc, closed, cut.V)
    if STATISTICS:
        columns = seq.key + tl.arange(0, 1)
        first_key = load_rows(key, columns, seq.key_end, cut.D, cut.BLOCK_D, True)
        scores = tl.sum(q.to(FLOAT) * first_key.to(FLOAT), 1, keep_dims=True)  # [M, 1]
        first, _, _ = arguments_of(
            scores, factor, rows, columns, call, place, True, q.dtype == FLOAT
        )
        store_statistics(
            statistics_ptr,
            tl.cast(call.batch, tl.int64) * call.heads * call.queries,
            offsets,
            inside,
            sums,
            closed,
            tl.reshape(first, [cut.BLOCK_M]),
            SINK,
            call.softcap is not None,
            cut.MOMENTS,
            FLOAT,
        )


@triton.jit
def _order(call, program, blocks, heads_together):
    """block, b, h: heads go together in groups, and in a group the last rows go first."""
    group = program // (heads_together * blocks)
    size = tl.minimum(heads_together, call.batch * call.heads - group * heads_together)
    rest = program - group * heads_together * blocks
    head = group * heads_together + rest % size
    b, h = (head // call.heads).to(tl.int64), (head % call.heads).to(tl.int64)
    return blocks - 1 - rest // size, b, h


@triton.jit
def _add_tiles(
    acc,
    sums,
    begin,
    end,
    q,
    factor,
    rows,
    key,
    value,
    call,
    place,
    EDGE: tl.constexpr,
    SHORT_STEP: tl.constexpr,
    STATISTICS: tl.constexpr,
    cut,
):
    """The tiles of keys from `begin` to `end` into acc and sums; EDGE: some pairs are hidden."""
    FLOAT: tl.constexpr = call.FLOAT
    SINK: tl.constexpr = tl.constexpr(call.sinks.ptr is not None)
    seq = place.seq
    for start in range(begin, end, cut.BLOCK_N):
        columns = start + tl.arange(0, cut.BLOCK_N)
        k = load_rows(key, columns, seq.key_end, cut.D, cut.BLOCK_D, EDGE)  # [N, D]
        scores = tl.dot(q, tl.trans(k), input_precision=cut.PRECISION, out_dtype=FLOAT)  # [M, N]
        if SHORT_STEP:
            sums, p, alpha = add_scores(sums, scores, factor, STATISTICS, cut.MOMENTS, FLOAT, SINK)
        else:
            x, z, read = arguments_of(
                scores, factor, rows, columns, call, place, EDGE, q.dtype == FLOAT
            )
            counts = None
            if EDGE and call.mask.ptr is None:
                counts = visible_counts(rows, start, seq, call.window, cut.BLOCK_N)
            sums, p, alpha = add_arguments(
                sums,
                x,
                z if call.softcap is not None else None,
                read if EDGE else None,
                STATISTICS,
                cut.MOMENTS,
                FLOAT,
                counts,
                SINK,
            )
        if value.ptr is not None:
            if call.dropout.rate is not None:
                head = place.b * call.heads + place.h
                kept = keeps(call.dropout, head, rows[:, None], columns[None, :])
                p = tl.where(kept, p, 0.0)
            v = load_rows(value, columns, seq.key_end, cut.V, cut.BLOCK_V, EDGE)  # [N, V]
            acc = acc * alpha[:, None]
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=cut.PRECISION, out_dtype=FLOAT)
    return acc, sums
