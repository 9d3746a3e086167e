"""Additive attention forward: FlashAttention's walk over the keys, with the score of units.py.

Everything after the score, output and statistics, is tile.py.

A tile of scores is computed as [lanes, warps, keys, rows]: a warp has its own rows, a thread of it
some of the keys. Of four units a thread then loads 4 rows and 4 keys, 16 bytes each, for 16 scores;
a thread of Triton's own choice would load 16 rows for one key. Triton takes the order of threads
from the load of keys, which is therefore written out for every warp.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from scaledot.backends.cuda import replay
from scaledot.backends.cuda.additive.prepare import describe_score
from scaledot.backends.cuda.additive.units import distance_of, raw_scores, tokens_of
from scaledot.backends.cuda.arguments import (
    NO_HEADS,
    aligned_rows,
    compute_type,
    constants,
    dot_precision,
    filled_width,
    heads_of,
    padded,
)
from scaledot.backends.cuda.logits import (
    LN2,
    arguments_of,
    entry,
    keeps,
    load_rows,
    masked_pairs,
    matrix_of,
    row_scale,
    see_keys,
)
from scaledot.backends.cuda.statistics import PLANES
from scaledot.backends.cuda.tile import (
    add_arguments,
    close_sums,
    load_sink,
    show_seen,
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
    visible_counts,
)
from scaledot.backends.inputs import Inputs
from scaledot.problem import Settings


class Config(NamedTuple):
    """The cut of the work: what may be tuned, and changes no result but its rounding."""

    block_m: int  # a multiple of `warps`
    block_n: int
    warps: int
    stages: int = 2
    registers: int | None = None  # of a thread, at most


class Cut(NamedTuple):
    """What is compiled into a kernel besides the call and the score."""

    V: Any  # what is read of a row of value
    OUT: Any  # what is written of a row
    BLOCK_V: Any
    BLOCK_M: Any
    BLOCK_N: Any
    WARPS: Any
    PRECISION: Any  # of matrix products


# 16 warps a multiprocessor hide the latency of loads, so a thread may have 128 registers. At 8
# heads of 1024 there are 128 programs, one for each multiprocessor of an H200.
FLOAT32 = Config(64, 128, 16, registers=128)
FLOAT64 = Config(16, 32, 4)
VALUE_BYTES = 64 * 2**10  # of a tile of values: two programs share a multiprocessor's memory


def config_for(query: Tensor, value_width: int) -> Config:
    """Fewer keys at a time where their values are wide."""
    config = FLOAT64 if query.dtype == torch.float64 else FLOAT32
    keys = max(VALUE_BYTES // (padded(value_width) * query.element_size()), 16)
    return config._replace(block_n=min(config.block_n, keys))


def forward(
    inputs: Inputs,
    settings: Settings,
    out: Tensor | None,
    wants_vitals: bool,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """Fills `out` (None: scores only); returns lse [B, H, Q] and statistics [9, B, H, Q]."""
    query = inputs.query
    batch, heads, queries, _ = query.shape
    dtype = compute_type(query)
    lse = query.new_empty((batch, heads, queries), dtype=dtype)
    shape = (PLANES, batch, heads, queries) if wants_vitals else (0,)
    statistics = query.new_empty(shape, dtype=dtype)
    if not lse.numel():
        return lse, statistics
    if out is not None and not out.numel():
        out = None
    planes = statistics if wants_vitals else None
    facts = (settings, config, dot_precision(query))
    call = replay.describe((*inputs, out, lse, planes), *facts)
    if not replay.again(call):
        _launch_first(call, settings, config)
    return lse, statistics


def _launch_first(described: replay.Call, settings: Settings, config: Config | None) -> None:
    """The launches of a call that has none like it, written down for those that will be."""
    recording = replay.Recording(described)
    *tensors, out, lse, statistics = recording.tensors
    inputs = Inputs._make(tensors)
    if out is not None and inputs.value is not None:
        inputs = inputs._replace(value=aligned_rows(inputs.value))
    query, value = inputs.query, inputs.value
    batch, heads, queries, _ = query.shape
    value_width = 0 if out is None or value is None else value.shape[-1]
    if config is None:
        config = config_for(query, value_width)
    call, score = describe_score(inputs, settings, recording)
    if out is None:
        call = call._replace(value=NO_HEADS)
    blocks = blocks_of(call, queries, config.block_m)
    cut = Cut(
        **constants(
            V=filled_width(value) if value_width and value is not None else 0,
            OUT=value_width,
            BLOCK_V=padded(value_width),
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            WARPS=config.warps,
            PRECISION=dot_precision(query),
        )
    )
    arguments = {
        "call": call,
        "score": score,
        "out": heads_of(out),
        "lse_ptr": lse,
        "statistics_ptr": statistics,
        "blocks": blocks,
        "cut": cut,
    }
    options = {"num_warps": config.warps, "num_stages": config.stages}
    if config.registers is not None and score.PTX.value:
        options["maxnreg"] = config.registers
    recording.launch(_forward_kernel, batch * heads * blocks, query, arguments, **options)
    recording.keep()


@triton.jit
def _forward_kernel(call, score, out, lse_ptr, statistics_ptr, blocks, cut):
    """One program: BLOCK_M rows of a head over all the keys that they may see."""
    FLOAT: tl.constexpr = call.FLOAT
    SINK: tl.constexpr = tl.constexpr(call.sinks.ptr is not None)
    STATISTICS: tl.constexpr = tl.constexpr(statistics_ptr is not None)
    program = tl.program_id(0)
    head = (program // blocks).to(tl.int64)  # b * H + h
    b = head // call.heads
    h = head % call.heads
    block = blocks - 1 - program % blocks  # under a causal mask the last rows have most to do
    row, seq = find_rows(call, b, block, cut.BLOCK_M)
    if row >= seq.row_end:
        return
    place = Place(b, h, seq)
    row_end = tl.minimum(row + cut.BLOCK_M, seq.row_end)
    rows = row + tl.arange(0, cut.BLOCK_M)
    inside = rows < row_end

    group = b * (call.heads // call.repeats) + h // call.repeats
    row_distance = distance_of(tokens_of(score.query, head, 0, rows, inside, score))
    offs_m = _rows_of_warps(cut)
    queries = tokens_of(score.query, head, row, offs_m, row + offs_m < row_end, score)
    value = call.value if call.value.ptr is None else matrix_of(call.value, b, h // call.repeats)
    sink2 = None
    if SINK:
        sink2 = load_sink(entry(call.sinks, b, h), FLOAT)
    factor = row_scale(call, place, rows)
    if call.LOG_N:
        factor = factor[:, None]  # [M, 1]

    acc = tl.zeros([cut.BLOCK_M, cut.BLOCK_V], FLOAT)
    sums = start_sums(sink2, cut.BLOCK_M, FLOAT)
    first = tl.full([cut.BLOCK_M], float("-inf"), FLOAT)
    tiles = key_tiles(row, row_end, seq, call.window, True, cut.BLOCK_N)
    for start in range(tiles.begin, tiles.end, cut.BLOCK_N):
        columns = start + tl.arange(0, cut.BLOCK_N)
        raw = _raw_at(start, queries, group, row_distance, offs_m, call, place, score, cut)
        x, z, read = arguments_of(raw, factor, rows, columns, call, place, True, True)
        if STATISTICS:
            is_first = (columns == seq.key)[None, :]
            first = tl.maximum(first, tl.max(tl.where(is_first, x, float("-inf")), 1))
        seen_keys = None
        if call.mask.ptr is None:
            seen_keys = visible_counts(rows, start, seq, call.window, cut.BLOCK_N)
        sums, p, alpha = add_arguments(
            sums,
            x,
            z if call.softcap is not None else None,
            read,
            STATISTICS,
            True,
            FLOAT,
            seen_keys,
            SINK,
        )
        if value.ptr is not None:
            if call.dropout.rate is not None:
                p = tl.where(keeps(call.dropout, head, rows[:, None], columns[None, :]), p, 0.0)
            v = load_rows(value, columns, seq.key_end, cut.V, cut.BLOCK_V, True)  # [N, V]
            acc = acc * alpha[:, None]
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=cut.PRECISION, out_dtype=FLOAT)

    LEFT: tl.constexpr = tl.constexpr(call.window.left is not None)
    RIGHT: tl.constexpr = tl.constexpr(call.window.right is not None)
    if value.ptr is not None and (call.mask.ptr is not None or LEFT or RIGHT):
        poisoned = (tl.sum(acc * 0.0, 1) != 0.0) & (sums.row_sum < float("inf"))
        if tl.max(tl.where(poisoned & inside, 1, 0), 0) > 0:
            acc = tl.zeros([cut.BLOCK_M, cut.BLOCK_V], FLOAT)
            for start in range(tiles.begin, tiles.end, cut.BLOCK_N):
                columns = start + tl.arange(0, cut.BLOCK_N)
                raw = _raw_at(start, queries, group, row_distance, offs_m, call, place, score, cut)
                x, _, _ = arguments_of(raw, factor, rows, columns, call, place, True, True)
                p = tl.exp2(x - sums.row_max[:, None])
                acc = _add_seen_values(acc, p, start, rows, value, call, place, cut)
    closed = close_sums(sums, sink2)
    if tl.max(tl.where(closed.empty & inside, 1, 0), 0) > 0:
        closed = show_seen(closed, sums, see_keys(rows, tiles, call, place, cut.BLOCK_N))
    offsets = head * call.queries + rows
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
            SINK,
            call.softcap is not None,
            True,
            FLOAT,
        )


@triton.jit
def _raw_at(start, queries, group, row_distance, offs_m, call, place, score, cut):
    """The scores [M, N] of the tile of keys at `start`, before their scale."""
    key_end = place.seq.key_end
    columns = start + tl.arange(0, cut.BLOCK_N)
    keys = tokens_of(score.key, group, 0, columns, columns < key_end, score)
    distance = tl.maximum(row_distance, distance_of(keys))
    offs_n = _keys_of_lanes(cut)
    keys = tokens_of(score.key, group, start, offs_n, start + offs_n < key_end, score)
    zeros = tl.zeros([offs_n.shape[0], cut.WARPS, offs_n.shape[2], offs_m.shape[3]], call.FLOAT)
    raw = raw_scores(queries, keys, distance, zeros, call, place, score)
    return tl.reshape(tl.permute(raw, (1, 3, 2, 0)), [cut.BLOCK_M, cut.BLOCK_N])


@triton.jit
def _add_seen_values(acc, p, start, rows, value, call, place, cut):
    """acc + P V of a tile, key by key: a value joins the rows that see it, and no other.

    In a product of matrices 0 times a value that is not finite would be NaN in all of them.
    """
    columns = start + tl.arange(0, cut.BLOCK_N)
    i, j = rows[:, None], columns[None, :]
    if call.dropout.rate is not None:
        p = tl.where(keeps(call.dropout, place.b * call.heads + place.h, i, j), p, 0.0)
    if call.mask.ptr is not None:
        _, seen, _ = masked_pairs(call, place, i, j)
    else:
        seen = reachable(i, j, place.seq, call.window)
    for key in range(start, tl.minimum(start + cut.BLOCK_N, place.seq.key_end)):
        v = load_rows(value, key + tl.arange(0, 1), key + 1, cut.V, cut.BLOCK_V, True)  # [1, V]
        own = tl.sum(tl.where(j == key, p, 0.0), 1, keep_dims=True).to(v.dtype)  # [M, 1]
        sees = tl.max(((j == key) & seen).to(tl.int32), 1, keep_dims=True) > 0
        acc += tl.where(sees, own.to(call.FLOAT) * v.to(call.FLOAT), 0.0)
    return acc


@triton.jit
def _rows_of_warps(cut):
    """[1, warps, 1, rows of a warp]."""
    ROWS: tl.constexpr = cut.BLOCK_M // cut.WARPS
    warp = tl.arange(0, cut.WARPS)[None, :, None, None]
    return warp * ROWS + tl.arange(0, ROWS)[None, None, None, :]


@triton.jit
def _keys_of_lanes(cut):
    """[lanes, warps, keys of a lane, 1]; all warps have the same."""
    LANES: tl.constexpr = tl.constexpr(min(cut.BLOCK_N, 32))
    KEYS: tl.constexpr = cut.BLOCK_N // LANES
    lane = tl.arange(0, LANES)[:, None, None, None] + tl.zeros([1, cut.WARPS, 1, 1], tl.int32)
    return lane + tl.arange(0, KEYS)[None, None, :, None] * LANES
