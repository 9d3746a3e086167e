"""Attention forward in Triton, for every call with dot scores: q . k.

One program owns BLOCK_M rows of a head and walks over the tiles of keys that they may see,
FlashAttention's way (Dao 2023), with the statistics of tile.py from the same scores:

    S = Q K_j^T        x = scale S (cap, bias)        m' = max(m, rowmax x)
    P = 2^(x - m')     l, w, p2, s1, s2 as in tile.py        acc = alpha acc + P V_j

The tiles at the edges go first, and all tiles of a call with a mask tensor, through the general
step (`add_arguments`). Tiles inside the reach of all rows hide nothing: their loop has no
comparison of positions and, for 16-bit types, one FMA an argument (`add_scores`). For bfloat16 it
also has no maximum: the pivots stay where the edges have left them, so every row must have seen a
key there, if only of a tile that hides nothing (`add_steady`). Without a left edge the first of
these tiles shows each row a key, and is all that the pivots are taken from (`set_pivots`). Blocks
of rows with logits that are too large for these short steps, or too far above the pivot, are done
again with the general one.

Before its first tile a program takes what the vitals need besides: the logit of the first key and,
of 16-bit types, the squares of its rows and of its share of the head's keys. `summary` would have
to read them all again; here they are in the cache, and the registers are still free.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
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
    filled_width,
    has_little_memory,
    heads_of,
    padded,
)
from scaledot.backends.cuda.counts import with_counts
from scaledot.backends.cuda.launching import let_next_begin
from scaledot.backends.cuda.logits import (
    LN2,
    Matrix,
    arguments_of,
    entry,
    holds_broken,
    keeps,
    load_rows,
    lowest,
    masked_pairs,
    matrix_of,
    row_scale,
    see_keys,
)
from scaledot.backends.cuda.statistics import PLANES
from scaledot.backends.cuda.tile import (
    RESIDUAL_LIMIT,
    add_arguments,
    add_scores,
    add_steady,
    close_sums,
    join_steady,
    load_sink,
    set_pivots,
    show_seen,
    start_steady,
    start_sums,
    store_output,
    store_statistics,
)
from scaledot.backends.cuda.visible import (
    Place,
    blocks_of,
    find_rows,
    key_tiles,
    reachable,
    row_bounds,
    span_of,
    visible_counts,
)
from scaledot.backends.inputs import Inputs
from scaledot.problem import Settings

L2_SHARE = 32 * 2**20  # bytes of keys and values that programs running together should share
PIVOTS_WIDEST = 128  # wider, a tile for them has no room in shared memory beside those to come
MOST_KEY_SQUARES = 1024  # numbers of a head: one warp of `summary` sums them


class Config(NamedTuple):
    """The cut of the work: what may be tuned, and changes no result but its rounding."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    registers: int | None = None  # of a thread at most, so that more programs run side by side


class ForVitals(NamedTuple):
    """What a pass leaves for `summary`, which tells how it takes them."""

    statistics: Tensor  # [PLANES, B, H, Q]
    squares: Tensor | None
    key_squares: Tensor | None
    read: Inputs  # by the kernel; a launch beside it must not get their memory


class Cut(NamedTuple):
    """What is compiled into a kernel besides the call."""

    D: Any  # what is read of a row of query and key
    V: Any  # of value
    OUT: Any  # what is written of a row
    BLOCK_D: Any
    BLOCK_V: Any
    BLOCK_M: Any
    BLOCK_N: Any
    PRECISION: Any  # of matrix products
    NEGATIVE: Any  # the scale
    SHORT_STEP: Any  # tiles that hide nothing take `add_scores`
    STEADY: Any  # or, after the others, `add_steady`
    PIVOTS: Any  # which the first tile sets (`set_pivots`)
    MOMENTS: Any
    LET_NEXT: Any  # begin before this launch ends (launching.enter)


class Work(NamedTuple):
    """What all tiles of a program share."""

    q: Any  # [M, D]
    factor: Any  # the scale in base 2: a number or [M, 1]
    rows: Any  # [M]
    key: Any  # of the head
    value: Any
    place: Any


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
# Where every tile goes through the general step with a mask tensor or a cap: fewer registers, and
# room in shared memory for tiles of the mask, which may have 4 bytes an entry.
GENERAL_CONFIGS = {(2, 64): Config(128, 64, 8, 3), (2, 128): Config(128, 64, 8, 2)}
# Where most go through `add_steady`; of 64 columns, two programs run side by side. Of 128 columns
# only one does, but the assembler finds the fastest loop if it is given 208 registers, not all.
STEADY_CONFIGS = {
    (2, 64): Config(128, 64, 8, 3, registers=128),
    (2, 128): Config(128, 64, 8, 3, registers=208),
}
SMALLEST = Config(16, 16, 8, 1)
# Instead of what has no room in the shared memory of a smaller GPU, 99 KiB.
LITTLE_MEMORY_CONFIGS = {
    CONFIGS[2, 64]: Config(128, 64, 8, 2),
    CONFIGS[2, 256]: Config(64, 32, 8, 2),
}


def config_for(
    query: Tensor, widest: int, special: Mapping[tuple[int, int], Config] = MappingProxyType({})
) -> Config:
    """The tables' entry for these widths; wider than the tables, the smallest tiles."""
    size = query.element_size()
    widths = [width for bytes_, width in CONFIGS if bytes_ == size and width >= widest]
    if not widths:
        return SMALLEST
    place = (size, min(widths))
    config = special.get(place, CONFIGS[place])
    return LITTLE_MEMORY_CONFIGS.get(config, config) if has_little_memory(query) else config


def forward(
    inputs: Inputs,
    settings: Settings,
    out: Tensor | None,
    wants_vitals: bool,
    moments: bool = True,
    config: Config | None = None,
    let_next: bool = False,
) -> tuple[Tensor, ForVitals]:
    """Fills `out` (None: scores only); returns lse [B, H, Q] and what the vitals are made of.

    The statistics are empty where no vitals are wanted. Without `moments` nothing is written to the
    planes mean and m2, and the keys are not squared: matrices that give the moments tell that too.
    let_next: the next launch may begin before this one ends (launching.enter).
    """
    inputs = aligned(inputs)
    query, value = inputs.query, inputs.value
    batch, heads, queries, width = query.shape
    dtype = compute_type(query)
    lse = query.new_empty((batch, heads, queries), dtype=dtype)
    shape = (PLANES, batch, heads, queries) if wants_vitals else (0,)
    statistics = query.new_empty(shape, dtype=dtype)
    if not lse.numel():
        return lse, ForVitals(statistics, None, None, inputs)
    if out is not None and not out.numel():
        out = None
    value_width = 0 if out is None or value is None else value.shape[-1]
    block_d, block_v = padded(width), padded(value_width)
    short = query.element_size() == 2 and inputs.mask is None and not settings.softcap
    # float16 has no room above 1 to multiply with values
    steady = short and (query.dtype == torch.bfloat16 or out is None)
    if config is None:
        special = STEADY_CONFIGS if steady else {} if short else GENERAL_CONFIGS
        config = config_for(query, max(block_d, block_v), special)
        if inputs.mask is not None and inputs.mask.element_size() > query.element_size():
            config = config._replace(stages=1 if max(block_d, block_v) > 128 else config.stages)
    call = with_counts(describe_call(inputs, settings))
    if out is None:
        call = call._replace(value=NO_HEADS)
    blocks = blocks_of(call, queries, config.block_m)
    squares = key_squares = None
    if wants_vitals and query.element_size() == 2:
        squares = lse.new_empty(lse.shape)
        if moments and _shares_keys(inputs, blocks, config.block_m):
            key_squares = lse.new_empty((batch, heads, blocks))
    cut = Cut(
        **constants(
            D=filled_width(query),
            V=filled_width(value) if value_width and value is not None else 0,
            OUT=value_width,
            BLOCK_D=block_d,
            BLOCK_V=block_v,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            PRECISION=dot_precision(query),
            NEGATIVE=settings.scale < 0.0,
            SHORT_STEP=short,
            STEADY=steady,
            # Each row that sees a key at all sees one of the first tile.
            PIVOTS=steady and settings.left is None and max(block_d, block_v) <= PIVOTS_WIDEST,
            MOMENTS=moments,
            LET_NEXT=let_next,
        )
    )
    arguments: dict[str, Any] = {
        "call": call,
        "out": heads_of(out),
        "lse_ptr": lse,
        "statistics_ptr": statistics if wants_vitals else None,
        "squares_ptr": squares,
        "key_squares_ptr": key_squares,
        "blocks": blocks,
        "heads_together": _heads_together(inputs, settings),
        "cut": cut,
        "num_warps": config.warps,
        "num_stages": config.stages,
        "maxnreg": config.registers,
        # A fused s * scale - max is off by the rounding of the max: 2^12 where logits are 2^36.
        # The short step knows that, and gives such rows to the general one.
        "enable_fp_fusion": query.element_size() == 2,
    }
    _forward_kernel[(batch * heads * blocks,)](**arguments)
    return lse, ForVitals(statistics, squares, key_squares, inputs)


def _shares_keys(inputs: Inputs, blocks: int, tile: int) -> bool:
    """Whether a tile of keys for each program is all of them, and all of them count."""
    sums = blocks * (inputs.query.shape[1] // max(inputs.key.shape[1], 1))
    if inputs.key_lengths is not None or inputs.cu_seqlens_k is not None:
        return False
    return inputs.key.shape[2] <= sums * tile and sums <= MOST_KEY_SQUARES


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


@triton.jit(do_not_specialize=["blocks", "heads_together"])
def _forward_kernel(
    call,
    out,
    lse_ptr,
    statistics_ptr,
    squares_ptr,
    key_squares_ptr,
    blocks,
    heads_together,
    cut,
):
    """One program: BLOCK_M rows of a head over all the keys that they may see."""
    if cut.LET_NEXT:
        let_next_begin()
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
    MASKED: tl.constexpr = tl.constexpr(call.mask.ptr is not None)
    LEFT: tl.constexpr = tl.constexpr(call.window.left is not None)
    RIGHT: tl.constexpr = tl.constexpr(call.window.right is not None)
    STATISTICS: tl.constexpr = tl.constexpr(statistics_ptr is not None)
    FOLLOWS: tl.constexpr = tl.constexpr(cut.SHORT_STEP and not cut.STEADY)
    tiles = key_tiles(row, row_end, seq, call.window, MASKED, cut.BLOCK_N, cut.STEADY)

    # All that is read before the loops, at once: it comes from far.
    q = load_rows(matrix_of(call.query, b, h), rows, row_end, cut.D, cut.BLOCK_D, True)  # [M, D]
    k, v, first, first_key, share = None, None, None, None, None
    if cut.PIVOTS:
        k = _tile_at(tiles.full_end, key, seq.key_end, cut.D, cut.BLOCK_D, True, cut)
        if value.ptr is not None:
            v = _tile_at(tiles.full_end, value, seq.key_end, cut.V, cut.BLOCK_V, True, cut)
    if STATISTICS:
        columns = seq.key + tl.arange(0, 1)
        first_key = load_rows(key, columns, seq.key_end, cut.D, cut.BLOCK_D, True)  # [1, D]
    if key_squares_ptr is not None:
        # The programs of all query heads of a key head take one tile each.
        columns = ((h % call.repeats) * blocks + block) * cut.BLOCK_M + tl.arange(0, cut.BLOCK_M)
        share = load_rows(key, columns, call.keys, cut.D, cut.BLOCK_D, True)
    sink2 = None
    if SINK:
        sink2 = load_sink(entry(call.sinks, b, h), FLOAT)
    factor = row_scale(call, place, rows)
    if call.LOG_N:
        factor = factor[:, None]  # [M, 1]

    head = b * call.heads + h
    offsets = head * call.queries + rows
    if squares_ptr is not None:
        tl.store(squares_ptr + offsets, _squares_of(q), mask=inside)
    if key_squares_ptr is not None:
        tl.store(key_squares_ptr + head * blocks + block, tl.sum(_squares_of(share), 0))
    if FOLLOWS and (cut.NEGATIVE or call.head_scale.ptr is not None):
        # `add_scores` wants a scale that is not negative: the query takes the sign.
        q = (q.to(FLOAT) * tl.where(factor < 0.0, -1.0, 1.0)).to(q.dtype)
        factor = tl.abs(factor)
    work = Work(q, factor, rows, key, value, place)
    if STATISTICS:
        first = _argument_of(first_key, seq.key, call, work)

    acc = tl.zeros([cut.BLOCK_M, cut.BLOCK_V], FLOAT)
    sums = start_sums(sink2, cut.BLOCK_M, FLOAT)
    lost = rows < 0  # none
    # Tiles at the right edge, with a window those at the left edge, then those that hide nothing.
    for part in tl.static_range(1, 4):
        if (
            (part == 1 and not cut.PIVOTS)
            or (part == 2 and LEFT)
            or (part == 3 and not MASKED and not cut.STEADY)
        ):
            begin, end = span_of(tiles, part % 3)
            short = FOLLOWS and part == 3
            acc, sums = _add_tiles(
                acc, sums, begin, end, call, work, part != 3, short, STATISTICS, cut
            )
    if cut.STEADY:
        acc, sums, lost = _add_steadily(acc, sums, tiles, k, v, call, work, STATISTICS, cut)
    if cut.SHORT_STEP:
        lost = lost | (tl.abs(sums.row_max) > RESIDUAL_LIMIT) & (sums.row_max > lowest(FLOAT))
        if tl.max(tl.where(lost & inside, 1, 0), 0) > 0:
            acc = tl.zeros([cut.BLOCK_M, cut.BLOCK_V], FLOAT)
            sums = start_sums(sink2, cut.BLOCK_M, FLOAT)
            begin, end = tiles.begin, tiles.end
            acc, sums = _add_tiles(acc, sums, begin, end, call, work, True, False, STATISTICS, cut)

    if call.value.ptr is not None and (MASKED or LEFT or RIGHT):
        # A sum of sound probabilities, and values that are none: they may be hidden from the row.
        poisoned = (tl.sum(acc * 0.0, 1) != 0.0) & (sums.row_sum < float("inf"))
        if tl.max(tl.where(poisoned & inside, 1, 0), 0) > 0:  # noqa: SIM102, Triton computes both
            if hides_broken_values(tiles, call, place, cut):
                acc, total = add_seen_values(sums.row_max, rows, row_end, tiles, call, place, cut)
                if SINK:
                    total += tl.exp2(sink2 - sums.row_max)
                # Its logits are rounded in another order: far from 0 their sum is another.
                acc *= tl.where(total > 0.0, sums.row_sum / total, 1.0)[:, None]

    closed = close_sums(sums, sink2)
    if tl.max(tl.where(closed.empty & inside, 1, 0), 0) > 0:
        closed = show_seen(closed, sums, see_keys(rows, tiles, call, place, cut.BLOCK_N))
    tl.store(lse_ptr + offsets, closed.lse2 * LN2, mask=inside)
    if call.value.ptr is not None:
        store_output(call, out, b, h, rows, inside, acc, closed, cut.OUT)
    if STATISTICS:
        store_statistics(
            statistics_ptr,
            tl.cast(call.batch, tl.int64) * call.heads * call.queries,
            offsets,
            inside,
            sums,
            closed,
            first,
            SINK or cut.STEADY,
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
def _squares_of(rows):
    """[M]: summed over each row [M, D]."""
    entries = rows.to(tl.float32)
    return tl.sum(entries * entries, 1)


@triton.jit
def _argument_of(key, column, call, work):
    """[M]: x of one key [1, D] for each row."""
    FLOAT: tl.constexpr = call.FLOAT
    scores = tl.sum(work.q.to(FLOAT) * key.to(FLOAT), 1, keep_dims=True)  # [M, 1]
    x, _, _ = _arguments_at(column, 1, scores, call, work, True)
    return tl.reshape(x, [work.q.shape[0]])


@triton.jit
def _arguments_at(start, NUMBER: tl.constexpr, scores, call, work, EDGE: tl.constexpr):
    """`arguments_of` for the scores of NUMBER keys from `start` on."""
    columns = start + tl.arange(0, NUMBER)
    exact: tl.constexpr = work.q.dtype == call.FLOAT
    return arguments_of(scores, work.factor, work.rows, columns, call, work.place, EDGE, exact)


@triton.jit
def _add_tiles(
    acc,
    sums,
    begin,
    end,
    call,
    work,
    EDGE: tl.constexpr,
    SHORT_STEP: tl.constexpr,
    STATISTICS: tl.constexpr,
    cut,
):
    """The tiles of keys from `begin` to `end` into acc and sums; EDGE: some pairs are hidden."""
    seq = work.place.seq
    FLOAT: tl.constexpr = call.FLOAT
    SINK: tl.constexpr = tl.constexpr(call.sinks.ptr is not None)
    for start in range(begin, end, cut.BLOCK_N):
        k = _tile_at(start, work.key, seq.key_end, cut.D, cut.BLOCK_D, EDGE, cut)
        scores = _scores_of(work.q, k, FLOAT, cut)
        if SHORT_STEP:
            sums, p, alpha = add_scores(
                sums, scores, work.factor, STATISTICS, cut.MOMENTS, FLOAT, SINK
            )
        else:
            x, z, read = _arguments_at(start, cut.BLOCK_N, scores, call, work, EDGE)
            counts = None
            if EDGE and call.mask.ptr is None:
                counts = visible_counts(work.rows, start, seq, call.window, cut.BLOCK_N)
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
        if work.value.ptr is not None:
            acc = acc * alpha[:, None]
            v = _tile_at(start, work.value, seq.key_end, cut.V, cut.BLOCK_V, EDGE, cut)
            acc = _add_values(acc, p, v, start, call, work, cut)
    return acc, sums


@triton.jit
def _add_steadily(acc, sums, tiles, k, v, call, work, STATISTICS: tl.constexpr, cut):
    """All tiles that need no maximum of their own, into acc and sums; and which rows are lost.

    k, v: the first tile at the right edge, where it is to set the pivots.
    """
    FLOAT: tl.constexpr = call.FLOAT
    SINK: tl.constexpr = tl.constexpr(call.sinks.ptr is not None)
    steady = start_steady(cut.BLOCK_M, FLOAT)
    keys = tiles.full_end - tiles.full  # of each row, that `steady` sums
    if cut.PIVOTS:
        # A row that sees a key sees one of this tile.
        scores = _scores_of(work.q, k, FLOAT, cut)
        seen = _reachable_at(tiles.full_end, call, work, cut)
        sums = set_pivots(sums, scores, work.factor, seen, SINK, FLOAT)
        steady, p = add_steady(
            steady, sums, scores, work.factor, seen, STATISTICS, cut.MOMENTS, SINK
        )
        if work.value.ptr is not None:
            acc = _add_values(acc, p, v, tiles.full_end, call, work, cut)
        _, high = row_bounds(work.rows, work.place.seq, call.window)
        keys += tl.maximum(high - tiles.full_end, 0)
    for part in tl.static_range(1, 3):  # what is left of the right edge, then the others
        begin, end = span_of(tiles, part % 2)
        if part == 1:
            begin += cut.BLOCK_N
        if part == 2 or (cut.PIVOTS and call.window.right is not None):
            acc, steady = _add_steady_tiles(
                acc, steady, sums, begin, end, call, work, part == 1, STATISTICS, cut
            )
    sums, lost = join_steady(sums, steady, keys, STATISTICS, cut.MOMENTS, SINK)
    if call.value.ptr is not None:  # 2^60 times a value may leave float32 where the value does not
        too_large = tl.sum(acc * 0.0, 1) != 0.0  # what is not finite times 0 is NaN
        lost = lost | (too_large & (sums.row_sum < float("inf")))
    return acc, sums, lost


@triton.jit
def _add_steady_tiles(
    acc, steady, sums, begin, end, call, work, EDGE: tl.constexpr, STATISTICS: tl.constexpr, cut
):
    """The same into acc and `steady`, about the pivots of `sums`, after each row has seen a key."""
    seq = work.place.seq
    SINK: tl.constexpr = tl.constexpr(call.sinks.ptr is not None)
    for start in range(begin, end, cut.BLOCK_N):
        k = _tile_at(start, work.key, seq.key_end, cut.D, cut.BLOCK_D, EDGE, cut)
        scores = _scores_of(work.q, k, call.FLOAT, cut)
        seen = None
        if EDGE:
            seen = _reachable_at(start, call, work, cut)
        steady, p = add_steady(
            steady, sums, scores, work.factor, seen, STATISTICS, cut.MOMENTS, SINK
        )
        if work.value.ptr is not None:
            v = _tile_at(start, work.value, seq.key_end, cut.V, cut.BLOCK_V, EDGE, cut)
            acc = _add_values(acc, p, v, start, call, work, cut)
    return acc, steady


@triton.jit
def _reachable_at(start, call, work, cut):
    """[M, N]: which pairs of a tile are not hidden."""
    columns = start + tl.arange(0, cut.BLOCK_N)
    return reachable(work.rows[:, None], columns[None, :], work.place.seq, call.window)


@triton.jit
def _scores_of(q, k, FLOAT: tl.constexpr, cut):
    """Q K^T [M, N], before any scale."""
    return tl.dot(q, tl.trans(k), input_precision=cut.PRECISION, out_dtype=FLOAT)


@triton.jit
def _add_values(acc, p, v, start, call, work, cut):
    """acc + P V of the tile of keys at `start`, after dropout."""
    place = work.place
    if call.dropout.rate is not None:
        head = place.b * call.heads + place.h
        columns = start + tl.arange(0, cut.BLOCK_N)
        kept = keeps(call.dropout, head, work.rows[:, None], columns[None, :])
        p = tl.where(kept, p, 0.0)
    p = p.to(v.dtype)
    return tl.dot(p, v, acc, input_precision=cut.PRECISION, out_dtype=call.FLOAT)


@triton.jit
def hides_broken_values(tiles, call, place, cut):
    """Whether a value that is not finite lies in a tile of keys that hides something."""
    value = matrix_of(call.value, place.b, place.h // call.repeats)
    found = False
    for part in tl.static_range(1, 3):
        begin, end = span_of(tiles, part)
        stop = place.seq.key_end
        found |= holds_broken(value, begin, end, stop, cut.V, cut.BLOCK_V, cut.BLOCK_N)
    return found


@triton.jit
def add_seen_values(pivot, rows, row_end, tiles, call, place, cut):
    """acc = P V and the sum of P about the pivots [M], key by key.

    In a product of matrices 0 times a value that is not finite is NaN, also where the key is
    hidden: here a value joins the rows that see it, and no other. The query is read again: kept
    from before, it would take registers from every loop.
    """
    seq = place.seq
    q = load_rows(matrix_of(call.query, place.b, place.h), rows, row_end, cut.D, cut.BLOCK_D, True)
    key = matrix_of(call.key, place.b, place.h // call.repeats)
    value = matrix_of(call.value, place.b, place.h // call.repeats)
    factor = row_scale(call, place, rows)
    if call.LOG_N:
        factor = factor[:, None]
    work = Work(q, factor, rows, key, value, place)
    acc = tl.zeros([rows.shape[0], cut.BLOCK_V], call.FLOAT)
    row_sum = tl.zeros([rows.shape[0]], call.FLOAT)
    i = rows[:, None]
    for start in range(tiles.begin, tl.minimum(tiles.end, seq.key_end)):
        column = start + tl.arange(0, 1)
        j = column[None, :]
        k = load_rows(key, column, seq.key_end, cut.D, cut.BLOCK_D, True)
        v = load_rows(value, column, seq.key_end, cut.V, cut.BLOCK_V, True)
        p = tl.exp2(_argument_of(k, start, call, work) - pivot)
        row_sum += p
        if call.mask.ptr is not None:
            _, seen, _ = masked_pairs(call, place, i, j)
        else:
            seen = reachable(i, j, seq, call.window)
        p = p[:, None]
        if call.dropout.rate is not None:
            p = tl.where(keeps(call.dropout, place.b * call.heads + place.h, i, j), p, 0.0)
        acc += tl.where(seen, p.to(v.dtype).to(call.FLOAT) * v.to(call.FLOAT), 0.0)
    return acc, row_sum


@triton.jit
def _tile_at(start, matrix, end, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EDGE: tl.constexpr, cut):
    """[N, BLOCK]. The distances in a tile are the same for all of them: only its address moves."""
    ptr = matrix.ptr + tl.cast(start, tl.int64) * matrix.stride_row
    tile = Matrix(ptr, matrix.stride_row, matrix.stride_column)
    return load_rows(tile, tl.arange(0, cut.BLOCK_N), end - start, WIDTH, BLOCK, EDGE)
