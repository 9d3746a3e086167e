"""A tile of rows over the tiles of keys that it may see: with the values, or for scores alone."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from scaledot.backends.cuda.hopper.finish import scale_of, store_moments
from scaledot.backends.cuda.hopper.in_place import add_in_place, begin_run, end_run
from scaledot.backends.cuda.hopper.pipeline import (
    Pipe,
    hand_back_keys,
    hand_back_values,
    pass_turn,
    stage_of,
    wait_for_keys,
    wait_for_values,
    wait_turn,
)
from scaledot.backends.cuda.hopper.schedule import Call
from scaledot.backends.cuda.hopper.softmax import (
    INFINITY,
    add_tile,
    bend,
    by_row,
    columns_before,
    first_columns,
    follow,
    from_pivot,
    move_pivot,
    no_sums,
    of_one_run,
    of_product,
    rescale,
    unknown,
    with_runs_before,
    without_moments,
)


@aggregate
class Rows:
    """A team's m rows of a tile, and what their scores need."""

    call: Call
    pipe: Pipe
    q: gl.shared_memory_descriptor  # [m, D]
    low: gl.tensor  # [m]: row i may see the keys [low_i, high_i)
    high: gl.tensor
    factor: gl.tensor  # [m]: of the scores, where one number does not serve
    zero: gl.tensor  # [m, KEYS]
    who: gl.tensor  # the number of each thread's consumer

    @gluon.constexpr_function
    def __init__(self, call, pipe, q, low, high, factor, zero, who):
        self.call = call
        self.pipe = pipe
        self.q = q
        self.low = low
        self.high = high
        self.factor = factor
        self.zero = zero
        self.who = who

    @gluon.jit
    def start_scores(self, step):
        """S = Q K^T of a step whose keys are there, on its way."""
        plan = self.call.plan
        k = self.pipe.k.index(stage_of(step, plan)).reshape([plan.KEYS, plan.D]).permute((1, 0))
        return warpgroup_mma(self.q, k, self.zero, use_acc=False, is_async=True)

    @gluon.jit
    def scores(self, step, FIRST: gl.constexpr):
        plan = self.call.plan
        if not FIRST:  # else they are there: with the task
            wait_for_keys(self.pipe, step, self.who, plan)
        s = self.start_scores(step)
        pass_turn(self.who, step, plan, ALONE=True)
        s = warpgroup_mma_wait(0, deps=[s])
        hand_back_keys(step, plan.TEAM // 16, plan)
        return s

    @gluon.jit
    def wait_for_values(self, step, NOW: gl.constexpr):
        """Once a step: as soon as P is known where they have to be cleaned, else when needed."""
        plan = self.call.plan
        if (plan.LENGTHS or plan.PACKED) == NOW:
            wait_for_values(self.pipe, step, self.who, plan)

    @gluon.jit
    def values(self, step):
        """[KEYS, V] of a step."""
        plan = self.call.plan
        return self.pipe.v.index(stage_of(step, plan)).reshape([plan.KEYS, plan.V])

    @gluon.jit
    def seen(self, s, j, MASKED: gl.constexpr, SCALED: gl.constexpr):
        """The scores of key tile j, -inf where hidden. SCALED: in base 2, so that they are rounded
        as the pivot is, and nothing is left of the one that it was taken from.
        """
        plan = self.call.plan
        if plan.FACTOR != "no":
            s = bend(s, self.factor, self.call.cap, plan)
        if SCALED:
            s = s * scale_of(self.call)
        if MASKED:
            s = gl.where(self.visible(self.low, self.high, j, s), s, -INFINITY)
        return s

    @gluon.jit
    def scale(self, SCALED: gl.constexpr):
        """What is left to multiply the scores of a tile with, after `seen`."""
        if SCALED:
            return 1.0
        else:
            return scale_of(self.call)

    @gluon.jit
    def visible(self, low, high, j, s):
        """[m, KEYS]: which keys of tile j the rows may see; s is as large."""
        plan = self.call.plan
        visible = columns_before(high - j * plan.KEYS, s)
        if plan.LEFT:
            visible = visible & ~columns_before(low - j * plan.KEYS, s)
        return visible

    @gluon.jit
    def move(self, s, sums, MASKED: gl.constexpr):
        return move_pivot(s, sums, self.scale(MASKED), self.call.plan)

    @gluon.jit
    def follow(self, sums, move, j, MASKED: gl.constexpr):
        """The sums before key tile j, counted from the pivot to which that tile moves."""
        plan = self.call.plan
        # A quarter of the keys that the row has met: those behind the tile.
        last = (j + 1) * plan.KEYS
        if MASKED:
            met = gl.maximum(self.high - gl.maximum(self.low, last), 0).to(gl.float32)
            before = by_row(met * 0.25, sums.l)
        elif plan.RIGHT or plan.LENGTHS or plan.PACKED:
            before = by_row((self.high.to(gl.float32) - last.to(gl.float32)) * 0.25, sums.l)
        else:
            before = (self.call.keys - last).to(gl.float32) * 0.25
        return follow(sums, move, before, plan, sums_moments(plan, MASKED))

    @gluon.jit
    def add(self, s, sums, j, MASKED: gl.constexpr, STEADY: gl.constexpr, SCALED: gl.constexpr):
        """The sums with key tile j; P in 16 bits."""
        plan = self.call.plan
        visible = True
        if MASKED and plan.STATISTICS:
            # Compared anew: 64 answers from before would not fit into the predicates.
            visible = self.visible(unknown(self.low), unknown(self.high), j, s)
        nought = self.call.keys >> 31  # a number of keys has no sign
        MOMENTS: gl.constexpr = sums_moments(plan, MASKED)
        scale = self.scale(SCALED)
        if plan.IN_PLACE and not MASKED:
            return add_in_place(s, sums, scale, plan, MOMENTS)
        else:
            return add_tile(s, sums, visible, scale, nought, plan, MASKED, STEADY, MOMENTS)

    @gluon.jit
    def measure(self, s, sums, j, MASKED: gl.constexpr):
        """All of the softmax of key tile j: its sums and P."""
        s = self.seen(s, j, MASKED, MASKED)
        STEADY: gl.constexpr = self.call.plan.STEADY and not MASKED
        if not STEADY:
            sums = self.follow(sums, self.move(s, sums, MASKED), j, MASKED)
        return self.add(s, sums, j, MASKED, STEADY, MASKED)

    @gluon.jit
    def begin(self, s, j):
        """The same of the tile that comes first. Without a left edge a row that sees any of its
        keys sees the first of them: the largest of a few scores is a pivot that will do."""
        plan = self.call.plan
        sums = no_sums(self.zero)
        if plan.FEW:
            s = self.seen(s, j, True, False)
            top = by_row(gl.max(first_columns(s, 8), 1), sums.pivot)
            return self.add(s, from_pivot(top * scale_of(self.call), sums), j, True, True, False)
        else:
            return self.measure(s, sums, j, True)


@gluon.jit
def begin_of_run(rows, sums):
    if rows.call.plan.IN_PLACE:
        return begin_run(rows.zero, sums)
    else:
        return of_one_run(sums)


@gluon.jit
def end_of_run(rows, sums, before):
    if rows.call.plan.IN_PLACE:
        return end_run(sums, before)
    else:
        return with_runs_before(sums, before)


@gluon.constexpr_function
def sums_moments(plan, masked):
    """Whether moments of a tile of keys are summed in the pass."""
    return plan.MOMENTS == "all" or (plan.MOMENTS == "edges" and masked)


@gluon.jit
def row_factor(call, tile, count):
    """The scale of each row [m], log2 e in it; unused where one number serves."""
    plan = call.plan
    factor = count.to(gl.float32) * 0.0
    if plan.FACTOR == "head":
        at = tile.batch.to(gl.int64) * call.scale_batch + tile.head
        factor += gl.load(call.head_scale + at).to(gl.float32) * call.scale
    if plan.FACTOR == "row" or plan.FACTOR == "log_n":
        factor += call.scale
    if plan.FACTOR == "log_n":
        factor = factor * gl.log(gl.maximum(count, 1).to(gl.float32))
    return factor


# A row of tiles is walked from its end: where rows end at the diagonal, most have one tile that is
# not seen whole, and it is the one with which each walk begins anyway.


@gluon.jit
def measure_keys(rows, tile, step, NTH: gl.constexpr):
    """The sums of the rows without values, and the steps so far."""
    plan = rows.call.plan
    j = tile.stop - 1
    sums, _ = rows.begin(rows.scores(step, True), j)
    step += 1
    j -= 1
    while j >= tile.full_stop:
        sums, _ = rows.measure(rows.scores(step, False), sums, j, True)
        step += 1
        j -= 1
    if plan.MOMENTS == "edges":
        row_layout: gl.constexpr = rows.low.type.layout
        if tile.careful == 0:
            store_moments(rows.call, tile, sums, row_layout, NTH)
        sums = without_moments(sums)
    while j >= tile.full_start:
        before = sums
        stop = tile.full_start
        if plan.RUN > 1:
            stop = gl.maximum(j - (plan.RUN - 1), stop)
            sums = begin_of_run(rows, sums)
        while j >= stop:
            sums, _ = rows.measure(rows.scores(step, False), sums, j, False)
            step += 1
            j -= 1
        if plan.RUN > 1:
            sums = end_of_run(rows, sums, before)
    if plan.LEFT:
        while j >= tile.start:
            sums, _ = rows.measure(rows.scores(step, False), sums, j, True)
            step += 1
            j -= 1
    return sums, step


@gluon.jit
def attend_keys(rows, tile, step, NTH: gl.constexpr):
    """The sums of the rows, O, and the steps so far."""
    plan = rows.call.plan
    o_layout: gl.constexpr = of_product(plan.TEAM, plan.V)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    # The last tile of keys comes first: nothing to multiply with V yet.
    j = tile.stop - 1
    sums, p = rows.begin(rows.scores(step, True), j)
    rows.wait_for_values(step, True)
    if plan.LENGTHS or plan.PACKED:
        clean(rows.values(step), tile.keys - j * plan.KEYS, plan)
    p = gl.convert_layout(p, p_layout)
    acc = gl.zeros([plan.TEAM, plan.V], gl.float32, o_layout)
    step += 1
    j -= 1
    while j >= tile.full_stop:
        sums, acc, p = attend_next(rows, j, step, sums, acc, p, True)
        step += 1
        j -= 1
    if plan.MOMENTS == "edges":
        row_layout: gl.constexpr = rows.low.type.layout
        if tile.careful == 0:
            store_moments(rows.call, tile, sums, row_layout, NTH)
        sums = without_moments(sums)
    if plan.RUN > 1:
        while j >= tile.full_start:
            before = sums
            stop = gl.maximum(j - (plan.RUN - 1), tile.full_start)
            sums = begin_of_run(rows, sums)
            while j >= stop:
                sums, acc, p = attend_next(rows, j, step, sums, acc, p, False)
                step += 1
                j -= 1
            sums = end_of_run(rows, sums, before)
    else:
        while j >= tile.full_start:
            sums, acc, p = attend_next(rows, j, step, sums, acc, p, False)
            step += 1
            j -= 1
    if plan.LEFT:
        while j >= tile.start:
            sums, acc, p = attend_next(rows, j, step, sums, acc, p, True)
            step += 1
            j -= 1
    rows.wait_for_values(step - 1, False)
    acc = warpgroup_mma(p, rows.values(step - 1), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    hand_back_values(step - 1, plan)
    return sums, acc, step


@gluon.jit
def attend_next(rows, j, step, sums, acc, p, MASKED: gl.constexpr):
    """S_j, and behind it P V of the tile before; then the softmax of S_j."""
    plan = rows.call.plan
    wait_for_keys(rows.pipe, step, rows.who, plan)
    wait_turn(rows.who, plan)
    s = rows.start_scores(step)
    rows.wait_for_values(step - 1, False)
    acc = warpgroup_mma(p, rows.values(step - 1), acc, is_async=True)
    pass_turn(rows.who, step, plan, ALONE=False)
    s, acc = warpgroup_mma_wait(1, deps=[s, acc])
    hand_back_keys(step, plan.TEAM // 16, plan)

    s = rows.seen(s, j, MASKED, MASKED)
    STEADY: gl.constexpr = plan.STEADY and not MASKED
    if not STEADY:
        move = rows.move(s, sums, MASKED)
        sums = rows.follow(sums, move, j, MASKED)
    if not plan.EARLY:
        sums, fresh = rows.add(s, sums, j, MASKED, STEADY, MASKED)
    acc = warpgroup_mma_wait(0, deps=[acc])  # in_place.py has waited; this tells the compiler
    hand_back_values(step - 1, plan)
    if not STEADY:
        acc = rescale(acc, move)
    if plan.EARLY:
        sums, fresh = rows.add(s, sums, j, MASKED, STEADY, MASKED)
    rows.wait_for_values(step, True)
    return sums, acc, gl.convert_layout(fresh, p.type.layout)


@gluon.jit
def clean(v, keys, plan):
    """Zeros behind the last of the values: what lies there is another's, and 0 * NaN is NaN.

    Each team writes the same, so they need not wait for each other.
    """
    if keys < plan.KEYS:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [plan.TEAM // 16, 1], [1, 0])
        values = v.load(layout)
        kept = gl.arange(0, plan.KEYS, gl.SliceLayout(1, layout)) < keys
        zero = gl.zeros([plan.KEYS, plan.V], plan.dtype, layout)
        v.store(gl.where(kept[:, None], values, zero))
        fence_async_shared()
        gl.thread_barrier()
