"""The squares of query and key, summed by the producer while they are in shared memory.

It has the time. In the consumers these sums took up to a tenth of a call: what is computed once for
each tile of rows has to be fetched anew each time, instruction by instruction.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from scaledot.backends.cuda.hopper.pipeline import wait_for_keys

LINE = gl.constexpr(64)  # entries of 128 bytes: what lies side by side in shared memory


@gluon.jit
def square_query(call, tile, pipe, turn):
    """Of each row the sum of its squares."""
    plan = call.plan
    mbarrier.wait(pipe.q_full.index(0), turn & 1)
    entry = (tile.batch * call.heads + tile.head).to(gl.int64)
    at = call.squares + entry * call.queries + tile.first_query
    for part in gl.static_range(plan.CONSUMERS):
        sums = _sum_squares(pipe.q.index(part).reshape([64, plan.D]), plan)
        row = tile.row + part * 64 + gl.arange(0, 64, sums.type.layout)
        gl.store(at + row, sums, mask=row < tile.queries)


@gluon.jit
def square_keys(call, tile, j, pipe, step):
    """Of tile j of the keys one sum, by the rows of the same place; those of the first head that
    shares them."""
    plan = call.plan
    key_head = tile.head // call.group
    mine = (j * plan.KEYS // plan.ROWS == tile.row // plan.ROWS) & (tile.careful == 0)
    if mine & (key_head * call.group == tile.head):
        wait_for_keys(pipe, step, plan)
        k = pipe.k.index(step % plan.STAGES).reshape([plan.KEYS, plan.D])
        total = _sum_squares(k.slice(0, 64), plan)
        for first in gl.static_range(64, plan.KEYS, 64):
            total += _sum_squares(k.slice(first, 64), plan)
        head = tile.batch * (call.heads // call.group) + key_head
        at = head.to(gl.int64) * gl.cdiv(call.keys, plan.KEYS) + j
        gl.store(call.key_squares + at, gl.sum(total, 0))


@gluon.jit
def _sum_squares(rows, plan):
    """[64, D] -> [64]. Neighbouring threads have neighbouring rows, so that their 16 bytes lie in
    different banks, and two of them a row."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [0, 1])
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, layout))
    for first in gl.static_range(0, plan.D, LINE):
        entries = rows.slice(first, LINE, dim=1).load(layout).to(gl.float32)
        total += gl.sum(entries * entries, 1)
    return total
