"""How a tile enters the sums of its rows, and what the sums say at the end.

A row's state over the keys seen so far, in logits x of base 2, with the pivot m = max x (the
learned sink is the first thing a row sees) and u = x - m <= 0:

    l = sum 2^u        w = sum 2^u u        p2 = sum 2^(2u)        acc = sum 2^u v
    s1 = sum (z - pivot)        s2 = sum (z - pivot)^2        n keys

z is the logit before any cap; without cap and sink z = x and its pivot is m as well. A tile that
raises the pivot by -d = m' - m moves the sums exactly, with alpha = 2^d:

    l' = alpha l        w' = alpha w + alpha d l        p2' = alpha^2 p2
    s2' = s2 + d (2 s1 + n d)        s1' = s1 + n d

and at the end lse = m + log2 l, entropy = ln2 (log2 l - w / l), sum p^2 = p2 / l^2. The pivot
starts at the lowest finite number instead of -inf, so no inf - inf arises in rows that saw nothing;
where something is multiplied by the first d (about -1e38) it is a sum of nothing, 0.

Nothing needs m to be the maximum: any pivot near the row's logits gives the same. So a row that has
seen some keys may keep its pivot for the rest of them (`add_steady`), and then a tile needs no
maximum before its exponentials and no sum has to follow. 2^u may pass 1 then: float32 has room for
that, and so has bfloat16, but not float16. Rows that outgrow it are done again (`join_steady`).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from scaledot.backends.cuda.logits import LN2, LOG2E, entry, lowest, number

RESIDUAL_LIMIT = tl.constexpr(65536.0)  # a float32 of this size is off by 2^-8 at most
ROOM = tl.constexpr(2.0**60)  # for l about a pivot that stays: l^2 and p2 are within float32
FAR_BELOW = tl.constexpr(-65536.0)  # 2^u is 0 there, and u times that too
NO = tl.constexpr(False)


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


class Steady(NamedTuple):
    """Sums of tiles about a pivot that stays, [M, 4] each: see `_by_thread`."""

    row_sum: Any
    weighted: Any
    squares: Any
    largest: Any  # 2^u, as the integer of the same bits
    z_sum: Any
    z_squares: Any


class Closed(NamedTuple):
    """What a row's sums say; in base 2 where the name says so."""

    empty: Any  # the row saw nothing: its output is 0
    divisor: Any  # out = acc / divisor
    lse2: Any


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
def set_pivots(sums, scores, scale, seen, SINK: tl.constexpr, dtype: tl.constexpr):
    """`start_sums` with the pivots that a first tile of raw scores suggests; it joins no sum yet.

    scale: a number or [M, 1]. seen [M, N]: which pairs are not hidden.
    """
    tile_max = tl.max(tl.where(seen, scores * scale, float("-inf")), 1)
    row_max = tl.maximum(sums.row_max, tile_max)
    row_sum = sums.row_sum
    weighted = sums.weighted
    squares = sums.squares
    z_max = sums.z_max
    if SINK:  # its own part follows the pivot, and the moments have theirs among the keys
        d = tl.maximum(sums.row_max - row_max, lowest(dtype))
        alpha = tl.exp2(d)
        row_sum = alpha * row_sum
        weighted = d * row_sum
        squares = alpha * alpha * squares
        z_max = tl.maximum(z_max, tile_max)
    return Sums(
        row_max,
        row_sum,
        weighted,
        squares,
        tl.maximum(sums.key_max, tile_max),
        sums.count,
        z_max,
        sums.z_sum,
        sums.z_squares,
    )


@triton.jit
def start_steady(BLOCK: tl.constexpr, dtype: tl.constexpr):
    nothing = tl.zeros([BLOCK, 4], dtype)
    least = tl.zeros([BLOCK, 4], tl.int32)  # the bits of 0.0
    return Steady(nothing, nothing, nothing, least, nothing, nothing)


@triton.jit
def add_steady(
    steady,
    sums,
    scores,
    scale,
    seen,
    STATISTICS: tl.constexpr,
    MOMENTS: tl.constexpr,
    SINK: tl.constexpr,
):
    """A tile of raw scores about the pivots that `sums` has; and p = 2^u.

    scale: a number or [M, 1]. seen [M, N]: which pairs are not hidden; None: all.
    """
    u = scores * scale - sums.row_max[:, None]
    if seen is not None:
        u = tl.where(seen, u, FAR_BELOW)
    p = tl.exp2(u)
    z = u
    if STATISTICS and MOMENTS:
        if SINK:
            z = scores * scale - sums.z_max[:, None]
        if seen is not None:
            z = tl.where(seen, z, 0.0)
    # A tile's own sums first: a long row's are not one long chain of roundings.
    new = _add_scores(None, _by_thread(u), _by_thread(p), _by_thread(z), STATISTICS, MOMENTS)
    steady = Steady(
        steady.row_sum + new.row_sum,
        steady.weighted + new.weighted,
        steady.squares + new.squares,
        tl.maximum(steady.largest, new.largest),
        steady.z_sum + new.z_sum,
        steady.z_squares + new.z_squares,
    )
    return steady, p


@triton.jit
def _by_thread(x):
    """[M, N] to [M, 4, N / 4].

    A product of matrices leaves eight neighbouring columns of a row in four threads, two in each.
    So sums over all but the 4 stay within a thread, and the four meet once, at the end.
    """
    rows: tl.constexpr = x.shape[0]
    columns: tl.constexpr = x.shape[1]
    x = tl.permute(tl.reshape(x, [rows, columns // 8, 4, 2]), (0, 2, 1, 3))
    return tl.reshape(x, [rows, 4, columns // 4])


@triton.jit
def _add_scores(sums, u, p, z, STATISTICS: tl.constexpr, MOMENTS: tl.constexpr):
    """u, p and z [M, 4, n] join the sums (None: there are none yet), each score one sum after the
    other: what was just read for one is at hand for the next."""
    if u.shape[2] > 1:
        u0, u1 = _halves(u)
        p0, p1 = _halves(p)
        z0, z1 = _halves(z)
        sums = _add_scores(sums, u0, p0, z0, STATISTICS, MOMENTS)
        return _add_scores(sums, u1, p1, z1, STATISTICS, MOMENTS)
    else:
        rows: tl.constexpr = u.shape[0]
        u, p, z = tl.reshape(u, [rows, 4]), tl.reshape(p, [rows, 4]), tl.reshape(z, [rows, 4])
        # p is not negative, so the integers are ordered as the numbers are, and of integers a
        # Hopper GPU finds the largest of three in one instruction, of floats only that of two.
        bits = p.to(tl.int32, bitcast=True)
        if sums is None:
            return Steady(p, p * u, p * p, bits, z, z * z)
        else:
            row_sum = sums.row_sum + p
            squares = sums.squares
            largest = sums.largest
            weighted = sums.weighted
            z_sum = sums.z_sum
            z_squares = sums.z_squares
            if STATISTICS:
                squares = squares + p * p
                largest = tl.maximum(largest, bits)
                weighted = weighted + p * u
                if MOMENTS:
                    z_sum = z_sum + z
                    z_squares = z_squares + z * z
            return Steady(row_sum, weighted, squares, largest, z_sum, z_squares)


@triton.jit
def _halves(x):
    """[M, 4, n] -> the first and the last [M, 4, n / 2]."""
    n: tl.constexpr = x.shape[2]
    return tl.split(tl.permute(tl.reshape(x, [x.shape[0], 4, 2, n // 2]), (0, 1, 3, 2)))


@triton.jit
def join_steady(
    sums, steady, keys, STATISTICS: tl.constexpr, MOMENTS: tl.constexpr, SINK: tl.constexpr
):
    """The sums with those about the same pivots, of `keys` further keys; which rows are lost.

    keys: a number or [M].
    """
    row_sum = sums.row_sum + tl.sum(steady.row_sum, 1)
    weighted = sums.weighted
    squares = sums.squares
    key_max = sums.key_max
    count = sums.count
    z_sum = sums.z_sum
    z_squares = sums.z_squares
    lost = row_sum > ROOM
    if STATISTICS:
        weighted += tl.sum(steady.weighted, 1)
        squares += tl.sum(steady.squares, 1)
        largest = tl.max(steady.largest, 1).to(row_sum.dtype, bitcast=True)
        key_max = tl.maximum(key_max, sums.row_max + tl.log2(largest))
        count += keys
        if SINK:  # so far above the keys that none of them is left beside it
            lost = lost | ((largest == 0.0) & (keys > 0))
        if MOMENTS:
            z_sum += tl.sum(steady.z_sum, 1)
            z_squares += tl.sum(steady.z_squares, 1)
            # Logits far above the pivot and close together: their variance is lost beside the
            # square of their distance.
            of_all = z_squares * count.to(row_sum.dtype)
            lost = lost | ((z_sum > 0.0) & (of_all - z_sum * z_sum < of_all * 0.03))
    joined = Sums(
        sums.row_max, row_sum, weighted, squares, key_max, count, sums.z_max, z_sum, z_squares
    )
    return joined, lost


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
def show_seen(closed, sums, sees):
    """`closed` with NaN where a row sees keys, and all of their logits are -inf: 0 / 0."""
    broken = closed.empty & (sums.row_sum == 0.0) & sees
    return Closed(
        closed.empty & (broken == 0),
        tl.where(broken, float("nan"), closed.divisor),
        tl.where(broken, float("nan"), closed.lse2),
    )


@triton.jit
def store_output(call, out, b, h, rows, inside, acc, closed, V: tl.constexpr):
    """acc / l of the rows, 0 where a row saw nothing."""
    result = acc * (1.0 / closed.divisor)[:, None]
    if call.dropout.rate is not None:
        result = result * number(call.dropout.factor, call.FLOAT)
    result = tl.where(closed.empty[:, None], 0.0, result)
    columns = tl.arange(0, acc.shape[1]).to(tl.int64)
    ptrs = entry(out, b, h) + rows.to(tl.int64)[:, None] * out.stride_row
    ptrs = ptrs + columns[None, :] * out.stride_column
    stored = inside[:, None] & (columns[None, :] < V)
    tl.store(ptrs, result.to(out.ptr.dtype.element_ty), mask=stored)


@triton.jit
def _finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def _of_row(values, blank, empty, broken):
    return tl.where(broken, float("nan"), tl.where(empty, blank, values))


@triton.jit
def _side_by_side(a, b, c, d):
    """[M, 4]."""
    joined = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(joined, [a.shape[0], 4])


@triton.jit
def _store_planes(ptr, plane, offsets, even, odd, NUMBER: tl.constexpr, inside):
    """[M, 4] of the planes 0, 2, 4, 6 and of 1, 3, 5, 7 to the first NUMBER planes.

    All at once: each store makes all warps wait until its numbers went through shared memory.
    """
    index = tl.arange(0, 8)
    values = tl.reshape(tl.join(even, odd), [even.shape[0], 8])
    ptrs = ptr + index.to(tl.int64)[None, :] * plane + offsets[:, None]
    tl.store(ptrs, values, mask=inside[:, None] & (index < NUMBER)[None, :])


@triton.jit
def store_statistics(
    ptr,
    plane,
    offsets,
    inside,
    sums,
    closed,
    first,
    APART: tl.constexpr,
    CAPPED: tl.constexpr,
    MOMENTS: tl.constexpr,
    dtype: tl.constexpr,
):
    """The planes of statistics.py.

    ptr: the statistics; plane: elements of one plane; offsets [M] of the rows in it; inside [M]:
    rows to write. first [M]: x of the sequence's first key, -inf where it is hidden. APART: the
    pivot may be another number than the largest x of a key.
    """
    count = sums.count
    n = tl.maximum(count, 1).to(dtype)
    empty = count == 0  # nothing that the statistics read
    log2_sum = tl.log2(closed.divisor)
    entropy = tl.maximum((log2_sum - sums.weighted / closed.divisor) * LN2, 0.0)
    key_max = sums.row_max
    if APART:
        key_max = sums.key_max
    top_p = tl.exp2(key_max - sums.row_max) / closed.divisor
    # Its logit is summed in another order: far from 0 it may come out above the largest.
    first_p = tl.minimum(tl.exp2(first - sums.row_max) / closed.divisor, top_p)
    sum_p2 = sums.squares / (closed.divisor * closed.divisor)
    finite = _finite(closed.divisor) & _finite(sums.weighted) & _finite(key_max)
    max_logit = key_max
    if CAPPED:
        finite = finite & _finite(sums.z_max) & _finite(sums.z_sum)
        max_logit = sums.z_max
    broken = (finite == 0) & (empty == 0)
    lse = closed.lse2 * LN2
    mean = n
    if MOMENTS:
        shift = sums.z_sum / n
        pivot = tl.where(sums.z_max == lowest(dtype), sums.row_max, sums.z_max)
        mean = _of_row((pivot + shift) * LN2, 0.0, empty, broken)
        m2 = tl.maximum(sums.z_squares - shift * sums.z_sum, 0.0) * (LN2 * LN2)
        # squares past the type's range: infinite, not NaN, for the row is sound
        m2 = tl.where(_finite(sums.z_squares), m2, float("inf"))
        m2 = _of_row(m2, 0.0, empty, broken)
        tl.store(ptr + 8 * plane + offsets, m2, mask=inside)
    even = _side_by_side(
        _of_row(max_logit * LN2, float("-inf"), empty, broken),
        _of_row(entropy, 0.0, empty, broken),
        _of_row(sum_p2, 0.0, empty, broken),
        count.to(dtype),
    )
    odd = _side_by_side(
        _of_row(lse, float("-inf"), empty, broken),
        _of_row(top_p, 0.0, empty, broken),
        _of_row(first_p, 0.0, empty, broken),
        mean,
    )
    _store_planes(ptr, plane, offsets, even, odd, 8 if MOMENTS else 7, inside)
