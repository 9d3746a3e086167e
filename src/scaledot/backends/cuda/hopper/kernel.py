"""Attention on Hopper, with the statistics of each row from the same pass. Written in Gluon.

One program stays on each multiprocessor and works through tiles of rows. A producer warp brings Q,
K and V into shared memory; two or three consumer warpgroups own 64 rows each and run, for every
tile of keys j,

    S_j = Q K_j^T            on the tensor cores
    P_j, sums                softmax.py
    O = alpha O + P_j V_j    on the tensor cores

(walk.py), then store what became of them (finish.py). The product P_(j-1) V_(j-1) is issued behind
S_j, so a warpgroup asks the tensor cores for two products in a row and then leaves them to the
other warpgroups while it computes exponentials. The same source gives the kernel without
statistics, the one with them, and the one for scores alone.

Full tiles are computed without looking for the largest score. Tiles of rows for which that did not
do are done once more at the end, carefully: a tile of keys then never counts as full.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from scaledot.backends.cuda.hopper.finish import finish, outgrown
from scaledot.backends.cuda.hopper.pipeline import (
    agreed,
    either,
    in_round,
    let_next_begin,
    new_pipe,
    one_per_thread,
    pass_turn,
)
from scaledot.backends.cuda.hopper.producer import produce
from scaledot.backends.cuda.hopper.schedule import Call, Plan
from scaledot.backends.cuda.hopper.walk import Rows, attend_keys, measure_keys, row_factor


@gluon.jit
def consume(call, pipe, WHO: gl.constexpr):
    plan = call.plan
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, plan.KEYS, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    zero = gl.zeros([64, plan.KEYS], gl.float32, s_layout)
    columns = gl.arange(0, plan.KEYS, gl.SliceLayout(0, s_layout))
    q = pipe.q.index(WHO).reshape([64, plan.D])
    if WHO == plan.CONSUMERS - 1:
        pass_turn(WHO, plan)  # the first goes first
    step = 0
    turn = 0
    careful = 0
    missed = -1  # rounds, a bit each, whose rows are still to be done: at first all
    outgrew = gl.zeros([64], gl.int32, row_layout)
    while missed != 0:
        for round in range(call.rounds()):
            entry, block, there = call.place(round)
            if there and in_round(missed, round):
                tile = call.tile(entry, block, careful)
                low, high = call.reach(tile, tile.row + WHO * 64 + gl.arange(0, 64, row_layout))
                factor = row_factor(call, tile, high - low)
                rows = Rows(call, pipe, q, low, high, factor, columns, zero)
                mbarrier.wait(pipe.q_full.index(0), turn & 1)
                if plan.VALUES:
                    sums, acc, step = attend_keys(rows, tile, step, WHO)
                else:
                    sums, step = measure_keys(rows, tile, step, WHO)
                    acc = zero
                finish(call, tile, sums, acc, WHO)
                if plan.STEADY:
                    rows_out = gl.convert_layout(outgrown(call, tile, sums, acc, WHO), row_layout)
                    outgrew = outgrew | (rows_out << (round & 31))
                turn += 1
        missed = 0
        if plan.STEADY and careful == 0:
            missed = agreed(one_per_thread() + gl.reduce(outgrew, 0, either), plan)
        careful += 1


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
    "section",
    "block",
]


@gluon.jit(do_not_specialize=NUMBERS)  # a size of 1 is a size, not another kernel
def attend(
    q_desc,
    k_desc,
    v_desc,
    out,
    lse,
    statistics,
    squares,
    key_squares,
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
    section,
    block,
    D: gl.constexpr,
    V: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    TURNS: gl.constexpr,
    EARLY: gl.constexpr,
    QUARTERS: gl.constexpr,
    ORDER: gl.constexpr,
    AT_ONCE: gl.constexpr,
    RUN: gl.constexpr,
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
    SQUARES: gl.constexpr,
):
    plan = Plan(
        D,
        V,
        KEYS,
        STAGES,
        CONSUMERS,
        TURNS,
        EARLY,
        QUARTERS,
        ORDER,
        AT_ONCE,
        RUN,
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
        SQUARES,
        q_desc.dtype,
    )
    call = Call(
        out,
        lse,
        statistics,
        squares,
        key_squares,
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
        section,
        block,
        plan,
    )
    if STATISTICS:
        let_next_begin()
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
            [4, 4],
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
            [4, 4, 4],
            [160, 160, 32],
        )
