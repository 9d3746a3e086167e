"""Attention on Hopper, with the statistics of each row from the same pass. Written in Gluon.

One program stays on each multiprocessor and works through tiles of rows. A producer warp brings Q,
K and V into shared memory; two or three consumer warpgroups own 64 rows each and run, for every
tile of keys j,

    S_j = Q K_j^T            on the tensor cores
    P_j, sums                softmax.py
    O = alpha O + P_j V_j    on the tensor cores

The product P_(j-1) V_(j-1) is issued behind S_j, so a warpgroup asks the tensor cores for two
products in a row and then leaves them to the other warpgroups while it computes exponentials. The
same source gives the kernel without statistics, the one with them, and the one for scores alone.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from scaledot.backends.cuda.hopper.pipeline import (
    FIRST_STAGE,
    hand_back,
    new_pipe,
    pass_turn,
    produce,
    wait_for,
    wait_turn,
)
from scaledot.backends.cuda.hopper.schedule import Call, Plan
from scaledot.backends.cuda.hopper.softmax import (
    INFINITY,
    LN2,
    LOG2E,
    add_tile,
    bend,
    by_row,
    no_sums,
    rescale,
)


@gluon.jit
def consume(call, pipe, WHO: gl.constexpr):
    plan = call.plan
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, plan.KEYS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, plan.V, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    zero = gl.zeros([64, plan.KEYS], gl.float32, s_layout)
    columns = gl.arange(0, plan.KEYS, gl.SliceLayout(0, s_layout))
    q = pipe.q.index(WHO).reshape([64, plan.D])
    if WHO == plan.CONSUMERS - 1:
        pass_turn(WHO, plan)  # the first goes first
    step = 0
    turn = 0
    for index in range(gl.program_id(0), call.tiles(), gl.num_programs(0)):
        tile = call.tile(index)
        row = tile.row + WHO * 64 + gl.arange(0, 64, row_layout)
        low, high = call.reach(tile, row)
        factor = row_factor(call, tile, high - low)
        mbarrier.wait(pipe.q_full.index(0), turn & 1)

        # The first tile of keys: nothing to multiply with V yet.
        j = tile.start
        s = scores(pipe, q, zero, step, plan)
        if plan.FACTOR != "no":
            s = bend(s, factor, call.cap, plan)
        visible = sees(columns, j, low, high, plan)
        if (j < tile.full_start) | (j >= tile.full_stop):
            s = gl.where(visible, s, -INFINITY)
        first = high * 0.0
        if plan.STATISTICS:
            first = gl.sum(gl.where((columns + j * plan.KEYS)[None, :] == 0, s, 0.0), 1)
        sums = no_sums(zero, row_layout)
        sums, _, p = add_tile(s, sums, visible, 0.0, scale_of(call), plan, True)
        p = gl.convert_layout(p, p_layout)
        acc = gl.zeros([64, plan.V], gl.float32, o_layout)
        step += 1
        j += 1

        reach = (low, high, columns)
        if plan.LEFT:
            while j < tile.full_start:
                sums, acc, p = advance(
                    call, pipe, q, zero, factor, reach, j, step, sums, acc, p, WHO, True
                )
                step += 1
                j += 1
        while j < tile.full_stop:
            sums, acc, p = advance(
                call, pipe, q, zero, factor, reach, j, step, sums, acc, p, WHO, False
            )
            step += 1
            j += 1
        while j < tile.stop:
            sums, acc, p = advance(
                call, pipe, q, zero, factor, reach, j, step, sums, acc, p, WHO, True
            )
            step += 1
            j += 1

        mbarrier.arrive(pipe.q_empty.index(0), count=1)
        if plan.VALUES:
            wait_for(pipe.v_full, step - 1, plan)
            v = pipe.v.index((step - 1) % plan.STAGES).reshape([plan.KEYS, plan.V])
            if plan.LENGTHS or plan.PACKED:
                clean(v, tile.keys - (j - 1) * plan.KEYS, plan)
            acc = warpgroup_mma(p, v, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            hand_back(step - 1, FIRST_STAGE + plan.STAGES, plan)
        turn += 1
        finish(call, tile, sums, acc, first, WHO)


@gluon.jit
def advance(
    call,
    pipe,
    q,
    zero,
    factor,
    reach,
    j,
    step,
    sums,
    acc,
    p,
    WHO: gl.constexpr,
    MASKED: gl.constexpr,
):
    """S_j, and behind it P_(j-1) V_(j-1); then the softmax of S_j."""
    plan = call.plan
    low, high, columns = reach
    wait_for(pipe.k_full, step, plan)
    wait_turn(WHO, plan)
    k = pipe.k.index(step % plan.STAGES).reshape([plan.KEYS, plan.D]).permute((1, 0))
    s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
    if plan.VALUES:
        wait_for(pipe.v_full, step - 1, plan)
        v = pipe.v.index((step - 1) % plan.STAGES).reshape([plan.KEYS, plan.V])
        acc = warpgroup_mma(p, v, acc, is_async=True)
        pass_turn(WHO, plan)
        s, acc = warpgroup_mma_wait(1, deps=[s, acc])
    else:
        pass_turn(WHO, plan)
        s = warpgroup_mma_wait(0, deps=[s])
    hand_back(step, FIRST_STAGE, plan)

    if plan.FACTOR != "no":
        s = bend(s, factor, call.cap, plan)
    visible = True
    before = j * (plan.KEYS // 4) * 1.0
    if MASKED:
        visible = sees(columns, j, low, high, plan)
        s = gl.where(visible, s, -INFINITY)
    if MASKED or plan.LEFT:
        met = gl.maximum(gl.minimum(high, j * plan.KEYS) - low, 0)
        before = by_row(met.to(gl.float32) * 0.25, sums.l)
    sums, alpha, fresh = add_tile(s, sums, visible, before, scale_of(call), plan, MASKED)

    if plan.VALUES:
        acc = warpgroup_mma_wait(0, deps=[acc])
        hand_back(step - 1, FIRST_STAGE + plan.STAGES, plan)
        acc = rescale(acc, alpha, plan.V)
        p = gl.convert_layout(fresh, p.type.layout)
    return sums, acc, p


@gluon.jit
def scores(pipe, q, zero, step, plan):
    wait_for(pipe.k_full, step, plan)
    k = pipe.k.index(step % plan.STAGES).reshape([plan.KEYS, plan.D]).permute((1, 0))
    s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    hand_back(step, FIRST_STAGE, plan)
    return s


@gluon.jit
def sees(columns, j, low, high, plan):
    """[64, KEYS]: which keys of tile j each row may see."""
    start = j * plan.KEYS
    inside = columns[None, :] < (high - start)[:, None]
    if plan.LEFT:
        inside = inside & (columns[None, :] >= (low - start)[:, None])
    return inside


@gluon.jit
def scale_of(call):
    """What is left to multiply scores with."""
    if call.plan.FACTOR != "no":
        return 1.0
    else:
        return call.scale


@gluon.jit
def row_factor(call, tile, count):
    """The scale of each row [64], log2 e in it; unused where one number serves."""
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


@gluon.jit
def clean(v, keys, plan):
    """Zeros behind the last of the values: what lies there is another's, and 0 * NaN is NaN.

    Each consumer writes the same, so they need not wait for each other.
    """
    if keys < plan.KEYS:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        values = v.load(layout)
        kept = gl.arange(0, plan.KEYS, gl.SliceLayout(1, layout)) < keys
        zero = gl.zeros([plan.KEYS, plan.V], plan.dtype, layout)
        v.store(gl.where(kept[:, None], values, zero))
        fence_async_shared()
        gl.thread_barrier()


@gluon.jit
def finish(call, tile, sums, acc, first, WHO: gl.constexpr):
    """From the sums to lse, the planes of statistics.py, and the output."""
    plan = call.plan
    layout: gl.constexpr = sums.m.type.layout
    row = tile.row + WHO * 64 + gl.arange(0, 64, layout)
    low, high = call.reach(tile, row)  # again: cheaper than to keep them all along
    l = gl.convert_layout(gl.sum(sums.l, 1), layout)
    blind = high <= low
    pivot = sums.pivot
    lse = pivot + gl.log2(l)
    sink = -INFINITY
    if plan.SINKS:
        at = tile.batch.to(gl.int64) * call.sink_batch + tile.head
        sink = gl.load(call.sinks + at).to(gl.float32) * LOG2E
        larger = gl.maximum(lse, sink)
        both = larger + gl.log2(gl.exp2(lse - larger) + gl.exp2(sink - larger))
        lse = gl.where(blind, -INFINITY, both)
    share = gl.exp2(pivot - lse)  # of a key at the pivot
    if not plan.SINKS:
        share = 1.0 / l

    inside = row < tile.queries
    entry = (tile.batch * call.heads + tile.head).to(gl.int64)
    place = entry * call.queries + tile.first_query + row
    gl.store(call.lse + place, gl.where(blind, -INFINITY, lse * LN2), mask=inside)
    if plan.STATISTICS:
        w = gl.convert_layout(gl.sum(sums.w, 1), layout)
        p2 = gl.convert_layout(gl.sum(sums.p2, 1), layout)
        top = sums.m * scale_of(call)
        broken = (w != w) | (l != l)
        # -sum p log2 p, every term counted from the lse
        entropy = share * (l * (lse - pivot) - w)
        squares = p2 * share * share
        if plan.SINKS:
            off = gl.exp2(sink - lse)
            entropy += gl.where(off > 0.0, off * (lse - sink), off)
            squares += off * off
        first_p = gl.where(low > 0, 0.0, gl.exp2(first * scale_of(call) - lse))
        n = gl.maximum(high - low, 0).to(gl.float32)
        plane = (call.batch * call.heads).to(gl.int64) * call.queries
        at = call.statistics + place
        gl.store(at, of_row(top * LN2, -INFINITY, blind, broken), mask=inside)
        gl.store(at + plane, of_row(lse * LN2, -INFINITY, blind, broken), mask=inside)
        entropy = gl.maximum(entropy * LN2, 0.0)
        gl.store(at + 2 * plane, of_row(entropy, 0.0, blind, broken), mask=inside)
        top_p = gl.exp2(top - lse)
        gl.store(at + 3 * plane, of_row(top_p, 0.0, blind, broken), mask=inside)
        gl.store(at + 4 * plane, of_row(squares, 0.0, blind, broken), mask=inside)
        gl.store(at + 5 * plane, of_row(first_p, 0.0, blind, broken), mask=inside)
        gl.store(at + 6 * plane, n, mask=inside)
        if plan.MOMENTS:
            a = gl.convert_layout(gl.sum(sums.a, 1), layout)
            b = gl.convert_layout(gl.sum(sums.b, 1), layout)
            mean = a / gl.maximum(n, 1.0)
            m2 = gl.maximum(b - a * mean, 0.0) * (LN2 * LN2)
            mean = (pivot + mean) * LN2
            gl.store(at + 7 * plane, of_row(mean, 0.0, blind, broken), mask=inside)
            gl.store(at + 8 * plane, of_row(m2, 0.0, blind, broken), mask=inside)
    if plan.VALUES:
        store_output(call, tile, acc, share, blind, WHO)


@gluon.jit
def of_row(values, empty, blind, broken):
    return gl.where(broken, float("nan"), gl.where(blind, empty, values))


@gluon.jit
def store_output(call, tile, acc, share, blind, WHO: gl.constexpr):
    plan = call.plan
    layout: gl.constexpr = rows_of_a_warp(plan.V)
    acc = gl.where(by_row(blind, acc), 0.0, acc * by_row(share, acc))
    out = gl.convert_layout(acc.to(plan.dtype), layout)
    row = tile.row + WHO * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
    column = gl.arange(0, plan.V, gl.SliceLayout(0, layout))
    inside = (row < tile.queries)[:, None]
    if plan.NARROW:
        inside = inside & (column < call.value_width)[None, :]
    start = tile.batch.to(gl.int64) * call.out_batch + tile.head.to(gl.int64) * call.out_head
    line = (tile.first_query + row).to(gl.int64) * (call.out_row * 8)
    gl.store(call.out + start * 8 + line[:, None] + column[None, :], out, mask=inside)


@gluon.constexpr_function
def rows_of_a_warp(width):
    """[64, width]: a warp owns 16 rows, as in a product's result, a thread 8 columns in a row.

    So nothing leaves its warp on the way to the output, and a store is 16 bytes wide.
    """
    columns = [[0, 1], [0, 2], [0, 4]]
    further = []
    column = 32
    while column < width:
        further.append([0, column])
        column *= 2
    return gl.DistributedLinearLayout(
        reg_bases=[*columns, [8, 0], *further],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, width],
    )


@gluon.jit
def consume_0(call, pipe, q_desc, k_desc, v_desc):
    consume(call, pipe, 0)


@gluon.jit
def consume_1(call, pipe, q_desc, k_desc, v_desc):
    consume(call, pipe, 1)


@gluon.jit
def consume_2(call, pipe, q_desc, k_desc, v_desc):
    consume(call, pipe, 2)


NUMBERS = [
    "batch",
    "heads",
    "group",
    "queries",
    "keys",
    "sequences",
    "value_width",
    "out_batch",
    "out_head",
    "out_row",
    "sink_batch",
    "scale_batch",
    "left",
    "right",
    "bottom_right",
]


@gluon.jit(do_not_specialize=NUMBERS)  # a size of 1 is a size, not another kernel
def attend(
    q_desc,
    k_desc,
    v_desc,
    out,
    lse,
    statistics,
    lengths,
    cu_q,
    cu_k,
    sinks,
    head_scale,
    batch,
    heads,
    group,
    queries,
    keys,
    sequences,
    value_width,
    out_batch,
    out_head,
    out_row,
    sink_batch,
    scale_batch,
    scale,
    cap,
    left,
    right,
    bottom_right,
    D: gl.constexpr,
    V: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    TURNS: gl.constexpr,
    VALUES: gl.constexpr,
    STATISTICS: gl.constexpr,
    MOMENTS: gl.constexpr,
    RIGHT: gl.constexpr,
    LEFT: gl.constexpr,
    LENGTHS: gl.constexpr,
    PACKED: gl.constexpr,
    SINKS: gl.constexpr,
    FACTOR: gl.constexpr,
    SOFTCAP: gl.constexpr,
    NARROW: gl.constexpr,
):
    plan = Plan(
        D,
        V,
        KEYS,
        STAGES,
        CONSUMERS,
        TURNS,
        VALUES,
        STATISTICS,
        MOMENTS,
        RIGHT,
        LEFT,
        LENGTHS,
        PACKED,
        SINKS,
        FACTOR,
        SOFTCAP,
        NARROW,
        q_desc.dtype,
    )
    call = Call(
        out,
        lse,
        statistics,
        lengths,
        cu_q,
        cu_k,
        sinks,
        head_scale,
        batch,
        heads,
        group,
        queries,
        keys,
        sequences,
        value_width,
        out_batch,
        out_head,
        out_row,
        sink_batch,
        scale_batch,
        scale,
        cap,
        left,
        right,
        bottom_right,
        plan,
    )
    pipe = new_pipe(plan, q_desc, k_desc, v_desc)
    fence_async_shared()
    # Registers: 64 Ki for all; a producer needs few, so that consumers get 240 or 160 each.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume_0, (call, pipe, q_desc, k_desc, v_desc)),
                (consume_1, (call, pipe, q_desc, k_desc, v_desc)),
                (produce, (call, pipe, q_desc, k_desc, v_desc)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consume_0, (call, pipe, q_desc, k_desc, v_desc)),
                (consume_1, (call, pipe, q_desc, k_desc, v_desc)),
                (consume_2, (call, pipe, q_desc, k_desc, v_desc)),
                (produce, (call, pipe, q_desc, k_desc, v_desc)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )
