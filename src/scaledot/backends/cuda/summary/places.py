"""Where the tokens of a head lie, and what the first launch leaves for the second.

An entry of the vitals is a batch entry, or a packed sequence of the one that there is.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

MAX_CHUNKS = 256  # of one head; a longer head's programs take turns


class Tokens(NamedTuple):
    """Query or key [B, heads, tokens, width], laid out as in Heads, and the tokens that count."""

    ptr: Any
    stride_b: Any
    stride_h: Any
    stride_row: Any
    stride_column: Any
    cu_seqlens_ptr: Any  # None: not packed
    lengths_ptr: Any  # None: every token counts
    heads: Any
    tokens: Any
    width: Any


class Parts(NamedTuple):
    """One array of float64: a Chunk of each chunk of rows, then two numbers of each chunk of query
    entries, then of key entries: the sum of their squares, and how many they are."""

    ptr: Any
    row_chunks: Any  # of one head
    query_chunks: Any  # 0: nothing of the query
    key_chunks: Any  # or sums that another launch left
    row_programs: Any  # chunks of all heads
    query_programs: Any


@triton.jit
def place_of(program, heads, chunks):
    """(entry, head, chunk) of a program; neighbours read neighbouring tokens."""
    of_head = program // chunks
    return of_head // heads, of_head % heads, program % chunks


@triton.jit
def batch_of(tokens, entry):
    """Packed sequences share the one batch entry."""
    return entry * 0 if tokens.cu_seqlens_ptr is not None else entry


@triton.jit
def span_of(tokens, entry):
    """The entry's tokens [start, stop), int64."""
    start = entry * 0
    stop = start + tokens.tokens
    if tokens.cu_seqlens_ptr is not None:
        begin = tl.load(tokens.cu_seqlens_ptr + entry).to(tl.int64)
        start = tl.where(entry > 0, tl.minimum(tl.maximum(begin, 0), stop), start)
        end = tl.load(tokens.cu_seqlens_ptr + entry + 1).to(tl.int64)
        stop = tl.maximum(tl.minimum(end, stop), start)
    if tokens.lengths_ptr is not None:
        stop = tl.minimum(tl.load(tokens.lengths_ptr + entry).to(tl.int64), stop)
    return start, stop


@triton.jit
def first_of(tokens, entry, head):
    """Where a head's tokens begin in a tensor [B, heads, tokens] without gaps."""
    return (batch_of(tokens, entry) * tokens.heads + head) * tokens.tokens
