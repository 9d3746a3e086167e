"""Who sees whom by position: sequences, the reach of rows and keys, and the tiles in reach.

A key of row i is visible by position when low_i <= key < high_i (`row_bounds`); a mask tensor hides
more (logits.py). Keys and rows are indices into the whole tensors, also of packed sequences.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from scaledot.backends.cuda.arguments import Call

NO = tl.constexpr(False)


class Sequence(NamedTuple):
    """Rows [row, row_end) see keys of [key, key_end); the diagonal passes (i, i + diagonal)."""

    row: Any
    row_end: Any
    key: Any
    key_end: Any
    diagonal: Any


class Place(NamedTuple):
    """A head of a batch entry, and a sequence in it: where a program works."""

    b: Any
    h: Any
    seq: Sequence


class Tiles(NamedTuple):
    """Tiles start at begin, begin + BLOCK, ...; those of [full, full_end) hide no pair."""

    begin: Any
    full: Any
    full_end: Any
    end: Any


# --- sequences -----------------------------------------------------------------------------------


def blocks_of(call: Call, tokens: int, block: int) -> int:
    """How many blocks of rows or keys the programs of a head may be asked for."""
    if call.cu_seqlens_q_ptr is None:
        return -(-tokens // block)
    return tokens // block + call.sequences + 1


@triton.jit
def find_rows(call, b, block, BLOCK: tl.constexpr):
    """The first row of a block, and the sequence that it belongs to."""
    index, row = 0, block * BLOCK
    if call.cu_seqlens_q_ptr is not None:
        index, row = _find_sequence(
            call.cu_seqlens_q_ptr, call.sequences, call.queries, block, BLOCK
        )
    return row, sequence_of(call, index, b)


@triton.jit
def find_keys(call, b, block, BLOCK: tl.constexpr):
    """The first key of a block, its sequence, and where the keys that it owns end.

    Keys past a length, or of no sequence, have an owner too.
    """
    index, key = 0, block * BLOCK
    if call.cu_seqlens_k_ptr is not None:
        index, key = _find_sequence(call.cu_seqlens_k_ptr, call.sequences, call.keys, block, BLOCK)
    seq = sequence_of(call, index, b)
    end = tl.cast(call.keys, tl.int32)
    if call.cu_seqlens_k_ptr is not None:
        end = tl.where(index < call.sequences, seq.key_end, end)
    return key, seq, end


@triton.jit
def _find_sequence(cu_seqlens_ptr, sequences, tokens, block, BLOCK: tl.constexpr):
    """The packed sequence that a block of tokens belongs to, and the block's first token.

    Sequence s gets the blocks from floor(cu[s] / BLOCK) + s on: enough for its tokens, whatever the
    lengths, so the host can size the grid (`blocks_of`) without reading them. The tokens after
    the last sequence count as one more sequence.
    """
    low = 0
    high = sequences
    while low < high:  # the last s whose first block is not after `block`
        middle = (low + high + 1) // 2
        first = _end(cu_seqlens_ptr, middle, tokens) // BLOCK + middle
        if first <= block:
            low = middle
        else:
            high = middle - 1
    start = _begin(cu_seqlens_ptr, low, tokens)
    return low, start + (block - start // BLOCK - low) * BLOCK


@triton.jit
def sequence_of(call, index, b):
    """The `index`-th sequence of a packed batch, else batch entry b; nothing lies outside it."""
    if call.cu_seqlens_q_ptr is not None:
        sequences = call.sequences
        row, row_end = _packed_span(call.cu_seqlens_q_ptr, index, sequences, call.queries)
        key, key_end = _packed_span(call.cu_seqlens_k_ptr, index, sequences, call.keys)
        key_end = tl.where(index < sequences, key_end, key)  # tokens of no sequence see nothing
    else:
        row = tl.full([], 0, tl.int32)
        row_end = row + call.queries
        key = tl.full([], 0, tl.int32)
        key_end = key + call.keys
        if call.key_lengths_ptr is not None:
            length = tl.load(call.key_lengths_ptr + b)
            key_end = tl.minimum(tl.maximum(length, 0), call.keys).to(tl.int32)
    diagonal = key_end - row_end if call.BOTTOM_RIGHT else key - row
    return Sequence(row, row_end, key, key_end, diagonal)


@triton.jit
def _packed_span(cu_seqlens_ptr, index, sequences, tokens):
    start = _begin(cu_seqlens_ptr, index, tokens)
    end = _end(cu_seqlens_ptr, tl.minimum(index + 1, sequences), tokens)
    end = tl.where(index < sequences, end, tl.cast(tokens, tl.int32))
    return start, tl.maximum(end, start)


@triton.jit
def _begin(cu_seqlens_ptr, index, tokens):
    """The first sequence begins with the first token."""
    return tl.where(index > 0, _end(cu_seqlens_ptr, index, tokens), 0)


@triton.jit
def _end(cu_seqlens_ptr, index, tokens):
    """Within the tensor, whatever stands there."""
    end = tl.load(cu_seqlens_ptr + index)
    return tl.minimum(tl.maximum(end, 0), tokens).to(tl.int32)


# --- tiles in reach ------------------------------------------------------------------------------


@triton.jit
def row_bounds(rows, seq, window):
    """low, high: row i sees the keys [low_i, high_i) by position; neither falls with i."""
    low = seq.key
    high = seq.key_end
    if window.left is not None:
        low = tl.minimum(tl.maximum(rows + (seq.diagonal - window.left), seq.key), seq.key_end)
    if window.right is not None:
        high = rows + (seq.diagonal + window.right + 1)
        high = tl.minimum(tl.maximum(high, seq.key), seq.key_end)
    return low, high


@triton.jit
def key_tiles(
    row,
    row_end,
    seq,
    window,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_AFTER: tl.constexpr = NO,
):
    """The tiles of keys that the rows [row, row_end) may see. MASKED: every tile hides some.

    ONE_AFTER: a row that sees a key sees one past the tiles that hide nothing.
    """
    low, high = row_bounds(row, seq, window)
    last_low, end = row_bounds(row_end - 1, seq, window)
    begin = seq.key + (low - seq.key) // BLOCK * BLOCK
    end = tl.where(low < end, end, begin)  # no tile where no key is
    if MASKED:
        full = begin
        full_end = begin
    else:
        full = begin + tl.cdiv(last_low - begin, BLOCK) * BLOCK
        if ONE_AFTER:
            high -= 1
        full_end = begin + tl.maximum(high - begin, 0) // BLOCK * BLOCK
        full_end = tl.maximum(full, full_end)
    return Tiles(begin, full, full_end, end)


@triton.jit
def row_tiles(key, key_end, seq, window, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """The tiles of rows that may see some of the keys [key, key_end)."""
    begin = seq.row
    end = seq.row_end
    full = seq.row
    full_end = seq.row_end
    if window.right is not None:
        begin = tl.minimum(tl.maximum(key - seq.diagonal - window.right, begin), end)
        full = tl.maximum(key_end - 1 - seq.diagonal - window.right, full)
    if window.left is not None:
        end = tl.maximum(tl.minimum(key_end - seq.diagonal + window.left, end), begin)
        full_end = tl.minimum(key - seq.diagonal + window.left + 1, full_end)
    first = seq.row + (begin - seq.row) // BLOCK * BLOCK
    end = tl.where(begin < end, end, first)  # no tile where no row is
    begin = first
    if MASKED:
        full = begin
        full_end = begin
    else:
        full = begin + tl.cdiv(tl.maximum(full - begin, 0), BLOCK) * BLOCK
        full_end = begin + tl.maximum(full_end - begin, 0) // BLOCK * BLOCK
        full_end = tl.maximum(full, full_end)
    return Tiles(begin, full, full_end, end)


@triton.jit
def span_of(tiles, part: tl.constexpr):
    """[begin, end) of the tiles that hide nothing (part 0), of those after (1) and before (2)."""
    if part == 0:
        begin, end = tiles.full, tiles.full_end
    elif part == 1:
        begin, end = tiles.full_end, tiles.end
    else:
        begin, end = tiles.begin, tl.minimum(tiles.full, tiles.end)
    return begin, end


# --- pairs ---------------------------------------------------------------------------------------


@triton.jit
def reachable(i, j, seq, window):
    """Which pairs position allows, of rows i and keys j that broadcast, whichever comes first.

    Rows past their end count as reaching: one comparison a pair less, for whom they do not matter.
    """
    low, high = row_bounds(i, seq, window)
    seen = j < high
    if window.left is not None:
        seen = seen & (j >= low)
    return seen


@triton.jit
def visible(i, j, seq, window):
    """The same; rows past their end see nothing."""
    return (i < seq.row_end) & reachable(i, j, seq, window)


@triton.jit
def visible_counts(rows, start, seq, window, BLOCK: tl.constexpr):
    """[M]: how many keys of the tile [start, start + BLOCK) position allows each row."""
    low, high = row_bounds(rows, seq, window)
    count = tl.minimum(high, start + BLOCK) - tl.maximum(low, start)
    return tl.maximum(count, 0) + tl.zeros_like(rows)
