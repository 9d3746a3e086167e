"""The numbers of rows, and of many rows together: a state that rows join and that merges.

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
    """What is known of some rows: one vector each, one number each where they are merged."""

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


@triton.jit
def measure_rows(rows, query, sinks, program, chunks, ROWS: tl.constexpr):
    """Chunk c of n takes the tiles c, c + n, c + 2n ... of its head's rows."""
    entry, head, chunk = place_of(program, query.heads, chunks)
    start, stop = span_of(query, entry)
    first_row = first_of(query, entry, head)
    sink = None
    if sinks.ptr is not None:
        sink = tl.load(sinks.ptr + entry * sinks.stride_b + head * sinks.stride_h)
    state = no_rows(ROWS)
    for row in range(start + chunk * ROWS, stop, chunks * ROWS):
        places = row + tl.arange(0, ROWS)
        state = add_rows(state, rows, first_row + places, places < stop, sink)
    return state


@triton.jit
def no_rows(ROWS: tl.constexpr):
    """The state before any row has come."""
    zero = tl.zeros([ROWS], tl.float64)
    return Chunk(zero - float("inf"), *((zero,) * (FIELDS - 1)))


@triton.jit
def add_rows(state, rows, offs_row, mask, sink):
    """Row i of offs_row [ROWS] joins the i-th running state. sink: None where there is none."""
    row_max = _load_plane(rows, MAX_LOGIT, offs_row, mask)
    row_lse = _load_plane(rows, LSE, offs_row, mask)
    row_entropy = _load_plane(rows, ENTROPY, offs_row, mask)
    row_top_p = _load_plane(rows, TOP_P, offs_row, mask)
    row_sum_p2 = _load_plane(rows, SUM_P2, offs_row, mask)
    row_first_p = _load_plane(rows, FIRST_P, offs_row, mask)
    count = _load_plane(rows, COUNT, offs_row, mask)
    counted = _counted(row_max, count)

    outcomes = count + 1 if sink is not None else count
    several = counted & (outcomes > 1)
    ratio = row_entropy / tl.log(tl.maximum(outcomes, 2.0))
    off = state.off
    if sink is not None:
        off += tl.where(counted, tl.exp(sink - row_lse), 0.0)

    squares = state.squares
    if rows.squares_ptr is not None:
        row_squares = tl.load(rows.squares_ptr + offs_row, mask, other=0.0)
        squares += tl.where(counted, row_squares, 0.0)

    row_mean = _load_plane(rows, MEAN, offs_row, mask)
    row_m2 = _load_plane(rows, M2, offs_row, mask)
    row_mean = tl.where(counted, row_mean, 0.0).to(tl.float64)
    row_m2 = tl.where(counted, row_m2, 0.0).to(tl.float64)
    number = tl.where(counted, count, 0.0).to(tl.float64)
    pairs = state.pairs + number
    share = number / tl.maximum(pairs, 1.0)
    delta = row_mean - state.mean

    return Chunk(
        top=tl.maximum(state.top, tl.where(counted, row_max, -float("inf")).to(tl.float64)),
        pairs=pairs,
        mean=state.mean + delta * share,
        m2=state.m2 + (row_m2 + delta * delta * state.pairs * share),
        variance=state.variance + row_m2 / tl.maximum(number, 1.0),
        entropy=state.entropy + tl.where(counted, row_entropy, 0.0),
        ratio=state.ratio + tl.where(several, ratio, 0.0),
        sum_p2=state.sum_p2 + tl.where(counted, row_sum_p2, 0.0),
        top_p=state.top_p + tl.where(counted, row_top_p, 0.0),
        saturated=state.saturated + (counted & (row_top_p > SATURATED)),
        first_p=state.first_p + tl.where(counted, row_first_p, 0.0),
        off=off,
        rows=state.rows + counted,
        nonfinite=state.nonfinite + ((row_max != row_max) | (row_max == float("inf"))),
        several=state.several + several,
        squares=squares,
    )


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
    """A state of vectors as one of numbers. Chan's rule, the common mean found first."""
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
