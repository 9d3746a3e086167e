"""From the numbers of each row to the vitals of each head, in two launches and without the host.

The first launch cuts the rows of each head into chunks and leaves a few numbers of each chunk
(rows.py); further programs of it sum the squares of query and key (squares.py). The second has one
program a head: it merges the chunks in their order, divides, and writes the vitals. Sums are
float64; no atomics, so the same rows give the same bits.

Where the forward kernel left the squares of the query's rows (`squares`), the query is not read,
and where it, the moments' kernels or `square_keys` left those of the keys (`key_squares`), neither
are the keys; in a head where their sum left float32, the second launch reads its entries after all.
Where both are known and a head's rows are few, its program of the second launch measures them, and
there is no first.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaledot.backends.cuda.arguments import heads_of, numbers_of
from scaledot.backends.cuda.replay import ONCE, Once
from scaledot.backends.cuda.statistics import PLANES
from scaledot.backends.cuda.summary.chunks import chunks_kernel
from scaledot.backends.cuda.summary.heads import heads_kernel
from scaledot.backends.cuda.summary.keys import square_keys as square_keys
from scaledot.backends.cuda.summary.places import MAX_CHUNKS, Parts, Tokens
from scaledot.backends.cuda.summary.rows import FIELDS, Rows
from scaledot.backends.inputs import Inputs
from scaledot.measure import COUNT_FIELDS, MADE_FIELDS

EACH = 4  # rows that a thread reads at a time
ROWS = 128 * EACH  # so a program of four warps
# Such tiles of one program: to gather what the threads know takes as long as to read one. But the
# multiprocessors of an H200 hold so many programs at once.
ROW_TILES, HELD = 2, 512
FEW_ROWS = 4096  # of a head: one program has measured them before two launches would have
ENTRIES = 4096  # of query or key that a program squares at a time: 32 a thread, without spills
MOST_SQUARED = 256  # rows of them
TILES = 4  # such tiles of one program: 32 KiB of bfloat16


def summarise(
    statistics: Tensor,
    inputs: Inputs,
    squares: Tensor | None = None,
    key_squares: Tensor | None = None,
    soon: bool = False,
) -> tuple[Tensor, Tensor]:
    """floats [F, E, H] and counts [C, E, H], in the order of MADE_FIELDS and COUNT_FIELDS.

    statistics [PLANES or more, B, H, Q]: see statistics.py; what follows those planes is not read.
    squares [B, H, Q]: the sum of squares of each query. key_squares: B G n numbers, sums of the
    squares of some keys of a head, of all its keys together; for keys without lengths that are not
    packed. E is B, or the number of packed sequences. soon: see `fill`.
    """
    floats, counts = new_vitals(inputs)
    fill(floats, counts, statistics, inputs, squares, key_squares=key_squares, soon=soon)
    return floats, counts


def new_vitals(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """What `fill` fills."""
    query, ends = inputs.query, inputs.cu_seqlens_q
    entries, heads, _, _ = query.shape
    if ends is not None:
        entries = ends.shape[0] - 1
    dtype, device = query.dtype, query.device
    dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return (
        torch.empty(len(MADE_FIELDS), entries, heads, dtype=dtype, device=device),
        torch.empty(len(COUNT_FIELDS), entries, heads, dtype=torch.int64, device=device),
    )


def fill(
    floats: Tensor,
    counts: Tensor,
    statistics: Tensor,
    inputs: Inputs,
    squares: Tensor | None = None,
    launches: Once = ONCE,
    key_squares: Tensor | None = None,
    soon: bool = False,
) -> None:
    """The launches of `summarise`. soon: they may be made while the one before them runs."""
    query, key, ends_q = inputs.query, inputs.key, inputs.cu_seqlens_q
    assert statistics.is_contiguous()
    assert statistics.shape[0] >= PLANES
    sequences = None if ends_q is None else ends_q.shape[0] - 1
    told = 0  # sums of a head's keys
    if key_squares is not None:
        assert ends_q is None
        assert inputs.key_lengths is None
        told = key_squares.numel() // (key.shape[0] * key.shape[1])
    cut = _cut(query.shape, key.shape, sequences, squares is None, told)
    if not cut.head_programs:
        return
    rows = Rows(statistics, squares, cut.plane)
    queries = _tokens(query, ends_q, None)
    keys = _tokens(key, inputs.cu_seqlens_k, inputs.key_lengths)
    room = launches.room(query, cut.numbers, torch.float64) if cut.chunk_programs else None
    both: dict[str, Any] = {
        "rows": rows,
        "query": queries,
        "key": keys,
        "sinks": numbers_of(inputs.sinks),
        "parts": Parts(room, *cut.parts),
        "SOON": soon,
    }
    second = {"key_squares_ptr": key_squares, "floats_ptr": floats, "counts_ptr": counts}
    if cut.chunk_programs:
        words = both | cut.for_chunks
        launches.launch(
            chunks_kernel, cut.chunk_programs, query, words, num_warps=4, launch_pdl=soon
        )
    words = both | second | cut.for_heads
    launches.launch(
        heads_kernel, cut.head_programs, query, words, num_warps=cut.head_warps, launch_pdl=soon
    )


def _tokens(tensor: Tensor, ends: Tensor | None, lengths: Tensor | None) -> Tokens:
    _, heads, tokens, width = tensor.shape
    return Tokens(*heads_of(tensor), ends, lengths, heads, tokens, width)


class Cut(NamedTuple):
    """How the work is shared out, as kernels take it."""

    chunk_programs: int  # 0: no first launch
    head_programs: int
    head_warps: int
    plane: int  # numbers of one plane
    numbers: int  # that the first launch leaves
    parts: tuple[int, ...]  # the fields of Parts after its pointer
    for_chunks: dict[str, int]
    for_heads: dict[str, int]


@functools.lru_cache(4096)
def _cut(query: torch.Size, key: torch.Size, sequences: int | None, read: bool, told: int) -> Cut:
    """sequences: packed ones. read: the entries of the query too. told: sums of a head's keys."""
    batch, heads, queries, width = query
    groups, keys = key[1:3]
    entries = batch if sequences is None else sequences
    width_block = _power_of_two(width)
    square_rows = min(max(ENTRIES // width_block, 1), MOST_SQUARED)
    sharing = sequences or 1  # one batch entry
    row_chunks = _chunks(queries, ROWS * ROW_TILES, sharing)
    if entries * heads * row_chunks < HELD:
        row_chunks = _chunks(queries, ROWS, sharing)
    query_chunks = _chunks(queries, square_rows * TILES, sharing) if read else 0
    key_chunks = _chunks(keys, square_rows * TILES, sharing)
    row_programs = entries * heads * row_chunks
    query_programs = entries * heads * query_chunks
    key_programs = 0 if told else entries * groups * key_chunks
    head_warps = 1
    if told and not read and queries <= FEW_ROWS:
        head_warps = min(max(_power_of_two(queries) // (2 * 32 * EACH), 4), 16)  # two tiles
        row_programs = 0
    return Cut(
        chunk_programs=row_programs + query_programs + key_programs,
        head_programs=entries * heads,
        head_warps=head_warps,
        plane=batch * heads * queries,
        numbers=row_programs * FIELDS.value + 2 * (query_programs + key_programs),
        parts=(row_chunks, query_chunks, told or key_chunks, row_programs, query_programs),
        for_chunks={"LANES": 128, "EACH": EACH, "SQUARE_ROWS": square_rows, "WIDTH": width_block},
        for_heads={
            "heads_of_all": entries * heads,
            "repeats": heads // max(groups, 1),
            "LANES": 0 if row_programs else 32 * head_warps,
            "EACH": EACH,
            "ROW_CHUNKS": _power_of_two(row_chunks),
            "QUERY_CHUNKS": _power_of_two(query_chunks),
            "KEY_CHUNKS": _power_of_two(told or key_chunks),
            "SQUARE_ROWS": max(square_rows // 4, 1),
            "WIDTH": width_block,
        },
    )


def _power_of_two(size: int) -> int:
    """The smallest that holds so many."""
    return 1 << max(size - 1, 0).bit_length()


def _chunks(tokens: int, at_a_time: int, sequences: int) -> int:
    """How many programs share a head; a sequence longer than the others gets some to spare."""
    even = -(-tokens // (at_a_time * sequences))
    return min(max(even if sequences == 1 else 4 * even, 1), MAX_CHUNKS)
