"""Which tile of rows is next: the producer finds out, the consumers read it in shared memory.

To find out takes divisions, and what they need of the call would not stay in the registers of a
consumer: each would be fetched from local memory anew, and waited for.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from scaledot.backends.cuda.hopper.pipeline import (
    agreed,
    one_each,
    one_per_thread,
    wait_for_keys,
)
from scaledot.backends.cuda.hopper.schedule import Tile

FIELDS = gl.constexpr(16)


@gluon.jit
def publish(pipe, tile, round):
    """The next task; before the barrier that says that its first keys are there."""
    task = (
        1,
        round,
        tile.batch,
        tile.head,
        tile.row,
        tile.queries,
        tile.keys,
        tile.first_query,
        tile.start,
        tile.full_start,
        tile.full_stop,
        tile.stop,
        tile.careful,
    )
    layout: gl.constexpr = one_each(1)
    place = gl.arange(0, FIELDS, layout)
    numbers = gl.zeros([FIELDS], gl.int32, layout)
    for i in gl.static_range(len(task)):
        numbers = gl.where(place == i, task[i], numbers)
    pipe.task.store(numbers)
    gl.thread_barrier()


@gluon.jit
def publish_end(pipe):
    """That there is none."""
    pipe.task.store(gl.zeros([FIELDS], gl.int32, one_each(1)))
    gl.thread_barrier()


@gluon.jit
def tell_missed(pipe, bits, plan):
    """Of a team that is all consumers, before the buffers of the last step are handed back: rounds,
    a bit each, whose rows are to be done once more."""
    layout: gl.constexpr = one_each(plan.TEAM // 16)
    pipe.missed.store(gl.zeros([FIELDS], gl.int32, layout) + bits)
    gl.thread_barrier()


@gluon.jit
def missed_rounds(pipe, careful, plan):
    """What they told, for one of the other warps, when the buffers of the last step are back."""
    missed = 0
    if careful == 0:
        if plan.TOGETHER:
            numbers = pipe.missed.load(one_each(1))
            missed = gl.max(gl.zeros([32], gl.int32, one_each(1)) + gl.max(numbers, 0), 0)
        else:
            missed = agreed(one_per_thread(1), plan)
    return missed


@gluon.jit
def take(call, pipe, step, who):
    """(tile, round, whether there is one), as soon as the keys of its first step are there."""
    plan = call.plan
    wait_for_keys(pipe, step, who, plan)
    layout: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [plan.TEAM // 16], [0])
    numbers = pipe.task.load(layout)
    row = _field(numbers, 4, plan)
    queries = call.queries
    keys = call.keys
    first_query = row * 0
    if plan.PACKED:
        queries = _field(numbers, 5, plan)
        first_query = _field(numbers, 7, plan)
    if plan.PACKED or plan.LENGTHS:
        keys = _field(numbers, 6, plan)
    start = row * 0
    full_start = row * 0
    if plan.LEFT:
        start = _field(numbers, 8, plan)
        full_start = _field(numbers, 9, plan)
    tile = Tile(
        _field(numbers, 2, plan),
        _field(numbers, 3, plan),
        row,
        queries,
        keys,
        first_query,
        first_query,  # where keys begin is for those who load them
        call.bottom_right * (keys - queries),
        start,
        full_start,
        _field(numbers, 10, plan),
        _field(numbers, 11, plan),
        _field(numbers, 12, plan),
    )
    return tile, _field(numbers, 1, plan), _field(numbers, 0, plan)


@gluon.jit
def _field(numbers, i: gl.constexpr, plan):
    """One of the numbers that each thread holds, and ptxas sees that all hold the same (REDUX): a
    loop whose end it takes for each thread's own has no uniform registers for its products."""
    place = gl.arange(0, FIELDS, numbers.type.layout)
    number = gl.sum(gl.where(place == i, numbers, 0), 0)
    each: gl.constexpr = one_each(plan.TEAM // 16)
    return gl.max(gl.zeros([32], gl.int32, each) + number, 0)
