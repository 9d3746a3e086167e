"""What the kernels share: who sees whom, what a logit is, and how a tile enters a row's sums.

Logits live in base 2 (x = logit * log2 e), so that e^logit is one exp2. A row's state over the keys
seen so far, with the pivot m = max x (the learned sink is the first thing a row sees) and
u = x - m <= 0:

    l = sum 2^u        w = sum 2^u u        p2 = sum 2^(2u)        acc = sum 2^u v
    s1 = sum (z - pivot)        s2 = sum (z - pivot)^2        n keys

z is the logit before any cap; without cap and sink z = x and its pivot is m as well. A tile that
raises the pivot by -d = m' - m moves the sums exactly, with alpha = 2^d:

    l' = alpha l        w' = alpha w + alpha d l        p2' = alpha^2 p2
    s2' = s2 + d (2 s1 + n d)        s1' = s1 + n d

and at the end lse = m + log2 l, entropy = ln2 (log2 l - w / l), sum p^2 = p2 / l^2. The pivot
starts at the lowest finite number instead of -inf, so no inf - inf arises in rows that saw nothing;
where something is multiplied by the first d (about -1e38) it is a sum of nothing, 0.

A key of row i is visible by position when low_i <= key < high_i (`row_bounds`); a mask tensor hides
more. `keys` and `rows` are indices into the whole tensors, also of packed sequences. Optional
things are None and cost nothing where they are.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)  # e^x = 2^(x * LOG2E)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST_32 = tl.constexpr(-3.4028234663852886e38)
LOWEST_64 = tl.constexpr(-1.7976931348623157e308)
LOWEST_BF16 = tl.constexpr(-3.3895313892515355e38)
LOWEST_16 = tl.constexpr(-65504.0)
RESIDUAL_LIMIT = tl.constexpr(65536.0)  # a float32 of this size is off by 2^-8 at most
NO = tl.constexpr(False)
PHILOX_ROUNDS = tl.constexpr(7)  # the fewest that pass BigCrush (Salmon et al. 2011, table 2)


class Matrix(NamedTuple):
    """One head's matrix in memory; the pointer is None where a call has no such tensor."""

    ptr: Any
    stride_row: Any
    stride_column: Any


class Window(NamedTuple):
    """Keys before and after the diagonal that a row may see; None: all."""

    left: Any
    right: Any


class Dropout(NamedTuple):
    """What is dropped at which rate (None: nothing), and the factor of what is kept."""

    seed_ptr: Any
    rate: Any
    head: Any  # b * H + h
    factor: Any


class Sequence(NamedTuple):
    """Rows [row, row_end) see keys of [key, key_end); the diagonal passes (i, i + diagonal)."""

    row: Any
    row_end: Any
    key: Any
    key_end: Any
    diagonal: Any


class Tiles(NamedTuple):
    """Tiles start at begin, begin + BLOCK, ...; those of [full, full_end) hide no pair."""

    begin: Any
    full: Any
    full_end: Any
    end: Any


class Sums(NamedTuple):
    """The state of a block of rows; fields that a call does not use stay as they start."""

    row_max: Any  # m
    row_sum: Any  # l
    weighted: Any  # w
    squares: Any  # p2
    key_max: Any  # the largest x of a key; apart from m where there is a sink
    count: Any  # n
    z_max: Any  # the pivot of s1 and s2 where it is not m: under a cap, beside a sink
    z_sum: Any  # s1
    z_squares: Any  # s2


class Closed(NamedTuple):
    """What a row's sums say; in base 2 where the name says so."""

    empty: Any  # the row saw nothing: its output is 0
    divisor: Any  # out = acc / divisor
    lse2: Any


@triton.jit
def number(value, dtype: tl.constexpr):
    """A number of the call in the compute type.

    Triton passes floats as float32, so float64 calls bring their numbers as tensors.
    """
    return tl.load(value) if dtype == tl.float64 else tl.zeros([], dtype) + value


@triton.jit
def lowest(dtype: tl.constexpr):
    """The lowest finite number of a float type."""
    result: tl.constexpr = (
        LOWEST_64
        if dtype == tl.float64
        else (
            LOWEST_16
            if dtype == tl.float16
            else (LOWEST_BF16 if dtype == tl.bfloat16 else LOWEST_32)
        )
    )
    return result


@triton.jit
def load_rows(
    matrix,
    rows,
    end,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    EDGE: tl.constexpr,
):
    """[rows, BLOCK] of a matrix [tokens, WIDTH]: 0 past its width and, at an EDGE, past `end`."""
    columns = tl.arange(0, BLOCK)
    ptrs = (
        matrix.ptr
        + rows.to(tl.int64)[:, None] * matrix.stride_row
        + columns.to(tl.int64)[None, :] * matrix.stride_column
    )
    if EDGE:
        inside = (rows < end)[:, None] & (columns < WIDTH)[None, :]
        tile = tl.load(ptrs, mask=inside, other=0.0)
    elif WIDTH != BLOCK:
        tile = tl.load(ptrs, mask=(columns < WIDTH)[None, :], other=0.0)
    else:
        tile = tl.load(ptrs)
    return tile


# --- who sees whom -------------------------------------------------------------------------------


@triton.jit
def find_sequence(cu_seqlens_ptr, sequences, block, BLOCK: tl.constexpr):
    """The packed sequence that a block of tokens belongs to, and the block's first token.

    Sequence s gets the blocks from floor(cu[s] / BLOCK) + s on: enough for its tokens, whatever the
    lengths, so the host can size the grid (`packed_blocks`) without reading them. The tokens after
    the last sequence count as one more sequence.
    """
    low = 0
    high = sequences
    while low < high:  # the last s whose first block is not after `block`
        middle = (low + high + 1) // 2
        first = tl.load(cu_seqlens_ptr + middle).to(tl.int32) // BLOCK + middle
        if first <= block:
            low = middle
        else:
            high = middle - 1
    start = tl.load(cu_seqlens_ptr + low).to(tl.int32)
    return low, start + (block - start // BLOCK - low) * BLOCK


def packed_blocks(tokens: int, sequences: int, block: int) -> int:
    """How many blocks `find_sequence` may be asked for."""
    return tokens // block + sequences + 1


@triton.jit
def _packed_span(cu_seqlens_ptr, index, sequences, tokens):
    start = tl.load(cu_seqlens_ptr + index).to(tl.int32)
    end = tl.load(cu_seqlens_ptr + tl.minimum(index + 1, sequences)).to(tl.int32)
    end = tl.where(index < sequences, end, tokens)
    start = tl.minimum(tl.maximum(start, 0), tokens)
    return start, tl.minimum(tl.maximum(end, start), tokens)


@triton.jit
def sequence_of(
    index,
    batch,
    queries,
    keys,
    key_lengths_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    sequences,
    BOTTOM_RIGHT: tl.constexpr,
):
    """The `index`-th sequence of a packed batch, else the batch entry; nothing lies outside it."""
    if cu_seqlens_q_ptr is not None:
        row, row_end = _packed_span(cu_seqlens_q_ptr, index, sequences, queries)
        key, key_end = _packed_span(cu_seqlens_k_ptr, index, sequences, keys)
        key_end = tl.where(index < sequences, key_end, key)  # tokens of no sequence see nothing
    else:
        row = tl.full([], 0, tl.int32)
        row_end = row + queries
        key = tl.full([], 0, tl.int32)
        key_end = key + keys
        if key_lengths_ptr is not None:
            length = tl.load(key_lengths_ptr + batch).to(tl.int32)
            key_end = tl.minimum(tl.maximum(length, 0), keys)
    diagonal = key_end - row_end if BOTTOM_RIGHT else key - row
    return Sequence(row, row_end, key, key_end, diagonal)


@triton.jit
def row_bounds(rows, seq, left, right):
    """low, high: row i sees the keys [low_i, high_i) by position; neither falls with i."""
    low = seq.key
    high = seq.key_end
    if left is not None:
        low = tl.minimum(tl.maximum(rows + (seq.diagonal - left), seq.key), seq.key_end)
    if right is not None:
        high = tl.minimum(tl.maximum(rows + (seq.diagonal + right + 1), seq.key), seq.key_end)
    return low, high


@triton.jit
def key_tiles(row, row_end, seq, left, right, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """The tiles of keys that the rows [row, row_end) may see. MASKED: every tile hides some."""
    low, high = row_bounds(row, seq, left, right)
    last_low, end = row_bounds(row_end - 1, seq, left, right)
    begin = seq.key + (low - seq.key) // BLOCK * BLOCK
    end = tl.where(low < end, end, begin)  # no tile where no key is
    if MASKED:
        full = begin
        full_end = begin
    else:
        full = begin + tl.cdiv(last_low - begin, BLOCK) * BLOCK
        full_end = begin + tl.maximum(high - begin, 0) // BLOCK * BLOCK
        full_end = tl.maximum(full, full_end)
    return Tiles(begin, full, full_end, end)


@triton.jit
def row_tiles(key, key_end, seq, left, right, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """The tiles of rows that may see some of the keys [key, key_end)."""
    begin = seq.row
    end = seq.row_end
    full = seq.row
    full_end = seq.row_end
    if right is not None:
        begin = tl.minimum(tl.maximum(key - seq.diagonal - right, begin), end)
        full = tl.maximum(key_end - 1 - seq.diagonal - right, full)
    if left is not None:
        end = tl.maximum(tl.minimum(key_end - seq.diagonal + left, end), begin)
        full_end = tl.minimum(key - seq.diagonal + left + 1, full_end)
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
def visible(rows, keys, seq, left, right):
    """[M, N]: which pairs position allows; rows and keys past their ends are hidden."""
    return visible_pairs(rows[:, None], keys[None, :], seq, left, right)


@triton.jit
def visible_pairs(i, j, seq, left, right):
    """The same of rows i and keys j that broadcast, whichever of them comes first."""
    return (i < seq.row_end) & reachable_pairs(i, j, seq, left, right)


@triton.jit
def reachable_pairs(i, j, seq, left, right):
    """The same for whom rows past the end do not matter: one comparison a pair less."""
    low, high = row_bounds(i, seq, left, right)
    seen = j < high
    if left is not None:
        seen = seen & (j >= low)
    return seen


@triton.jit
def visible_counts(rows, start, seq, left, right, BLOCK: tl.constexpr):
    """[M]: how many keys of the tile [start, start + BLOCK) position allows each row."""
    low, high = row_bounds(rows, seq, left, right)
    count = tl.minimum(high, start + BLOCK) - tl.maximum(low, start)
    return tl.maximum(count, 0) + tl.zeros_like(rows)


@triton.jit
def load_mask(mask_ptr, stride_row, stride_key, rows, keys, seen):
    """A tile of a mask tensor (bool masks come as uint8), never read where `seen` is false."""
    return load_mask_pairs(mask_ptr, stride_row, stride_key, rows[:, None], keys[None, :], seen)


@triton.jit
def load_mask_pairs(mask_ptr, stride_row, stride_key, i, j, seen):
    offsets = i.to(tl.int64) * stride_row + j.to(tl.int64) * stride_key
    return tl.load(mask_ptr + offsets, mask=seen, other=0)


@triton.jit
def split_mask(mask, seen, dtype: tl.constexpr):
    """(bias in base 2, visible, read) of a loaded mask and the pairs that position allows.

    A bias of -inf hides. One at or below half of its type's lowest number is not read by the
    statistics; times log2 e it could leave float32, so it stops at the lowest number instead.
    """
    if mask.dtype == tl.uint8:
        seen = seen & (mask != 0)
        bias = tl.zeros(mask.shape, dtype)
        read = seen
    else:
        half: tl.constexpr = lowest(mask.dtype) / 2
        hidden = mask.to(dtype) == float("-inf")
        seen = seen & (hidden == 0)
        read = seen & ((mask.to(dtype) <= half) == 0)  # NaN is read, and shows
        bias = mask.to(dtype) * LOG2E
        bias = tl.where(bias < lowest(dtype), lowest(dtype), bias)
    return bias, seen, read


# --- logits --------------------------------------------------------------------------------------


@triton.jit
def row_scale(
    scale,
    head_scale_ptr,
    rows,
    seq,
    left,
    right,
    counts_ptr,
    LOG_N: tl.constexpr,
    dtype: tl.constexpr,
):
    """What turns a row's raw scores into logits of base 2: one number, or [M] where LOG_N.

    head_scale_ptr: at this head's own factor, or None. counts_ptr: at this head's numbers of
    visible keys [Q], or None where position alone says them. ln(n) * log2 e is log2(n).
    """
    factor = number(scale, dtype)
    if head_scale_ptr is not None:
        factor = factor * tl.load(head_scale_ptr).to(dtype)
    if LOG_N:
        if counts_ptr is not None:
            count = tl.load(counts_ptr + rows, mask=rows < seq.row_end, other=1)
        else:
            low, high = row_bounds(rows, seq, left, right)
            count = tl.maximum(high - low, 0) + tl.zeros_like(rows)
        factor = factor * tl.log2(tl.maximum(count, 1).to(dtype))
    else:
        factor = factor * LOG2E
    return factor


@triton.jit
def tanh(x, PRECISE: tl.constexpr):
    """1 - 2 / (e^2x + 1); where that would cancel, and PRECISE asks, Lambert's fraction."""
    exponential = tl.exp2(x * (2.0 * LOG2E))
    result = 1.0 - 2.0 / (exponential + 1.0)
    if PRECISE:
        square = x * x  # below 1/2 the fraction's relative error is 2e-16
        top = x * (135135.0 + square * (17325.0 + square * (378.0 + square)))
        bottom = 135135.0 + square * (62370.0 + square * (3150.0 + square * 28.0))
        result = tl.where(tl.abs(x) < 0.5, top / bottom, result)
    return result


@triton.jit
def capped(z, softcap, PRECISE: tl.constexpr):
    """cap * tanh(z / cap) for logits of base 2, and the derivative."""
    bent = tanh(z * (LN2 / softcap), PRECISE)
    return bent * (softcap * LOG2E), 1.0 - bent * bent


# --- sums of a row -------------------------------------------------------------------------------


@triton.jit
def load_sink(sink_ptr, dtype: tl.constexpr):
    """The head's learned sink in base 2; +inf would quietly take everything, so it is NaN."""
    sink = tl.load(sink_ptr).to(dtype)
    return tl.where(sink == float("inf"), float("nan"), sink) * LOG2E


@triton.jit
def start_sums(sink2, BLOCK: tl.constexpr, dtype: tl.constexpr):
    """A row before its first key; sink2 None: no sink."""
    floor = tl.full([BLOCK], lowest(dtype), dtype)
    nothing = tl.zeros([BLOCK], dtype)
    row_max = floor
    row_sum = nothing
    squares = nothing
    if sink2 is not None:
        present = sink2 > lowest(dtype)  # not -inf (nobody falls into it), not NaN (see close)
        row_max = tl.where(present, nothing + sink2, floor)
        row_sum = tl.where(present, nothing + 1.0, nothing)
        squares = row_sum
    hidden = tl.full([BLOCK], float("-inf"), dtype)
    count = tl.zeros([BLOCK], tl.int32)
    return Sums(row_max, row_sum, nothing, squares, hidden, count, floor, nothing, nothing)


@triton.jit
def _add_moments(sums, pivot, old_pivot, deviation, number_of_keys, dtype: tl.constexpr):
    """s1, s2 about the new pivot; deviation [M, N] is 0 where a pair is not read."""
    d = tl.maximum(old_pivot - pivot, lowest(dtype))
    n = sums.count.to(dtype)
    z_squares = sums.z_squares + d * (2.0 * sums.z_sum + n * d)
    z_squares += tl.sum(deviation * deviation, 1)
    z_sum = sums.z_sum + n * d + tl.sum(deviation, 1)
    return z_sum, z_squares, sums.count + number_of_keys


@triton.jit
def _add_tile(
    sums,
    tile_max,
    row_max,
    u,
    z,
    read,
    read_counts,
    STATISTICS: tl.constexpr,
    MOMENTS: tl.constexpr,
    dtype: tl.constexpr,
):
    """u = x - row_max [M, N] into the sums; returns them, p = 2^u and alpha."""
    p = tl.exp2(u)
    d = tl.maximum(sums.row_max - row_max, lowest(dtype))
    alpha = tl.exp2(d)
    row_sum = sums.row_sum * alpha + tl.sum(p, 1)
    weighted = sums.weighted
    squares = sums.squares
    count = sums.count
    z_max = sums.z_max
    z_sum = sums.z_sum
    z_squares = sums.z_squares
    if STATISTICS:
        number_of_keys = u.shape[1]
        if read is not None:
            u = tl.where(read, u, 0.0)
            if read_counts is not None:
                number_of_keys = read_counts
            else:
                number_of_keys = tl.sum(read.to(tl.int32), 1)
        # alpha d is 0 where d is about -1e38; d l first could be -inf
        weighted = alpha * weighted + (alpha * d) * sums.row_sum + tl.sum(p * u, 1)
        squares = alpha * alpha * squares + tl.sum(p * p, 1)
        if z is not None:  # z has a pivot of its own, and shows infinities that a cap hides
            if read is not None:
                z_tile_max = tl.max(tl.where(read, z, float("-inf")), 1)
            else:
                z_tile_max = tl.max(z, 1)
            z_max = tl.maximum(sums.z_max, z_tile_max)
            deviation = z - z_max[:, None]
            if read is not None:
                deviation = tl.where(read, deviation, 0.0)
            z_sum, z_squares, count = _add_moments(
                sums, z_max, sums.z_max, deviation, number_of_keys, dtype
            )
        elif MOMENTS:
            z_sum, z_squares, count = _add_moments(
                sums, row_max, sums.row_max, u, number_of_keys, dtype
            )
        else:
            count = count + number_of_keys
    key_max = tl.maximum(sums.key_max, tile_max)
    new = Sums(row_max, row_sum, weighted, squares, key_max, count, z_max, z_sum, z_squares)
    return new, p, alpha


@triton.jit
def add_scores(
    sums,
    scores,
    scale,
    STATISTICS: tl.constexpr,
    MOMENTS: tl.constexpr,
    dtype: tl.constexpr,
    SINK: tl.constexpr = NO,
):
    """A tile that hides nothing, of raw scores whose scale is not negative: one FMA an argument.

    scale: a number or [M, 1]. m is scale * max s rounded, u the exact scale * s - m rounded once:
    every u of a row is off by the same residual of m, which cancels in the softmax. Where m is
    large the residual is too (2^(u) would overflow from 2^31 on), so rows past RESIDUAL_LIMIT must
    go through `add_arguments` instead.
    """
    tile_max = tl.max(scores, 1, keep_dims=True) * scale
    tile_max = tl.reshape(tile_max, [scores.shape[0]])
    row_max = tl.maximum(sums.row_max, tile_max)
    u = scores * scale - row_max[:, None]
    z = None
    if MOMENTS and SINK:
        z = scores * scale
    return _add_tile(sums, tile_max, row_max, u, z, None, None, STATISTICS, MOMENTS, dtype)


@triton.jit
def add_arguments(
    sums,
    x,
    z,
    read,
    STATISTICS: tl.constexpr,
    MOMENTS: tl.constexpr,
    dtype: tl.constexpr,
    read_counts=None,
    SINK: tl.constexpr = NO,
):
    """A tile of arguments of base 2; returns the new sums, p = 2^(x - m) and alpha.

    x [M, N]: -inf where hidden. z: the logits before the cap, + bias; None: there is no cap, z = x.
    read: pairs the statistics read; None: all. read_counts [M]: how many of a row's, where that is
    known without looking (`visible_counts`). SINK: the rows have a learned sink, which can be
    too far above the keys to be a pivot for their moments.
    """
    tile_max = tl.max(x, 1)
    row_max = tl.maximum(sums.row_max, tile_max)
    u = x - row_max[:, None]
    if MOMENTS and SINK and z is None:
        z = x
    return _add_tile(sums, tile_max, row_max, u, z, read, read_counts, STATISTICS, MOMENTS, dtype)


@triton.jit
def close_sums(sums, sink2):
    """divisor and lse of each row; a sink that is no number shows in every row that sees a key."""
    if sink2 is not None:
        # a sum that is NaN is of a row that saw NaN
        empty = (sums.key_max == float("-inf")) & (sums.row_sum == sums.row_sum)
        row_sum = tl.where(sink2 == sink2, sums.row_sum, sink2)
    else:
        row_sum = sums.row_sum
        empty = row_sum == 0.0
    divisor = tl.where(empty, 1.0, row_sum)
    lse2 = tl.where(empty, float("-inf"), sums.row_max + tl.log2(divisor))
    return Closed(empty, divisor, lse2)


@triton.jit
def _finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def _store_plane(ptr, index: tl.constexpr, plane, offsets, values, blank, empty, broken, inside):
    values = tl.where(empty, blank, values)
    values = tl.where(broken, float("nan"), values)
    tl.store(ptr + index * plane + offsets, values, mask=inside)


@triton.jit
def store_statistics(
    ptr,
    plane,
    offsets,
    inside,
    sums,
    closed,
    first,
    SINK: tl.constexpr,
    CAPPED: tl.constexpr,
    MOMENTS: tl.constexpr,
    dtype: tl.constexpr,
):
    """The planes of statistics.py.

    ptr: the statistics; plane: elements of one plane; offsets [M] of the rows in it; inside [M]:
    rows to write. first [M]: x of the sequence's first key, -inf where it is hidden.
    """
    count = sums.count
    n = tl.maximum(count, 1).to(dtype)
    empty = count == 0  # nothing that the statistics read
    log2_sum = tl.log2(closed.divisor)
    entropy = tl.maximum((log2_sum - sums.weighted / closed.divisor) * LN2, 0.0)
    key_max = sums.row_max
    if SINK:
        key_max = sums.key_max
    top_p = tl.exp2(key_max - sums.row_max) / closed.divisor
    first_p = tl.exp2(first - sums.row_max) / closed.divisor
    sum_p2 = sums.squares / (closed.divisor * closed.divisor)
    finite = _finite(closed.divisor) & _finite(sums.weighted) & _finite(key_max)
    max_logit = key_max
    if CAPPED:
        finite = finite & _finite(sums.z_max) & _finite(sums.z_sum)
        max_logit = sums.z_max
    broken = (finite == 0) & (empty == 0)
    lse = closed.lse2 * LN2
    _store_plane(ptr, 0, plane, offsets, max_logit * LN2, float("-inf"), empty, broken, inside)
    _store_plane(ptr, 1, plane, offsets, lse, float("-inf"), empty, broken, inside)
    _store_plane(ptr, 2, plane, offsets, entropy, 0.0, empty, broken, inside)
    _store_plane(ptr, 3, plane, offsets, top_p, 0.0, empty, broken, inside)
    _store_plane(ptr, 4, plane, offsets, sum_p2, 0.0, empty, broken, inside)
    _store_plane(ptr, 5, plane, offsets, first_p, 0.0, empty, broken, inside)
    tl.store(ptr + 6 * plane + offsets, count.to(dtype), mask=inside)
    if MOMENTS:
        shift = sums.z_sum / n
        m2 = tl.maximum(sums.z_squares - shift * sums.z_sum, 0.0) * (LN2 * LN2)
        # squares past the type's range: infinite, not NaN, for the row is sound
        m2 = tl.where(_finite(sums.z_squares), m2, float("inf"))
        pivot = tl.where(sums.z_max == lowest(dtype), sums.row_max, sums.z_max)
        mean = (pivot + shift) * LN2
        _store_plane(ptr, 7, plane, offsets, mean, 0.0, empty, broken, inside)
        _store_plane(ptr, 8, plane, offsets, m2, 0.0, empty, broken, inside)


# --- dropout -------------------------------------------------------------------------------------


@triton.jit
def keeps(seed_ptr, rate, head, rows, keys):
    """[M, N] bool: which pairs dropout keeps; the same for a pair in every kernel and tile size.

    head: b * H + h. What is kept counts 1 / (1 - rate) times.
    """
    return keeps_pairs(seed_ptr, rate, head, rows[:, None], keys[None, :])


@triton.jit
def keeps_pairs(seed_ptr, rate, head, i, j):
    seed = tl.load(seed_ptr)
    place = tl.zeros_like(i + j)
    bits, _, _, _ = tl.philox(
        seed, place + j, place + i, place + tl.cast(head, tl.int32), place, PHILOX_ROUNDS
    )
    return tl.uint_to_uniform_float(bits) >= rate
