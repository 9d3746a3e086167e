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

    measure keys    mean and scatter matrix of each chunk of keys
    merge chunks    those of all keys of a head, by Chan's rule
    measure rows    the mean of each row; S of a chunk of rows, whose trace with C they share

Keys are centred before they are multiplied, so a large common part of them, which moves no
probability, costs no digits. A matrix wider than 128 would not fit into a program's registers; as
it is symmetric, three of its quarters are enough, and the one off the diagonal counts twice.

The loops read the next tokens while the last ones are multiplied, and are written that way by hand:
Triton multiplies a tile from shared memory where it comes from the round before, but carries the
transpose of one that was just computed through registers.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from scaledot.backends.cuda.arguments import padded, strides
from scaledot.backends.cuda.replay import ONCE, Once
from scaledot.backends.cuda.statistics import PLANES, ROW_PLANES
from scaledot.backends.inputs import Inputs
from scaledot.problem import Settings

MEAN, M2 = (tl.constexpr(ROW_PLANES.index(name)) for name in ("mean", "m2"))
MULTIPROCESSORS = 132  # of an H200
WIDEST_PART = 128  # of a matrix
# Tokens of one program. Tensor cores cut their sums off instead of rounding them, so long sums
# drift; short ones leave more matrices to write.
LONGEST, SHORTEST = 1024, 256
FARTHEST_HALF = tl.constexpr(8192.0)  # a centre of float16 keys; they end at 65504
MERGED = 16  # chunks at a time
MERGED_ENTRIES = 512  # of each of their matrices


class Plan(NamedTuple):
    """How programs are built for a width."""

    tokens: int  # at a time
    warps: int
    programs: int  # that a multiprocessor holds at once
    most: dict[str, int]  # registers, so that it does
    width: int  # a power of two
    part: int  # rows and columns of a matrix, or of a quarter of it
    parts: int  # of a matrix that are computed


def plan_for(width: int) -> Plan:
    """By what the registers hold (compiled for sm_90: next to nothing is spilled in the loops)."""
    wide = padded(width)
    if wide <= 64:
        return Plan(64, 4, 4, {}, wide, wide, 1)
    if wide <= WIDEST_PART:
        return Plan(64, 8, 2, {"maxnreg": 128}, wide, wide, 1)
    return Plan(32, 8, 1, {}, wide, WIDEST_PART, 3)


def add_all(statistics: Tensor, inputs: Inputs, settings: Settings, launches: Once = ONCE) -> None:
    """Fills the planes mean and m2 of statistics [PLANES, B, H, Q], the others of which are there.

    m2 is right as a sum over the rows of a head that count: each has an even share of its chunk's.
    """
    query, key = inputs.query, inputs.key
    assert statistics.is_contiguous()
    assert statistics.shape == (PLANES, *query.shape[:3])
    assert query.dtype in (torch.bfloat16, torch.float16)
    assert query.shape[-1] <= 2 * WIDEST_PART
    hidden_by = inputs.key_lengths, inputs.cu_seqlens_q, settings.left, settings.right
    assert all(each is None for each in hidden_by)
    plan = plan_for(query.shape[-1])
    scatter, mean_key = _measure_all_keys(key, plan, launches)
    batch, heads, queries = query.shape[:3]
    chunk = _chunk(batch * heads, queries, plan)
    chunks = -(-queries // chunk)
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
        **_strides_in_steps("q", query, "bhnd"),
        **strides("scale_", inputs.head_scale, "bh"),
        "WIDTH": plan.width,
        "PART": plan.part,
        "TOKENS": plan.tokens,
    }
    programs = batch * heads * chunks
    options = {"num_warps": plan.warps, "num_stages": 1, **plan.most}
    launches.launch(_measure_rows, programs, query, arguments, **options)


def _measure_all_keys(key: Tensor, plan: Plan, launches: Once) -> tuple[Tensor, Tensor]:
    """Scatter matrix and mean of the keys of each head."""
    batch, groups, keys = key.shape[:3]
    heads = batch * groups
    chunk = _chunk(heads, keys, plan)
    chunks = -(-keys // chunk)
    matrix = plan.parts * plan.part * plan.part
    matrices = launches.room(key, heads * chunks * matrix, torch.float32)
    means = launches.room(key, heads * chunks * plan.width, torch.float32)
    scatter = launches.room(key, heads * matrix, torch.float32)
    mean_key = launches.room(key, heads * plan.width, torch.float32)
    sizes = {"keys": keys, "chunk": chunk, "chunks": chunks}
    sizes |= {"WIDTH": plan.width, "PART": plan.part}
    measured: dict[str, Any] = {
        "key_ptr": key,
        "matrices_ptr": matrices,
        "means_ptr": means,
        "groups": groups,
        **_strides_in_steps("k", key, "bhnd"),
        **sizes,
        "TOKENS": plan.tokens,
        "LANES": min(32 * plan.warps * 8 // plan.part, plan.tokens),
    }
    options = {"num_warps": plan.warps, "num_stages": 1, **plan.most}
    launches.launch(_measure_keys, heads * chunks, key, measured, **options)
    rows = min(MERGED_ENTRIES // plan.part, plan.part)
    merged: dict[str, Any] = {
        "matrices_ptr": matrices,
        "means_ptr": means,
        "scatter_ptr": scatter,
        "mean_key_ptr": mean_key,
        **sizes,
        "ROWS": rows,
        "CHUNKS": MERGED,
    }
    programs = heads * plan.parts * plan.part // rows
    launches.launch(_merge_chunks, programs, key, merged, num_warps=4)
    return scatter, mean_key


def _chunk(heads: int, tokens: int, plan: Plan) -> int:
    """Tokens of a program: fewer where the multiprocessors would hold twice as many programs."""
    chunk = LONGEST
    held = MULTIPROCESSORS * plan.programs
    while chunk > SHORTEST and heads * -(-tokens // (chunk // 2)) <= held:
        chunk //= 2
    return chunk


def _strides_in_steps(name: str, tensor: Tensor, letters: str) -> dict[str, int]:
    """Strides and width in STEPs of 8 numbers where they allow that: then 16 bytes are read at
    once, even if Triton cannot see that a stride is a multiple of 16."""
    named = strides(name, tensor, letters)
    *outer, inner = named
    lengths = {each: named[each] for each in outer} | {"width": tensor.shape[-1]}
    step = 8 if named[inner] == 1 and not any(n % 8 for n in lengths.values()) else 1
    return {each: n // step for each, n in lengths.items()} | {inner: named[inner], "STEP": step}


@triton.jit
def _measure_keys(
    key_ptr,
    matrices_ptr,
    means_ptr,
    groups,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_kd,
    width,
    keys,
    chunk,
    chunks,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    TOKENS: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program a chunk. x and y are the left and the right half of what is wider than PART."""
    place = tl.program_id(0).to(tl.int64)
    head, index = place // chunks, (place % chunks).to(tl.int32)
    keys_ptr = key_ptr + ((head // groups) * stride_kb + (head % groups) * stride_kh) * STEP
    start = index * chunk
    stop = tl.minimum(start + chunk, keys)
    d = tl.arange(0, PART)
    n = start + tl.arange(0, TOKENS)
    step = (stride_kn, stride_kd)
    x, x_centre, x_sums, x_lost = _first_keys(keys_ptr, n, n < stop, d, width, step, STEP, LANES)
    xx = tl.zeros([PART, PART], tl.float32)
    e, y, y_centre, y_sums, y_lost = PART + d, x, x_centre, x_sums, x_lost
    xy, yy = xx, xx
    if WIDTH > PART:
        right = _first_keys(keys_ptr, n, n < stop, e, width, step, STEP, LANES)
        y, y_centre, y_sums, y_lost = right
    for at in range(start + TOKENS, stop + TOKENS, TOKENS):
        n = at + tl.arange(0, TOKENS)
        # A key that is not there lies at the centre.
        other = x_centre.to(x.dtype)[None, :]
        raw_x = _load(keys_ptr, n, n < stop, d, width, step, STEP, other)
        raw_y = raw_x
        if WIDTH > PART:
            other = y_centre.to(y.dtype)[None, :]
            raw_y = _load(keys_ptr, n, n < stop, e, width, step, STEP, other)
        xx = tl.dot(tl.trans(x), x, xx)
        if WIDTH > PART:
            xy = tl.dot(tl.trans(x), y, xy)
            yy = tl.dot(tl.trans(y), y, yy)
            off = raw_y.to(tl.float32) - y_centre[None, :]
            y = off.to(raw_y.dtype)
            y_sums += by_lane(off, LANES)
            y_lost += by_lane(off - y.to(tl.float32), LANES)
        off = raw_x.to(tl.float32) - x_centre[None, :]
        x = off.to(raw_x.dtype)
        x_sums += by_lane(off, LANES)
        x_lost += by_lane(off - x.to(tl.float32), LANES)

    # About the mean of the chunk itself: of the numbers that were multiplied, rounded as they were.
    number = (stop - start).to(tl.float32)
    x_sum = tl.sum(x_sums, 0)
    x_mean = x_centre + x_sum / number
    x_sum -= tl.sum(x_lost, 0)
    x_shift = x_sum / number
    matrix_ptr = matrices_ptr + place * ((2 * (WIDTH // PART) - 1) * PART * PART)
    entries = d[:, None] * PART + d[None, :]
    tl.store(matrix_ptr + entries, xx - x_sum[:, None] * x_shift[None, :])
    tl.store(means_ptr + place * WIDTH + d, x_mean)
    if WIDTH > PART:
        y_sum = tl.sum(y_sums, 0)
        y_mean = y_centre + y_sum / number
        y_sum -= tl.sum(y_lost, 0)
        y_shift = y_sum / number
        matrix_ptr += PART * PART
        tl.store(matrix_ptr + entries, xy - x_sum[:, None] * y_shift[None, :])
        matrix_ptr += PART * PART
        tl.store(matrix_ptr + entries, yy - y_sum[:, None] * y_shift[None, :])
        tl.store(means_ptr + place * WIDTH + e, y_mean)


@triton.jit
def _first_keys(keys_ptr, n, inside, d, width, step, STEP: tl.constexpr, LANES: tl.constexpr):
    """Keys [TOKENS, PART] counted from a centre [PART]; by lane their sums, and what they lost."""
    raw = _load(keys_ptr, n, inside, d, width, step, STEP, 0.0)
    centre = centre_of(raw, inside)
    off = tl.where(inside[:, None], raw.to(tl.float32) - centre[None, :], 0.0)
    kept = off.to(raw.dtype)
    return kept, centre, by_lane(off, LANES), by_lane(off - kept.to(tl.float32), LANES)


@triton.jit
def centre_of(keys, inside):
    """[PART]: from where keys [TOKENS, PART] are counted, zeros where they are not `inside`.

    Their mean where all keys lie on one side of zero, rounded like them, so that what is left of a
    key has as few bits as the key (or is rounded, if it lies far from the others). Elsewhere zero,
    and in float16 where what is left might be too large.
    """
    values = keys.to(tl.float32)
    present = tl.sum(inside.to(tl.float32), 0)
    mean = tl.sum(values, 0) / present
    apart = tl.sum(tl.where(inside[:, None], tl.abs(values - mean[None, :]), 0.0), 0) / present
    centre = tl.where(tl.abs(mean) > 4.0 * apart, mean, 0.0)
    if keys.dtype == tl.float16:
        centre = tl.where(tl.abs(centre) > FARTHEST_HALF, 0.0, centre)
    return centre.to(keys.dtype).to(tl.float32)


@triton.jit
def _load(tokens_ptr, n, mask, d, width, step, STEP: tl.constexpr, other):
    """[TOKENS, PART]: entries d of the tokens n, or `other` where the mask [TOKENS] is not set."""
    at = tokens_ptr + (n.to(tl.int64) * step[0])[:, None] * STEP + d[None, :] * step[1]
    return tl.load(at, mask=mask[:, None] & (d < width * STEP)[None, :], other=other)


@triton.jit
def by_lane(off, LANES: tl.constexpr):
    """[TOKENS, PART] to [LANES, PART]: what is summed is in one thread, so nothing is exchanged."""
    return tl.sum(tl.reshape(off, [off.shape[0] // LANES, LANES, off.shape[1]]), 0)


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
    CHUNKS: tl.constexpr,
):
    """One program a few rows of a head's matrix. Means are counted from that of the first chunk."""
    PARTS: tl.constexpr = 2 * (WIDTH // PART) - 1
    STEPS: tl.constexpr = PARTS * PART // ROWS
    program = tl.program_id(0).to(tl.int64)
    head, first_row = program // STEPS, (program % STEPS).to(tl.int32) * ROWS
    part = first_row // PART  # above on the left, above on the right, below on the right
    row = first_row + tl.arange(0, ROWS)
    e = part // 2 * PART + row % PART
    d = (part + 1) // 2 * PART + tl.arange(0, PART)
    entries = row[:, None] * PART + tl.arange(0, PART)[None, :]
    means_ptr += head * chunks * WIDTH
    matrices_ptr += head * chunks * (PARTS * PART * PART)
    origin_e = tl.load(means_ptr + e)
    origin_d = tl.load(means_ptr + d)
    scatter = tl.zeros([ROWS, PART], tl.float32)
    sum_e = tl.zeros([ROWS], tl.float32)
    sum_d = tl.zeros([PART], tl.float32)
    for first in range(0, chunks, CHUNKS):
        index = first + tl.arange(0, CHUNKS)
        there = index < chunks
        size = tl.where(there, tl.minimum(keys - index * chunk, chunk), 0).to(tl.float32)
        place = index.to(tl.int64)
        at = matrices_ptr + place[:, None, None] * (PARTS * PART * PART) + entries[None, :, :]
        own = tl.load(at, mask=there[:, None, None], other=0.0)
        at = means_ptr + place[:, None] * WIDTH
        off_e = tl.load(at + e[None, :], mask=there[:, None], other=0.0) - origin_e[None, :]
        off_d = tl.load(at + d[None, :], mask=there[:, None], other=0.0) - origin_d[None, :]
        weighted_e = off_e * size[:, None]
        scatter += tl.sum(own + weighted_e[:, :, None] * off_d[:, None, :], 0)
        sum_e += tl.sum(weighted_e, 0)
        sum_d += tl.sum(off_d * size[:, None], 0)
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
    TOKENS: tl.constexpr,
):
    """One program a chunk. Rows that do not count, perhaps NaN, are not read but taken as zeros."""
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
    row = start + tl.arange(0, TOKENS)
    counted = _counts(row_max_ptr, row, stop)
    soon_counted = _counts(row_max_ptr, row + TOKENS, stop)
    step = (stride_qn, stride_qd)
    x = _load(rows_ptr, row, counted, d, width, step, STEP, 0.0)
    x_mean_key = tl.load(mean_key_ptr + key_head * WIDTH + d) * factor
    mean = _products(x, x_mean_key)
    xx = tl.zeros([PART, PART], tl.float32)
    e, y, y_mean_key = PART + d, x, x_mean_key
    xy, yy = xx, xx
    if WIDTH > PART:
        y = _load(rows_ptr, row, counted, e, width, step, STEP, 0.0)
        y_mean_key = tl.load(mean_key_ptr + key_head * WIDTH + e) * factor
        mean += _products(y, y_mean_key)
    tl.store(means_ptr + row, mean, mask=row < stop)
    number = counted.to(tl.int32)
    for at in range(start + TOKENS, stop + TOKENS, TOKENS):
        row = at + tl.arange(0, TOKENS)
        # Known before the rows are asked for: a step ahead of them.
        counted, soon_counted = soon_counted, _counts(row_max_ptr, row + TOKENS, stop)
        next_x = _load(rows_ptr, row, counted, d, width, step, STEP, 0.0)
        next_y = next_x
        if WIDTH > PART:
            next_y = _load(rows_ptr, row, counted, e, width, step, STEP, 0.0)
        xx = tl.dot(tl.trans(x), x, xx)
        mean = _products(next_x, x_mean_key)
        if WIDTH > PART:
            xy = tl.dot(tl.trans(x), y, xy)
            yy = tl.dot(tl.trans(y), y, yy)
            mean += _products(next_y, y_mean_key)
            y = next_y
        tl.store(means_ptr + row, mean, mask=row < stop)
        number += counted.to(tl.int32)
        x = next_x

    matrix_ptr = scatter_ptr + key_head * ((2 * (WIDTH // PART) - 1) * PART * PART)
    entries = d[:, None] * PART + d[None, :]
    trace = tl.sum(xx * tl.load(matrix_ptr + entries))
    if WIDTH > PART:
        matrix_ptr += PART * PART
        trace += tl.sum(xy * tl.load(matrix_ptr + entries))
        matrix_ptr += PART * PART
        trace += tl.sum(yy * tl.load(matrix_ptr + entries))
    trace = tl.where(trace < 0.0, 0.0, trace)  # what is not a number stays so
    share = factor * factor * trace / tl.maximum(tl.sum(number, 0), 1)
    for at in range(start, stop, TOKENS):
        row = at + tl.arange(0, TOKENS)
        m2 = tl.zeros([TOKENS], tl.float32) + share
        tl.store(row_max_ptr + M2 * plane + row, m2, mask=row < stop)


@triton.jit
def _counts(row_max_ptr, row, stop):
    """Which rows enter the vitals: those whose logits are finite, as each sees a key."""
    row_max = tl.load(row_max_ptr + row, mask=row < stop, other=float("inf"))
    return tl.abs(row_max) < float("inf")


@triton.jit
def _products(x, mean_key):
    """[TOKENS]: each row of x [TOKENS, PART] times the mean key."""
    return tl.sum(x.to(tl.float32) * mean_key[None, :], 1)
