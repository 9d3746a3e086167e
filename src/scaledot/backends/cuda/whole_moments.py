"""Moments of the logits where every row sees every key, without the logits.

With the mean k' of the keys and their scatter matrix C = sum_j (k_j - k')(k_j - k')^T, the logits
z = f q.k of a row have

    mean of z    f q.k'
    m2 of z      f^2 q^T C q      squared deviations from that mean, summed

The vitals need m2 only as its sum over the rows of a head, and that is one product of two matrices,
both made of exact products of 16-bit numbers:

    sum_i q_i^T C q_i = tr(C S),    S = sum_i q_i q_i^T    over the rows that count

so no row is multiplied with C (moments.py must do that, where rows see unequally many keys). Three
launches, none of which waits for the host:

    measure keys    mean and scatter matrix of each chunk of keys (gram.py)
    merge chunks    those of all keys of a head, by Chan's rule
    measure rows    the mean of each row; S of a chunk of rows, whose trace with C they share

The quarter of a wide matrix that lies off its diagonal counts twice.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from scaledot.backends.cuda import gram
from scaledot.backends.cuda.arguments import strides
from scaledot.backends.cuda.launching import enter
from scaledot.backends.cuda.replay import ONCE, Once
from scaledot.backends.cuda.statistics import PLANES, ROW_PLANES
from scaledot.backends.inputs import Inputs
from scaledot.problem import Settings

MEAN, M2 = (tl.constexpr(ROW_PLANES.index(name)) for name in ("mean", "m2"))
MULTIPROCESSORS = 132  # of an H200
# Tokens of one program. Tensor cores cut their sums off instead of rounding them, so long sums
# drift; short ones leave more matrices to write.
LONGEST, SHORTEST = 1024, 256
MERGED_ENTRIES = 256  # of a matrix, one program
MERGE_STAGES = 6  # of chunks
MASKED_ROWS = 64  # rows at a time where some do not count: so many has a product of a warpgroup
HALF_UNIT = tl.constexpr(16384.0)  # what float16 numbers are scaled to, of 65504


class RowsPlan(NamedTuple):
    """How programs that measure rows are built for a width."""

    tokens: int  # at a time
    stages: int  # of which all but one are on their way
    warps: int
    most: dict[str, int]  # registers


def rows_plan_for(plan: gram.Plan) -> RowsPlan:
    """Each warpgroup has 64 rows of a mean's product, so nothing is exchanged between them."""
    if plan.width <= 64:
        return RowsPlan(64, 4, 4, {"maxnreg": 128})
    if plan.width <= gram.WIDEST_PART:
        return RowsPlan(128, 3, 8, {"maxnreg": 128})
    return RowsPlan(128, 3, 8, {"maxnreg": 255})


def add_all(
    statistics: Tensor,
    inputs: Inputs,
    settings: Settings,
    launches: Once = ONCE,
    beside: bool = False,
) -> Tensor:
    """Fills the planes mean and m2 of statistics [PLANES, B, H, Q], the others of which are there.

    m2 is right as a sum over the rows of a head that count: each has an even share of its chunk's.
    Returns sums of the squares of the keys, equally many for each head, as `summary.fill` takes.
    beside: the first launch need not wait for the one before it (launching.enter_beside).
    """
    query, key = inputs.query, inputs.key
    assert statistics.is_contiguous()
    assert statistics.shape == (PLANES, *query.shape[:3])
    assert query.dtype in (torch.bfloat16, torch.float16)
    assert query.shape[-1] <= 2 * gram.WIDEST_PART
    hidden_by = inputs.key_lengths, inputs.cu_seqlens_q, settings.left, settings.right
    assert all(each is None for each in hidden_by)
    plan = gram.plan_for(query.shape[-1])
    keys_chunk = _chunk(key.shape[0] * key.shape[1], key.shape[2], plan)
    grams = gram.measure(key, plan, keys_chunk, launches, beside)
    scatter, mean_key = _merge(grams, key, plan, keys_chunk, launches, beside)
    batch, heads, queries = query.shape[:3]
    rows = rows_plan_for(plan)
    chunk = _chunk(batch * heads, queries, plan)
    chunks = -(-queries // chunk)
    in_steps = gram.strides_in_steps("q", query, "bhnd")
    arguments: dict[str, Any] = {
        "statistics_ptr": statistics,
        "query_ptr": query,
        "scatter_ptr": scatter,
        "mean_key_ptr": mean_key,
        "head_scale_ptr": inputs.head_scale,
        "factor": float(settings.scale) * (math.log(key.shape[2]) if settings.log_n else 1.0),
        "batch": batch,
        "heads": heads,
        "groups": key.shape[1],
        "queries": queries,
        "chunk": chunk,
        "chunks": chunks,
        **in_steps,
        **strides("scale_", inputs.head_scale, "bh"),
        "WIDTH": plan.width,
        "PART": plan.part,
        "FILLED": query.shape[-1] == plan.width,
        "LONGEST": LONGEST,
        "TOKENS": rows.tokens,
        "MASKED_ROWS": MASKED_ROWS,
        "STAGES": gram.stages_for(rows.stages, query, in_steps),
        "SOON": beside,
    }
    programs = batch * heads * chunks
    options = {"num_warps": rows.warps, "num_stages": 1, "launch_pdl": beside, **rows.most}
    launches.launch(_measure_rows, programs, query, arguments, **options)
    return grams.squares


def _merge(
    grams: gram.Grams, key: Tensor, plan: gram.Plan, chunk: int, launches: Once, soon: bool
) -> tuple[Tensor, Tensor]:
    """Scatter matrix and mean of the keys of each head."""
    batch, groups, keys = key.shape[:3]
    heads = batch * groups
    chunks = -(-keys // chunk)
    scatter = launches.room(key, heads * plan.parts * plan.part * plan.part, torch.float32)
    mean_key = launches.room(key, heads * plan.width, torch.float32)
    rows = max(MERGED_ENTRIES // plan.part, 1)
    arguments: dict[str, Any] = {
        "matrices_ptr": grams.matrices,
        "means_ptr": grams.means,
        "scatter_ptr": scatter,
        "mean_key_ptr": mean_key,
        "keys": keys,
        "chunk": chunk,
        "chunks": chunks,
        "WIDTH": plan.width,
        "PART": plan.part,
        "ROWS": rows,
        "STAGES": MERGE_STAGES,
        "SOON": soon,
    }
    programs = heads * plan.parts * plan.part // rows
    options = {"num_warps": 2, "num_stages": 1, "launch_pdl": soon}
    launches.launch(_merge_chunks, programs, key, arguments, **options)
    return scatter, mean_key


def _chunk(heads: int, tokens: int, plan: gram.Plan) -> int:
    """Tokens of a program: fewer where the multiprocessors would hold twice as many programs."""
    chunk = LONGEST
    held = MULTIPROCESSORS * plan.programs
    while chunk > SHORTEST and heads * -(-tokens // (chunk // 2)) <= held:
        chunk //= 2
    return chunk


@triton.jit
def _merge_chunks(
    matrices_ptr,
    means_ptr,
    scatter_ptr,
    mean_key_ptr,
    keys,
    chunk,
    chunks,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    SOON: tl.constexpr,
):
    """One program a few rows of a head's matrix. Means are counted from that of the first chunk."""
    if SOON:
        enter(LAST=False)
    PARTS: tl.constexpr = 2 * (WIDTH // PART) - 1
    program = tl.program_id(0).to(tl.int64)
    head, part, row, e, d = gram.place_in_parts(program, WIDTH, PART, ROWS)
    entries = row[:, None] * PART + tl.arange(0, PART)[None, :]
    means_ptr += head * chunks * WIDTH
    matrices_ptr += head * chunks * (PARTS * PART * PART)
    origin_e = tl.load(means_ptr + e)
    origin_d = tl.load(means_ptr + d)
    scatter = tl.zeros([ROWS, PART], tl.float32)
    sum_e = tl.zeros([ROWS], tl.float32)
    sum_d = tl.zeros([PART], tl.float32)
    for index in tl.range(0, chunks, num_stages=STAGES):
        own = tl.load(matrices_ptr + tl.cast(index, tl.int64) * (PARTS * PART * PART) + entries)
        size = tl.minimum(keys - index * chunk, chunk).to(tl.float32)
        off_e = (tl.load(means_ptr + index * WIDTH + e) - origin_e) * size
        off_d = tl.load(means_ptr + index * WIDTH + d) - origin_d
        scatter += own + off_e[:, None] * off_d[None, :]
        sum_e += off_e
        sum_d += off_d * size
    shift_e = sum_e / keys
    scatter -= shift_e[:, None] * sum_d[None, :]
    scatter *= tl.where(part == 1, 2.0, 1.0)  # also for its mirror image, which is left out
    tl.store(scatter_ptr + head * (PARTS * PART * PART) + entries, scatter)
    on_diagonal = (row >= 0) & (part != 1)
    tl.store(mean_key_ptr + head * WIDTH + e, origin_e + shift_e, mask=on_diagonal)


@triton.jit
def _measure_rows(
    statistics_ptr,
    query_ptr,
    scatter_ptr,
    mean_key_ptr,
    head_scale_ptr,
    factor,
    batch,
    heads,
    groups,
    queries,
    chunk,
    chunks,
    stride_qb,
    stride_qh,
    stride_qn,
    stride_qd,
    width,
    stride_scale_b,
    stride_scale_h,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    FILLED: tl.constexpr,
    LONGEST: tl.constexpr,
    TOKENS: tl.constexpr,
    MASKED_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    SOON: tl.constexpr,
):
    """One program a chunk. Rows that do not count, perhaps NaN, are not read but taken as zeros:
    where there are any, rows are asked about before they are read."""
    if SOON:
        enter(LAST=False)
    WIDE: tl.constexpr = WIDTH > PART
    program = tl.program_id(0).to(tl.int64)
    head, index = program // chunks, (program % chunks).to(tl.int32)
    entry, own = head // heads, head % heads
    key_head = entry * groups + own // (heads // groups)
    if head_scale_ptr is not None:
        each = head_scale_ptr + entry * stride_scale_b + own * stride_scale_h
        factor = factor * tl.load(each).to(tl.float32)
    rows_ptr = query_ptr + (entry * stride_qb + own * stride_qh) * STEP
    plane = tl.cast(batch, tl.int64) * heads * queries
    row_max_ptr = statistics_ptr + head * queries
    means_ptr = row_max_ptr + MEAN * plane
    start = index * chunk
    stop = tl.minimum(start + chunk, queries)
    d = tl.arange(0, PART)
    e = PART + d
    step = (stride_qn, stride_qd)
    kind: tl.constexpr = query_ptr.dtype.element_ty
    x_mean_key = tl.load(mean_key_ptr + key_head * WIDTH + d)
    y_mean_key = x_mean_key
    if WIDE:
        y_mean_key = tl.load(mean_key_ptr + key_head * WIDTH + e)
    unit, back = factor, 1.0
    if kind == tl.float16:  # whose small numbers have few bits
        largest = tl.max(tl.maximum(tl.abs(x_mean_key), tl.abs(y_mean_key)), 0)
        unit = HALF_UNIT / tl.where(largest > 0.0, largest, 1.0)
        back = factor / unit
    x_mean_key = gram.in_columns(x_mean_key * unit, kind)
    y_mean_key = gram.in_columns(y_mean_key * unit, kind)
    xx = tl.zeros([PART, PART], tl.float32)
    xy, yy = xx, xx
    every = start + tl.arange(0, LONGEST)
    number = tl.sum(_counts(row_max_ptr, every, stop).to(tl.int32), 0)
    whole = start + (stop - start) // TOKENS * TOKENS
    straight_stop = gram.uniform(tl.where(number == stop - start, whole, start))
    # Of x and y nothing but products is taken, the row's mean too: what is read ahead and also used
    # otherwise, Triton 3.6 overwrites while products that nobody waits for still read it.
    for at in tl.range(start, straight_stop, TOKENS, num_stages=STAGES):
        row = at + tl.arange(0, TOKENS)
        x = gram.load_all_tokens(rows_ptr, row, d, width, step, STEP, FILLED)
        xx = tl.dot(tl.trans(x), x, xx)
        if WIDE:
            y = gram.load_all_tokens(rows_ptr, row, e, width, step, STEP, FILLED)
            xy = tl.dot(tl.trans(x), y, xy)
            yy = tl.dot(tl.trans(y), y, yy)
            means = tl.dot(y, y_mean_key, tl.dot(x, x_mean_key))
        else:
            means = tl.dot(x, x_mean_key)
        tl.store(means_ptr + row, tl.sum(means, 1) * back)
    for at in range(straight_stop, stop, MASKED_ROWS):
        row = at + tl.arange(0, MASKED_ROWS)
        counted = _counts(row_max_ptr, row, stop)
        x = gram.load_tokens(rows_ptr, row, counted, d, width, step, STEP)
        xx = tl.dot(tl.trans(x), x, xx)
        means = tl.dot(x, x_mean_key)
        if WIDE:
            y = gram.load_tokens(rows_ptr, row, counted, e, width, step, STEP)
            xy = tl.dot(tl.trans(x), y, xy)
            yy = tl.dot(tl.trans(y), y, yy)
            means = tl.dot(y, y_mean_key, means)
        tl.store(means_ptr + row, tl.sum(means, 1) * back, mask=row < stop)

    matrix_ptr = scatter_ptr + key_head * ((2 * (WIDTH // PART) - 1) * PART * PART)
    entries = d[:, None] * PART + d[None, :]
    trace = tl.sum(xx * tl.load(matrix_ptr + entries))
    if WIDE:
        matrix_ptr += PART * PART
        trace += tl.sum(xy * tl.load(matrix_ptr + entries))
        matrix_ptr += PART * PART
        trace += tl.sum(yy * tl.load(matrix_ptr + entries))
    trace = tl.where(trace < 0.0, 0.0, trace)  # what is not a number stays so
    share = factor * factor * trace / tl.maximum(number, 1)
    m2 = tl.zeros([LONGEST], tl.float32) + share
    tl.store(row_max_ptr + M2 * plane + every, m2, mask=every < stop)


@triton.jit
def _counts(row_max_ptr, row, stop):
    """Which rows enter the vitals: those whose logits are finite, as each sees a key."""
    row_max = tl.load(row_max_ptr + row, mask=row < stop, other=float("inf"))
    return tl.abs(row_max) < float("inf")
