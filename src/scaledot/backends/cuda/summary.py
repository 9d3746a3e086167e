"""From the numbers of each row to the vitals of each head, in two launches and without the host.

The first launch cuts the rows of each head into chunks and leaves a few numbers of each chunk: sums
over its counted rows, and the moments of its logits, merged row by row by Chan's rule

    n = n_a + n_b        delta = mean_b - mean_a
    mean = mean_a + delta n_b / n        m2 = m2_a + m2_b + delta^2 n_a n_b / n

so that nothing cancels, however far the logits are from zero. Further programs of the same launch
sum the squares of query and key. The second launch has one program a head: it merges the chunks in
their order, divides, and writes the vitals. Sums are float64; no atomics, so the same rows give the
same bits.

Where the forward kernel left the squares of the query's rows (`squares`), the query is not read; in
a head where their sum left float32, the second launch reads its entries after all. Where Gram
matrices gave the moments and squares of whole heads (`head_moments`), only the rows'
numbers are read. Those moments leave out the rows that are not finite themselves: in a head where
some row does not count, the second launch reads the entries of query and key itself, and where
another row is broken too (finite entries, a score that overflowed) the moments are NaN.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from scaledot.backends.cuda.arguments import strides
from scaledot.backends.cuda.launching import launch
from scaledot.backends.cuda.statistics import PLANES
from scaledot.backends.inputs import Inputs
from scaledot.measure import COUNT_FIELDS, FLOAT_FIELDS, SATURATED_ABOVE
from scaledot.problem import Settings

ROWS = 256  # rows that a program measures at a time: two a thread
ENTRIES = 4096  # of query or key that a program squares at a time: 32 a thread, without spills
TILES = 4  # such tiles of one program: 32 KiB of bfloat16
MAX_CHUNKS = 256  # of one head; a longer head's programs take turns

SATURATED = tl.constexpr(SATURATED_ABOVE)
LEAST_SQUARES = tl.constexpr(1e-30)  # a float32 sum below this may have lost entries


class Chunk(NamedTuple):
    """What is known of a chunk: in a program one vector each, in memory one float64 each."""

    top: tl.tensor  # the largest logit
    pairs: tl.tensor
    mean: tl.tensor  # of the logits of all pairs
    m2: tl.tensor  # their squared deviations from it, summed
    variance: tl.tensor  # from here on sums over the counted rows
    entropy: tl.tensor
    ratio: tl.tensor
    sum_p2: tl.tensor
    top_p: tl.tensor
    saturated: tl.tensor
    first_p: tl.tensor
    off: tl.tensor
    rows: tl.tensor
    nonfinite: tl.tensor
    several: tl.tensor  # rows of more than one outcome: they have an entropy ratio
    squares: tl.tensor  # of the query's entries, where the forward kernel left them


FIELDS = tl.constexpr(len(Chunk._fields))


def summarise(
    statistics: Tensor,
    inputs: Inputs,
    settings: Settings,
    head_moments: Tensor | None,
    squares: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """floats [F, E, H] and counts [C, E, H], in the order of FLOAT_FIELDS and COUNT_FIELDS.

    statistics [PLANES, B, H, Q]: see statistics.py; E is B, or the number of packed sequences.
    head_moments [6, B, H], of heads without packing or lengths: the mean of z over all pairs, their
    m2 about it, the sum over rows of the row's variance, the sums of squares of query and key, and
    the number of rows that these are of. squares [B, H, Q]: the sum of squares of each query.
    """
    query, key = inputs.query, inputs.key
    batch, heads = query.shape[:2]
    packed = inputs.cu_seqlens_q is not None
    given = head_moments is not None
    assert statistics.is_contiguous()
    assert statistics.shape[0] == (PLANES - 2 if given else PLANES)
    assert not given or (not packed and inputs.key_lengths is None)
    entries = batch if inputs.cu_seqlens_q is None else inputs.cu_seqlens_q.shape[0] - 1
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    floats = query.new_empty((len(FLOAT_FIELDS), entries, heads), dtype=dtype)
    counts = query.new_empty((len(COUNT_FIELDS), entries, heads), dtype=torch.int64)
    if not counts.numel():
        return floats, counts
    read = not given and squares is None  # the query
    cut = _cut(query.shape, key.shape, entries if packed else None, given, read)
    parts = query.new_empty(cut.parts, dtype=torch.float64)
    end = cut.row_programs * FIELDS.value
    shared: dict[str, Any] = {
        "statistics_ptr": statistics,
        "row_parts_ptr": parts,
        "query_parts_ptr": parts[end:],
        "key_parts_ptr": parts[end + 2 * cut.query_programs :],
        "query_ptr": query,
        "key_ptr": key,
        "squares_ptr": squares,
        "cu_seqlens_q_ptr": inputs.cu_seqlens_q,
        **cut.shared,
        **strides("q", query, "bhmd"),
        **strides("k", key, "bhnd"),
    }
    measured: dict[str, Any] = {
        "sinks_ptr": inputs.sinks,
        "cu_seqlens_k_ptr": inputs.cu_seqlens_k,
        "key_lengths_ptr": inputs.key_lengths,
        **cut.measured,
        **strides("sink_", inputs.sinks, "bh"),
    }
    combined: dict[str, Any] = {
        "head_moments_ptr": head_moments,
        "floats_ptr": floats,
        "counts_ptr": counts,
        **cut.combined,
    }
    programs = cut.row_programs + cut.query_programs + cut.key_programs
    launch(_measure_chunks, programs, query, shared | measured, num_warps=4)
    launch(_combine_chunks, entries * heads, query, shared | combined, num_warps=1)
    return floats, counts


class Cut(NamedTuple):
    """How the work is shared out, as kernels take it."""

    row_programs: int
    query_programs: int
    key_programs: int
    parts: int  # numbers that the first launch leaves
    shared: dict[str, Any]
    measured: dict[str, Any]
    combined: dict[str, Any]


@functools.lru_cache(4096)
def _cut(query: torch.Size, key: torch.Size, sequences: int | None, given: bool, read: bool) -> Cut:
    """sequences: packed ones. given: moments of whole heads; read: the entries of the query too."""
    batch, heads, queries, width = query
    groups, keys = key[1:3]
    entries = batch if sequences is None else sequences
    width_block = _power_of_two(width)
    square_rows = min(max(ENTRIES // width_block, 1), ROWS)
    sharing = sequences or 1  # one batch entry
    row_chunks = _chunks(queries, ROWS, sharing)
    query_chunks = _chunks(queries, square_rows * TILES, sharing) if read else 0
    key_chunks = 0 if given else _chunks(keys, square_rows * TILES, sharing)
    row_programs = entries * heads * row_chunks
    query_programs = entries * heads * query_chunks
    key_programs = entries * groups * key_chunks
    # Starts are even, so that every pointer is a multiple of 16 bytes.
    assert FIELDS.value % 2 == 0
    return Cut(
        row_programs,
        query_programs,
        key_programs,
        row_programs * FIELDS.value + 2 * (query_programs + key_programs),
        {
            "batch": batch,
            "heads": heads,
            "groups": groups,
            "queries": queries,
            "keys": keys,
            "width": width,
            "row_chunks": row_chunks,
            "query_chunks": query_chunks,
            "key_chunks": key_chunks,
            "MOMENTS_GIVEN": given,
            "WIDTH": width_block,
        },
        {
            "row_programs": row_programs,
            "query_programs": query_programs,
            "SQUARE_ROWS": square_rows,
            "ROWS": ROWS,
        },
        {
            "entries": entries,
            "SQUARE_ROWS": max(square_rows // 4, 1),
            "ROW_CHUNKS": _power_of_two(row_chunks),
            "QUERY_CHUNKS": _power_of_two(query_chunks),
            "KEY_CHUNKS": _power_of_two(key_chunks),
        },
    )


def _power_of_two(size: int) -> int:
    """The smallest that holds so many."""
    return 1 << max(size - 1, 0).bit_length()


def _chunks(tokens: int, at_a_time: int, sequences: int) -> int:
    """How many programs share a head; a sequence longer than the others gets some to spare."""
    even = -(-tokens // (at_a_time * sequences))
    return min(max(even if sequences == 1 else 4 * even, 1), MAX_CHUNKS)


@triton.jit
def _measure_chunks(
    statistics_ptr,
    row_parts_ptr,
    query_parts_ptr,
    key_parts_ptr,
    query_ptr,
    key_ptr,
    squares_ptr,
    sinks_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    key_lengths_ptr,
    batch,
    heads,
    groups,
    queries,
    keys,
    width,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_qd,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_kd,
    row_chunks,
    query_chunks,
    key_chunks,
    row_programs,
    query_programs,
    stride_sink_b,
    stride_sink_h,
    MOMENTS_GIVEN: tl.constexpr,
    SQUARE_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program a chunk: of the rows' numbers first, then of query entries, then of key entries.

    Chunk c of n takes the tiles c, c + n, c + 2n ... of its head, or of its head's sequence.
    """
    program = tl.program_id(0).to(tl.int64)
    plane = tl.cast(batch, tl.int64) * heads * queries
    if MOMENTS_GIVEN or program < row_programs:
        entry, head, chunk = _place(program, heads, row_chunks)
        start, stop = _span(cu_seqlens_q_ptr, None, entry, queries)
        first_row = _first_row(entry, head, heads, queries, cu_seqlens_q_ptr)
        sink = None
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + entry * stride_sink_b + head * stride_sink_h)
        state = _no_rows(ROWS)
        for row in range(start + chunk * ROWS, stop, row_chunks * ROWS):
            rows = row + tl.arange(0, ROWS)
            squares = None
            if squares_ptr is not None:
                squares = squares_ptr + first_row + rows
            rows_ptr = statistics_ptr + first_row + rows
            state = _add_rows(state, rows_ptr, squares, plane, rows < stop, sink, MOMENTS_GIVEN)
        _store_chunk(row_parts_ptr + program * FIELDS, state)
    elif program < row_programs + query_programs:
        program -= row_programs
        entry, head, chunk = _place(program, heads, query_chunks)
        start, stop = _span(cu_seqlens_q_ptr, None, entry, queries)
        total, number = _sum_squares(
            query_ptr + _batch(entry, cu_seqlens_q_ptr) * stride_qb + head * stride_qh,
            statistics_ptr + _first_row(entry, head, heads, queries, cu_seqlens_q_ptr),
            plane,
            start + chunk * SQUARE_ROWS,
            stop,
            query_chunks * SQUARE_ROWS,
            width,
            stride_qm,
            stride_qd,
            True,
            SQUARE_ROWS,
            WIDTH,
        )
        tl.store(query_parts_ptr + program * 2, total)
        tl.store(query_parts_ptr + program * 2 + 1, number)
    else:
        program -= row_programs + query_programs
        entry, group, chunk = _place(program, groups, key_chunks)
        start, stop = _span(cu_seqlens_k_ptr, key_lengths_ptr, entry, keys)
        total, number = _sum_squares(
            key_ptr + _batch(entry, cu_seqlens_q_ptr) * stride_kb + group * stride_kh,
            statistics_ptr,
            plane,
            start + chunk * SQUARE_ROWS,
            stop,
            key_chunks * SQUARE_ROWS,
            width,
            stride_kn,
            stride_kd,
            False,
            SQUARE_ROWS,
            WIDTH,
        )
        tl.store(key_parts_ptr + program * 2, total)
        tl.store(key_parts_ptr + program * 2 + 1, number)


@triton.jit
def _place(program, heads, chunks):
    """(entry, head, chunk) of a program; neighbours read neighbouring rows."""
    of_head = program // chunks
    return of_head // heads, of_head % heads, program % chunks


@triton.jit
def _batch(entry, cu_seqlens_q_ptr):
    """Packed sequences share the one batch entry."""
    return entry * 0 if cu_seqlens_q_ptr is not None else entry


@triton.jit
def _first_row(entry, head, heads, queries, cu_seqlens_q_ptr):
    """Where a head's rows begin in a plane."""
    return (_batch(entry, cu_seqlens_q_ptr) * heads + head) * queries


@triton.jit
def _span(cu_seqlens_ptr, lengths_ptr, entry, tokens):
    """The entry's tokens [start, stop), int64."""
    start = entry * 0
    stop = start + tokens
    if cu_seqlens_ptr is not None:
        start = tl.load(cu_seqlens_ptr + entry).to(tl.int64)
        stop = tl.minimum(tl.load(cu_seqlens_ptr + entry + 1).to(tl.int64), stop)
    if lengths_ptr is not None:
        stop = tl.minimum(tl.load(lengths_ptr + entry).to(tl.int64), stop)
    return start, stop


@triton.jit
def _no_rows(ROWS: tl.constexpr):
    """The state before any row has come."""
    zero = tl.zeros([ROWS], tl.float64)
    top = zero - float("inf")
    return Chunk(
        top,
        zero,
        zero,
        zero,
        zero,
        zero,
        zero,
        zero,
        zero,
        zero,
        zero,
        zero,
        zero,
        zero,
        zero,
        zero,
    )


@triton.jit
def _add_rows(state, rows_ptr, squares_ptr, plane, mask, sink, MOMENTS_GIVEN: tl.constexpr):
    """Row i of the tile joins the i-th running state."""
    row_max = tl.load(rows_ptr, mask, other=0.0)
    row_lse = tl.load(rows_ptr + plane, mask, other=0.0)
    row_entropy = tl.load(rows_ptr + 2 * plane, mask, other=0.0)
    row_top_p = tl.load(rows_ptr + 3 * plane, mask, other=0.0)
    row_sum_p2 = tl.load(rows_ptr + 4 * plane, mask, other=0.0)
    row_first_p = tl.load(rows_ptr + 5 * plane, mask, other=0.0)
    count = tl.load(rows_ptr + 6 * plane, mask, other=0.0)
    counted = _counted(row_max, count)

    outcomes = count + 1 if sink is not None else count
    several = counted & (outcomes > 1)
    ratio = row_entropy / tl.log(tl.maximum(outcomes, 2.0))
    off = state.off
    if sink is not None:
        off += tl.where(counted, tl.exp(sink - row_lse), 0.0)

    squares = state.squares
    if squares_ptr is not None:
        squares += tl.where(counted, tl.load(squares_ptr, mask, other=0.0), 0.0)

    number = tl.where(counted, count, 0.0).to(tl.float64)
    pairs = state.pairs + number
    mean = state.mean
    m2 = state.m2
    variance = state.variance
    if not MOMENTS_GIVEN:
        row_mean = tl.load(rows_ptr + 7 * plane, mask, other=0.0)
        row_m2 = tl.load(rows_ptr + 8 * plane, mask, other=0.0)
        row_mean = tl.where(counted, row_mean, 0.0).to(tl.float64)
        row_m2 = tl.where(counted, row_m2, 0.0).to(tl.float64)
        share = number / tl.maximum(pairs, 1.0)
        delta = row_mean - mean
        mean += delta * share
        m2 += row_m2 + delta * delta * state.pairs * share
        variance += row_m2 / tl.maximum(number, 1.0)

    return Chunk(
        tl.maximum(state.top, tl.where(counted, row_max, -float("inf")).to(tl.float64)),
        pairs,
        mean,
        m2,
        variance,
        state.entropy + tl.where(counted, row_entropy, 0.0),
        state.ratio + tl.where(several, ratio, 0.0),
        state.sum_p2 + tl.where(counted, row_sum_p2, 0.0),
        state.top_p + tl.where(counted, row_top_p, 0.0),
        state.saturated + (counted & (row_top_p > SATURATED)),
        state.first_p + tl.where(counted, row_first_p, 0.0),
        off,
        state.rows + counted,
        state.nonfinite + ((row_max != row_max) | (row_max == float("inf"))),
        state.several + several,
        squares,
    )


@triton.jit
def _counted(row_max, count):
    """Which rows enter the vitals: they see a key, and every logit is finite."""
    return (count > 0) & (tl.abs(row_max) < float("inf"))


@triton.jit
def _merge_all(n, mean, m2):
    """(n, mean, m2) of all parts of a vector together: Chan's rule, the common mean found first."""
    total = tl.sum(n, 0)
    center = tl.sum(n * mean, 0) / tl.maximum(total, 1.0)
    delta = mean - center
    return total, center, tl.sum(m2 + n * delta * delta, 0)


@triton.jit
def _store_chunk(chunk_ptr, state):
    """FIELDS numbers of a chunk, in the order of the state."""
    tl.store(chunk_ptr, tl.max(state.top, 0))
    pairs, mean, m2 = _merge_all(state.pairs, state.mean, state.m2)
    tl.store(chunk_ptr + 1, pairs)
    tl.store(chunk_ptr + 2, mean)
    tl.store(chunk_ptr + 3, m2)
    for field in tl.static_range(4, FIELDS):
        tl.store(chunk_ptr + field, tl.sum(state[field], 0))


@triton.jit
def _sum_squares(
    entries_ptr,
    rows_ptr,
    plane,
    first,
    stop,
    step,
    width,
    stride_row,
    stride_d,
    COUNTED_ONLY: tl.constexpr,
    SQUARE_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Sum of the squares of finite entries, and how many there are; of the counted rows, or all.

    Where the sum leaves float32, some entry is not finite, or some square was too large or too
    small: then the same entries are taken again, one by one and in float64.
    """
    squares = tl.zeros([SQUARE_ROWS, WIDTH], tl.float32)
    if entries_ptr.dtype.element_ty == tl.float64:
        squares = squares.to(tl.float64)
    inside = tl.zeros([SQUARE_ROWS], tl.float64)
    for row in range(first, stop, step):
        rows = row + tl.arange(0, SQUARE_ROWS)
        mask = _rows_to_read(rows, stop, rows_ptr, plane, COUNTED_ONLY)
        entries = _load_rows(entries_ptr, rows, mask, width, stride_row, stride_d, WIDTH)
        entries = entries.to(squares.dtype)
        squares += entries * entries
        inside += mask
    total = tl.sum(tl.sum(squares, 1), 0).to(tl.float64)
    number = tl.sum(inside, 0) * width
    if not _trusted(total):
        total = tl.zeros([], tl.float64)
        number = tl.zeros([], tl.float64)
        for row in range(first, stop, step):
            rows = row + tl.arange(0, SQUARE_ROWS)
            mask = _rows_to_read(rows, stop, rows_ptr, plane, COUNTED_ONLY)
            entries = _load_rows(entries_ptr, rows, mask, width, stride_row, stride_d, WIDTH)
            usable = mask[:, None] & (tl.arange(0, WIDTH) < width)[None, :]
            usable &= tl.abs(entries.to(squares.dtype)) < float("inf")
            exact = tl.where(usable, entries, 0.0).to(tl.float64)
            total += tl.sum(tl.sum(exact * exact, 1), 0)
            number += tl.sum(tl.sum(usable.to(tl.int32), 1), 0)
    return total, number


@triton.jit
def _rows_to_read(rows, stop, rows_ptr, plane, COUNTED_ONLY: tl.constexpr):
    mask = rows < stop
    if COUNTED_ONLY:
        row_max = tl.load(rows_ptr + rows, mask, other=0.0)
        mask &= _counted(row_max, tl.load(rows_ptr + 6 * plane + rows, mask, other=0.0))
    return mask


@triton.jit
def _load_rows(entries_ptr, rows, mask, width, stride_row, stride_d, WIDTH: tl.constexpr):
    """[rows, WIDTH], zeros outside of the mask and of the width."""
    offs_d = tl.arange(0, WIDTH)
    offsets = rows[:, None] * stride_row + offs_d[None, :] * tl.cast(stride_d, tl.int64)
    return tl.load(entries_ptr + offsets, mask[:, None] & (offs_d < width)[None, :], other=0.0)


@triton.jit
def _trusted(total):
    """Whether a sum of squares in float32 has neither overflowed nor lost small entries."""
    return (total >= LEAST_SQUARES) & (total < float("inf"))


@triton.jit
def _combine_chunks(
    statistics_ptr,
    row_parts_ptr,
    query_parts_ptr,
    key_parts_ptr,
    query_ptr,
    key_ptr,
    squares_ptr,
    cu_seqlens_q_ptr,
    head_moments_ptr,
    floats_ptr,
    counts_ptr,
    batch,
    heads,
    groups,
    queries,
    keys,
    width,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_qd,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_kd,
    row_chunks,
    query_chunks,
    key_chunks,
    entries,
    MOMENTS_GIVEN: tl.constexpr,
    ROW_CHUNKS: tl.constexpr,
    QUERY_CHUNKS: tl.constexpr,
    KEY_CHUNKS: tl.constexpr,
    SQUARE_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program a head: its chunks together, divided, in the order of the fields."""
    place = tl.program_id(0).to(tl.int64)  # entry * heads + head
    entry, head = place // heads, place % heads
    group = head // (heads // groups)
    offs_chunk = tl.arange(0, ROW_CHUNKS)
    chunk_mask = offs_chunk < row_chunks
    chunks_ptr = row_parts_ptr + (place * row_chunks + offs_chunk) * FIELDS
    top = tl.max(tl.load(chunks_ptr, chunk_mask, other=-float("inf")), 0)
    pairs, mean, m2 = _merge_all(
        tl.load(chunks_ptr + 1, chunk_mask, other=0.0),
        tl.load(chunks_ptr + 2, chunk_mask, other=0.0),
        tl.load(chunks_ptr + 3, chunk_mask, other=0.0),
    )
    variance = _sum_field(chunks_ptr + 4, chunk_mask)
    rows = _sum_field(chunks_ptr + 12, chunk_mask)
    nonfinite = _sum_field(chunks_ptr + 13, chunk_mask)
    several = _sum_field(chunks_ptr + 14, chunk_mask)

    if MOMENTS_GIVEN:
        fields = tl.cast(batch, tl.int64) * heads
        moments_ptr = head_moments_ptr + place
        rows_in_them = tl.load(moments_ptr + 5 * fields).to(tl.float64)
        unknown = tl.where(rows_in_them != rows, float("nan"), 0.0)
        mean = tl.load(moments_ptr).to(tl.float64) + unknown
        m2 = tl.load(moments_ptr + fields).to(tl.float64) + unknown
        variance = tl.load(moments_ptr + 2 * fields).to(tl.float64) + unknown
        q_total = tl.load(moments_ptr + 3 * fields).to(tl.float64)
        k_total = tl.load(moments_ptr + 4 * fields).to(tl.float64)
        q_number = rows * width
        k_number = (rows * 0 + keys) * width
        whole = rows == queries
        q_trusted = whole & _trusted(q_total)
        if not (whole & _trusted(k_total)):
            first = place * 0
            k_total, k_number = _sum_squares(
                key_ptr + entry * stride_kb + group * stride_kh,
                statistics_ptr,
                fields,
                first,
                first + keys,
                SQUARE_ROWS,
                width,
                stride_kn,
                stride_kd,
                False,
                SQUARE_ROWS,
                WIDTH,
            )
    else:
        k_total, k_number = _sum_pairs(
            key_parts_ptr, entry * groups + group, key_chunks, KEY_CHUNKS
        )
        if squares_ptr is not None:
            q_total = _sum_field(chunks_ptr + 15, chunk_mask)
            q_number = rows * width
            q_trusted = _trusted(q_total)
        else:
            q_total, q_number = _sum_pairs(query_parts_ptr, place, query_chunks, QUERY_CHUNKS)
            q_trusted = True
    # The first question is answered when the kernel is compiled, the second when it runs.
    if MOMENTS_GIVEN or squares_ptr is not None:  # noqa: SIM102
        if not q_trusted:
            first, stop = _span(cu_seqlens_q_ptr, None, entry, queries)
            q_total, q_number = _sum_squares(
                query_ptr + _batch(entry, cu_seqlens_q_ptr) * stride_qb + head * stride_qh,
                statistics_ptr + _first_row(entry, head, heads, queries, cu_seqlens_q_ptr),
                tl.cast(batch, tl.int64) * heads * queries,
                first,
                stop,
                SQUARE_ROWS,
                width,
                stride_qm,
                stride_qd,
                True,
                SQUARE_ROWS,
                WIDTH,
            )

    heads_of_all = tl.cast(entries, tl.int64) * heads
    out_ptr = floats_ptr + place
    divisor = tl.maximum(rows, 1.0)
    pair_divisor = tl.maximum(pairs, 1.0)
    no_rows = rows == 0  # a head without rows reports zeros, whatever the moments say
    tl.store(out_ptr, top)
    tl.store(out_ptr + heads_of_all, tl.where(no_rows, 0.0, mean))
    tl.store(out_ptr + 2 * heads_of_all, tl.where(no_rows, 0.0, tl.sqrt(m2 / pair_divisor)))
    tl.store(out_ptr + 3 * heads_of_all, tl.where(no_rows, 0.0, tl.sqrt(variance / divisor)))
    tl.store(out_ptr + 4 * heads_of_all, _sum_field(chunks_ptr + 5, chunk_mask) / divisor)
    ratio = _sum_field(chunks_ptr + 6, chunk_mask) / tl.maximum(several, 1.0)
    tl.store(out_ptr + 5 * heads_of_all, ratio)
    for field in tl.static_range(6, 11):  # sum_p2, top_p, saturated, sink, off
        mean_of_rows = _sum_field(chunks_ptr + field + 1, chunk_mask) / divisor
        tl.store(out_ptr + field * heads_of_all, mean_of_rows)
    tl.store(out_ptr + 11 * heads_of_all, tl.sqrt(q_total / tl.maximum(q_number, 1.0)))
    tl.store(out_ptr + 12 * heads_of_all, tl.sqrt(k_total / tl.maximum(k_number, 1.0)))

    out_ptr = counts_ptr + place
    tl.store(out_ptr, rows.to(tl.int64))
    tl.store(out_ptr + heads_of_all, pairs.to(tl.int64))
    tl.store(out_ptr + 2 * heads_of_all, nonfinite.to(tl.int64))
    tl.store(out_ptr + 3 * heads_of_all, several.to(tl.int64))
    tl.store(out_ptr + 4 * heads_of_all, q_number.to(tl.int64))
    tl.store(out_ptr + 5 * heads_of_all, k_number.to(tl.int64))


@triton.jit
def _sum_field(field_ptr, mask):
    return tl.sum(tl.load(field_ptr, mask, other=0.0), 0)


@triton.jit
def _sum_pairs(parts_ptr, head, chunks, CHUNKS: tl.constexpr):
    """(sum of squares, entries) of a head, its chunks together."""
    offs_chunk = tl.arange(0, CHUNKS)
    head_ptr = parts_ptr + (head * chunks + offs_chunk) * 2
    mask = offs_chunk < chunks
    return _sum_field(head_ptr, mask), _sum_field(head_ptr + 1, mask)
