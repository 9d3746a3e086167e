"""Two warps that sum the squares of query and keys while they are in shared memory, half each.

In the consumers these sums took up to a tenth of a call: what is computed once for each tile of
rows has to be fetched anew each time, instruction by instruction. One warp alone hands keys back so
late that the next come late. A partition each: one of two warps would need a named barrier.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from scaledot.backends.cuda.hopper.pipeline import (
    KEYS_BACK,
    hand_back_keys,
    in_round,
    key_readers,
    meet,
    wait_full,
)
from scaledot.backends.cuda.hopper.tasks import missed_rounds

LINE = gl.constexpr(64)  # entries of 128 bytes: a row of a block of columns, swizzled within itself
AT_ONCE = gl.constexpr(4)  # rows: 16 bytes a thread
PART = gl.constexpr(16)  # rows of the query that a warp takes with each tile of keys
LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0]))


@gluon.jit
def square_0(call, pipe):
    if call.plan.SQUARES != "no":
        _square_half(call, pipe, 0)


@gluon.jit
def square_1(call, pipe):
    if call.plan.SQUARES != "no":
        _square_half(call, pipe, 1)


@gluon.jit
def _square_half(call, pipe, HALF: gl.constexpr):
    """It reads every tile of keys as a consumer does, most of them without a look."""
    plan = call.plan
    # A diagonal's keys come first: no part of the query with them, so that none is kept for long.
    LATER: gl.constexpr = plan.ROWS // plan.KEYS if plan.SQUARES == "both" and plan.RIGHT else 0
    ROWS: gl.constexpr = plan.ROWS // 2
    step = 0
    careful = 0
    missed = -1
    while missed != 0:
        for round in range(call.rounds()):
            entry, block, there = call.place(round)
            if there and in_round(missed, round):
                tile = call.tile(entry, block, careful)
                number = tile.stop - tile.start
                for back in range(number):
                    wait_full(pipe.k_full, step, plan)
                    if plan.SQUARES == "both":
                        _square_keys(call, tile, tile.stop - 1 - back, pipe, step, HALF)
                    first = gl.minimum(gl.maximum(back - LATER, 0) * PART, ROWS)
                    stop = gl.minimum(gl.maximum(back - LATER + 1, 0) * PART, ROWS)
                    if back == number - 1:
                        stop = ROWS + first * 0  # no constant, which a branch cannot give
                    _square_query(call, tile, HALF * ROWS + first, HALF * ROWS + stop, pipe)
                    hand_back_keys(step, 1, plan)
                    step += 1
        wait_full(pipe.k_full, step, plan)
        meet("sync", KEYS_BACK + step % plan.STAGES, 1, key_readers(plan))
        step += 1
        missed = missed_rounds(pipe, careful, plan)
        careful += 1


@gluon.jit
def _square_query(call, tile, first, stop, pipe):
    """Of each row [first, stop) of the tile the sum of its squares."""
    plan = call.plan
    entry = (tile.batch * call.heads + tile.head).to(gl.int64)
    at = call.squares + entry * call.queries + tile.first_query
    for row in range(first, stop, AT_ONCE):
        q = in_lines(pipe.q.index(row // plan.TEAM), plan.TEAM * plan.D)
        squares = gl.zeros([AT_ONCE, LINE], gl.float32, LAYOUT)
        for block in gl.static_range(plan.D // LINE):
            lines = q.index((block * plan.TEAM + row % plan.TEAM) // AT_ONCE)
            entries = lines.load(LAYOUT).to(gl.float32)
            squares += entries * entries
        place = tile.row + row + gl.arange(0, AT_ONCE, gl.SliceLayout(1, LAYOUT))
        gl.store(at + place, gl.sum(squares, 1), mask=place < tile.queries)


@gluon.jit
def _square_keys(call, tile, j, pipe, step, HALF: gl.constexpr):
    """Of half of tile j of the keys one sum, if it lies where the rows do; by the first head that
    shares it."""
    plan = call.plan
    mine = (j * plan.KEYS // plan.ROWS == tile.row // plan.ROWS) & (tile.careful == 0)
    if mine & (tile.head % call.group == 0):
        k = in_lines(pipe.k.index(step % plan.STAGES), plan.KEYS * plan.D)
        squares = gl.zeros([AT_ONCE, LINE], gl.float32, LAYOUT)
        LINES: gl.constexpr = plan.KEYS * plan.D // (AT_ONCE * LINE) // 2
        for i in range(HALF * LINES, (HALF + 1) * LINES, 2):
            one = k.index(i).load(LAYOUT).to(gl.float32)
            other = k.index(i + 1).load(LAYOUT).to(gl.float32)
            squares += one * one + other * other
        head = (tile.batch * call.heads + tile.head) // call.group
        at = (head.to(gl.int64) * gl.cdiv(call.keys, plan.KEYS) + j) * 2 + HALF
        gl.store(call.key_squares + at, gl.sum(gl.sum(squares, 1), 0))


@gluon.jit
def in_lines(buffer, ENTRIES: gl.constexpr):
    """[n, AT_ONCE, LINE]: a buffer as it lies in memory, one block of columns after the other."""
    shape: gl.constexpr = [ENTRIES // (AT_ONCE * LINE), AT_ONCE, LINE]
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return buffer._reinterpret(buffer.dtype, shape, layout)
