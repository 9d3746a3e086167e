"""One program a head merges its chunks, or measures its rows, divides, and writes the vitals."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from scaledot.backends.cuda.launching import enter
from scaledot.backends.cuda.summary.places import place_of
from scaledot.backends.cuda.summary.rows import FIELDS, load_chunks, measure_rows, merged
from scaledot.backends.cuda.summary.squares import sum_squares, trusted
from scaledot.measure import COUNT_FIELDS, MADE_FIELDS


class Floats(NamedTuple):
    """Vitals of one head."""

    max_logit: Any
    logit_mean: Any
    logit_std: Any
    row_std: Any
    entropy: Any
    entropy_ratio: Any
    sum_p2: Any
    top_p: Any
    saturated: Any
    sink: Any
    off: Any
    q_rms: Any
    k_rms: Any
    passes: Any


class Counts(NamedTuple):
    """Of one head too."""

    rows: Any
    pairs: Any
    nonfinite: Any
    ratio_rows: Any
    q_entries: Any
    k_entries: Any


assert Floats._fields == MADE_FIELDS
assert Counts._fields == COUNT_FIELDS


@triton.jit(do_not_specialize=["heads_of_all"])
def heads_kernel(
    rows,
    query,
    key,
    sinks,
    key_squares_ptr,
    parts,
    floats_ptr,
    counts_ptr,
    heads_of_all,
    repeats,
    LANES: tl.constexpr,
    EACH: tl.constexpr,
    ROW_CHUNKS: tl.constexpr,
    QUERY_CHUNKS: tl.constexpr,
    KEY_CHUNKS: tl.constexpr,
    SQUARE_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    SOON: tl.constexpr,
):
    """floats_ptr, counts_ptr: [fields, entries, heads]; repeats: query heads of a key head. LANES:
    threads that measure rows, 0 where others have."""
    if SOON:
        enter(LAST=True)
    place = tl.program_id(0).to(tl.int64)  # entry * heads + head
    key_head = place // repeats
    told = None
    if key_squares_ptr is not None:  # read before the rows, needed after them
        offs_chunk = tl.arange(0, KEY_CHUNKS)
        squares_ptr = key_squares_ptr + key_head * parts.key_chunks + offs_chunk
        told = tl.load(squares_ptr, offs_chunk < parts.key_chunks, other=0.0)
    if LANES:
        head = measure_rows(rows, query, sinks, place, 1, LANES, EACH)
    else:
        offs_chunk = tl.arange(0, ROW_CHUNKS)
        chunks_ptr = parts.ptr + (place * parts.row_chunks + offs_chunk) * FIELDS
        head = merged(load_chunks(chunks_ptr, offs_chunk < parts.row_chunks))

    if rows.squares_ptr is None:
        pairs_ptr = parts.ptr + parts.row_programs * tl.cast(FIELDS, tl.int64)
        q_total, q_number = _sum_pairs(pairs_ptr, place, parts.query_chunks, QUERY_CHUNKS)
    else:
        q_total, q_number = head.squares, head.rows * query.width
        if not trusted(q_total):
            entry, h, chunk = place_of(place, query.heads, 1)
            q_total, q_number = sum_squares(
                query, rows, entry, h, chunk, 1, True, SQUARE_ROWS, WIDTH
            )
    if told is None:
        pairs_ptr = parts.ptr + parts.row_programs * tl.cast(FIELDS, tl.int64)
        pairs_ptr += parts.query_programs * tl.cast(2, tl.int64)
        k_total, k_number = _sum_pairs(pairs_ptr, key_head, parts.key_chunks, KEY_CHUNKS)
    else:
        k_total = tl.sum(told.to(tl.float64), 0)
        k_number = tl.cast(key.tokens, tl.float64) * key.width
        if not trusted(k_total):
            entry, group, chunk = place_of(key_head, key.heads, 1)
            k_total, k_number = sum_squares(
                key, rows, entry, group, chunk, 1, False, SQUARE_ROWS, WIDTH
            )

    divisor = tl.maximum(head.rows, 1.0)
    sum_p2 = (head.sum_p2 / divisor).to(floats_ptr.dtype.element_ty)
    floats = Floats(
        max_logit=head.top,
        logit_mean=head.mean,
        logit_std=tl.sqrt(head.m2 / tl.maximum(head.pairs, 1.0)),
        row_std=tl.sqrt(head.variance / divisor),
        entropy=head.entropy / divisor,
        entropy_ratio=head.ratio / tl.maximum(head.several, 1.0),
        sum_p2=sum_p2,
        top_p=head.top_p / divisor,
        saturated=head.saturated / divisor,
        sink=head.first_p / divisor,
        off=head.off / divisor,
        q_rms=tl.sqrt(q_total / tl.maximum(q_number, 1.0)),
        k_rms=tl.sqrt(k_total / tl.maximum(k_number, 1.0)),
        passes=tl.where(head.rows > 0.0, 1.0 - sum_p2, 0.0),
    )
    counts = Counts(
        rows=head.rows,
        pairs=head.pairs,
        nonfinite=head.nonfinite,
        ratio_rows=head.several,
        q_entries=q_number,
        k_entries=k_number,
    )
    field_step = tl.cast(heads_of_all, tl.int64)
    for field in tl.static_range(len(floats)):
        tl.store(floats_ptr + place + field * field_step, floats[field])
    for field in tl.static_range(len(counts)):
        tl.store(counts_ptr + place + field * field_step, counts[field].to(tl.int64))


@triton.jit
def _sum_pairs(pairs_ptr, head, chunks, CHUNKS: tl.constexpr):
    """(sum of squares, entries) of a head, its chunks together."""
    offs_chunk = tl.arange(0, CHUNKS)
    head_ptr = pairs_ptr + (head * chunks + offs_chunk) * 2
    mask = offs_chunk < chunks
    total = tl.sum(tl.load(head_ptr, mask, other=0.0), 0)
    return total, tl.sum(tl.load(head_ptr + 1, mask, other=0.0), 0)
