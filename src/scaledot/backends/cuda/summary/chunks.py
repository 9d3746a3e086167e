"""The first launch: one program a chunk."""

import triton
import triton.language as tl

from scaledot.backends.cuda.launching import enter
from scaledot.backends.cuda.summary.places import place_of
from scaledot.backends.cuda.summary.rows import FIELDS, measure_rows, store_chunk
from scaledot.backends.cuda.summary.squares import sum_squares


@triton.jit
def chunks_kernel(
    rows,
    query,
    key,
    sinks,
    parts,
    LANES: tl.constexpr,
    EACH: tl.constexpr,
    SQUARE_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    SOON: tl.constexpr,
):
    """First the chunks of the rows' numbers, then of query entries, then of key entries."""
    if SOON:
        enter(LAST=False)
    program = tl.program_id(0).to(tl.int64)
    pair = program - parts.row_programs
    pair_ptr = parts.ptr + parts.row_programs * tl.cast(FIELDS, tl.int64) + pair * 2
    if pair < 0:
        measured = measure_rows(rows, query, sinks, program, parts.row_chunks, LANES, EACH)
        store_chunk(parts.ptr + program * FIELDS, measured)
    elif pair < parts.query_programs:
        entry, head, chunk = place_of(pair, query.heads, parts.query_chunks)
        total, number = sum_squares(
            query, rows, entry, head, chunk, parts.query_chunks, True, SQUARE_ROWS, WIDTH
        )
        tl.store(pair_ptr, total)
        tl.store(pair_ptr + 1, number)
    else:
        pair -= parts.query_programs
        entry, group, chunk = place_of(pair, key.heads, parts.key_chunks)
        total, number = sum_squares(
            key, rows, entry, group, chunk, parts.key_chunks, False, SQUARE_ROWS, WIDTH
        )
        tl.store(pair_ptr, total)
        tl.store(pair_ptr + 1, number)
