"""The numbers of rows, and of many rows together: what threads know of theirs, and then all.

The moments of the logits are merged by Chan's rule

    n = n_a + n_b        delta = mean_b - mean_a
    mean = mean_a + delta n_b / n        m2 = m2_a + m2_b + delta^2 n_a n_b / n

so that nothing cancels, however far the logits are from zero. Sums are float64.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from scaledot.backends.cuda.statistics import ROW_PLANES
from scaledot.backends.cuda.summary.places import first_of, place_of, span_of
from scaledot.measure import SATURATED_ABOVE

MAX_LOGIT, LSE, ENTROPY, TOP_P, SUM_P2, FIRST_P, COUNT, MEAN, M2 = (
    tl.constexpr(plane) for plane in range(len(ROW_PLANES))
)
SATURATED = tl.constexpr(SATURATED_ABOVE)


class Rows(NamedTuple):
    """What a forward kernel left of each row."""

    statistics_ptr: Any  # planes [B, H, Q], in the order of ROW_PLANES
    squares_ptr: Any  # [B, H, Q]: of the query's entries; None: not known
    plane: Any  # numbers of one plane


class Chunk(NamedTuple):
    """What is known of some rows: one number each; one vector each of several chunks."""

    top: Any  # the largest logit
    pairs: Any
    mean: Any  # of the logits of all pairs
    m2: Any  # their squared deviations from it, summed
    variance: Any  # from here on sums over the counted rows
    entropy: Any
    ratio: Any
    sum_p2: Any
    top_p: Any
    saturated: Any
    first_p: Any
    off: Any
    rows: Any
    nonfinite: Any
    several: Any  # rows of more than one outcome: they have an entropy ratio
    squares: Any  # of the query's entries, where the forward kernel left them


FIELDS = tl.constexpr(len(Chunk._fields))


class Lanes(NamedTuple):
    """What each of a program's threads knows of the rows that it has met: one vector each."""

    top: Any
    pivot: Any  # the mean of one of the rows; from it the others' are counted
    pairs: Any
    shift: Any  # sum of n (mean - pivot) over rows of n keys
    spread: Any  # of n (mean - pivot)^2
    m2: Any  # from here on as in Chunk
    variance: Any
    entropy: Any
    ratio: Any
    sum_p2: Any
    top_p: Any
    saturated: Any
    first_p: Any
    off: Any
    rows: Any
    nonfinite: Any
    several: Any
    squares: Any


@triton.jit
def measure_rows(rows, query, sinks, program, chunks, LANES: tl.constexpr, EACH: tl.constexpr):
    """One Chunk. Of n chunks of a head number c takes the tiles c, c + n, c + 2n ... of its rows; a
    tile has EACH rows for each of LANES threads."""
    entry, head, chunk = place_of(program, query.heads, chunks)
    start, stop = span_of(query, entry)
    first_row = first_of(query, entry, head)
    sink = None
    if sinks.ptr is not None:
        sink = tl.load(sinks.ptr + entry * sinks.stride_b + head * sinks.stride_h)
    lanes = _no_rows(rows, LANES)
    TILE: tl.constexpr = LANES * EACH
    offs = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    for row in range(start + chunk * TILE, stop, chunks * TILE):
        places = row + offs
        lanes = _add_rows(lanes, rows, first_row + places, places < stop, sink)
    return _gathered(lanes)


@triton.jit
def _no_rows(rows, LANES: tl.constexpr):
    """Before any row has come. Sums are float64, what is counted is an integer."""
    top = tl.full([LANES], -float("inf"), rows.statistics_ptr.dtype.element_ty)
    zero = tl.zeros([LANES], tl.float64)
    none = tl.zeros([LANES], tl.int32)
    return Lanes(top, *((zero,) * 10), none, zero, zero, none, none, none, zero)


@triton.jit
def _add_rows(lanes, rows, offs_row, mask, sink):
    """Rows [LANES, EACH] join. sink: None where there is none.

    Numbers of one sign are first summed as they are, EACH of them: to float64 is a long way.
    """
    row_max = _load_plane(rows, MAX_LOGIT, offs_row, mask)
    row_lse = _load_plane(rows, LSE, offs_row, mask)
    row_entropy = _load_plane(rows, ENTROPY, offs_row, mask)
    row_top_p = _load_plane(rows, TOP_P, offs_row, mask)
    row_sum_p2 = _load_plane(rows, SUM_P2, offs_row, mask)
    row_first_p = _load_plane(rows, FIRST_P, offs_row, mask)
    count = _load_plane(rows, COUNT, offs_row, mask)
    row_mean = _load_plane(rows, MEAN, offs_row, mask)
    row_m2 = _load_plane(rows, M2, offs_row, mask)
    counted = _counted(row_max, count)

    outcomes = count + 1 if sink is not None else count
    several = counted & (outcomes > 1)
    ratio = row_entropy / tl.log(tl.maximum(outcomes, 2.0))
    off = lanes.off
    if sink is not None:
        off += tl.sum(tl.where(counted, tl.exp(sink - row_lse), 0.0), 1).to(tl.float64)
    squares = lanes.squares
    if rows.squares_ptr is not None:
        row_squares = tl.load(rows.squares_ptr + offs_row, mask, other=0.0)
        squares += tl.sum(tl.where(counted, row_squares, 0.0), 1).to(tl.float64)

    number = tl.where(counted, count, 0.0).to(tl.float64)
    largest = tl.max(tl.where(counted, row_mean, -float("inf")), 1)
    fresh = tl.where(largest > -float("inf"), largest, 0.0).to(tl.float64)
    pivot = tl.where(lanes.pairs > 0.0, lanes.pivot, fresh)
    delta = tl.where(counted, row_mean, 0.0).to(tl.float64) - pivot[:, None]
    row_m2 = tl.where(counted, row_m2, 0.0)

    return Lanes(
        top=tl.maximum(lanes.top, tl.max(tl.where(counted, row_max, -float("inf")), 1)),
        pivot=pivot,
        pairs=lanes.pairs + tl.sum(number, 1),
        shift=lanes.shift + tl.sum(number * delta, 1),
        spread=lanes.spread + tl.sum(number * delta * delta, 1),
        m2=lanes.m2 + tl.sum(row_m2.to(tl.float64), 1),
        variance=lanes.variance + tl.sum(row_m2 / tl.maximum(count, 1.0), 1).to(tl.float64),
        entropy=lanes.entropy + tl.sum(tl.where(counted, row_entropy, 0.0), 1).to(tl.float64),
        ratio=lanes.ratio + tl.sum(tl.where(several, ratio, 0.0), 1).to(tl.float64),
        sum_p2=lanes.sum_p2 + tl.sum(tl.where(counted, row_sum_p2, 0.0), 1).to(tl.float64),
        top_p=lanes.top_p + tl.sum(tl.where(counted, row_top_p, 0.0), 1).to(tl.float64),
        saturated=lanes.saturated + _how_many(counted & (row_top_p > SATURATED)),
        first_p=lanes.first_p + tl.sum(tl.where(counted, row_first_p, 0.0), 1).to(tl.float64),
        off=off,
        rows=lanes.rows + _how_many(counted),
        nonfinite=lanes.nonfinite + _how_many((row_max != row_max) | (row_max == float("inf"))),
        several=lanes.several + _how_many(several),
        squares=squares,
    )


@triton.jit
def _how_many(which):
    return tl.sum(which.to(tl.int32), 1)


@triton.jit
def _gathered(lanes):
    """One Chunk. All plain sums together, so that the threads meet once for them."""
    divisor = tl.maximum(lanes.pairs, 1.0)
    mean = lanes.pivot + lanes.shift / divisor
    m2 = lanes.m2 + tl.maximum(lanes.spread - lanes.shift * lanes.shift / divisor, 0.0)
    plain = (lanes.pairs, lanes.pairs * mean, m2)
    for part in tl.static_range(6, len(lanes)):  # from the variance on
        plain += (lanes[part].to(tl.float64),)
    plain += (m2 * 0.0,)  # a power of two
    sums = _parted(tl.sum(_joined(plain), 0))
    of_all = sums[1] / tl.maximum(sums[0], 1.0)
    delta = mean - of_all
    m2 = sums[2] + tl.sum(lanes.pairs * delta * delta, 0)
    top = tl.max(lanes.top, 0).to(tl.float64)
    return Chunk(top, sums[0], of_all, m2, *sums[3:-1])


@triton.jit
def _joined(parts):
    """Vectors [n] as one tensor [n, 2, 2 ...]."""
    if len(parts) == 1:
        return parts[0]
    else:
        left = _joined(parts[: len(parts) // 2])
        return tl.join(left, _joined(parts[len(parts) // 2 :]))


@triton.jit
def _parted(x):
    """The numbers of [2, 2 ...], in the order of `_joined`."""
    left, right = tl.split(x)
    if len(x.shape) == 1:
        return left, right
    else:
        return _parted(left) + _parted(right)


@triton.jit
def which_count(rows, offs_row, mask):
    """Which of some rows enter the vitals."""
    row_max = _load_plane(rows, MAX_LOGIT, offs_row, mask)
    return mask & _counted(row_max, _load_plane(rows, COUNT, offs_row, mask))


@triton.jit
def _counted(row_max, count):
    """They see a key, and every logit is finite."""
    return (count > 0) & (tl.abs(row_max) < float("inf"))


@triton.jit
def _load_plane(rows, PLANE: tl.constexpr, offs_row, mask):
    plane_ptr = rows.statistics_ptr + PLANE * tl.cast(rows.plane, tl.int64)
    return tl.load(plane_ptr + offs_row, mask, other=0.0)


@triton.jit
def merged(state):
    """Chunks as one. Chan's rule, the common mean found first."""
    pairs = tl.sum(state.pairs, 0)
    mean = tl.sum(state.pairs * state.mean, 0) / tl.maximum(pairs, 1.0)
    delta = state.mean - mean
    m2 = tl.sum(state.m2 + state.pairs * delta * delta, 0)
    return Chunk(tl.max(state.top, 0), pairs, mean, m2, *[tl.sum(part, 0) for part in state[4:]])


@triton.jit
def store_chunk(chunk_ptr, chunk):
    """Its numbers, one after the other."""
    for field in tl.static_range(FIELDS):
        tl.store(chunk_ptr + field, chunk[field])


@triton.jit
def load_chunks(chunks_ptr, mask):
    """Chunks [n] that `store_chunk` wrote; no rows outside of the mask."""
    state = (tl.load(chunks_ptr, mask, other=-float("inf")),)
    for field in tl.static_range(1, FIELDS):
        state += (tl.load(chunks_ptr + field, mask, other=0.0),)
    return Chunk(*state)
