"""Attention on Hopper, with the statistics of each row from the same pass. Written in Gluon.

One program stays on each multiprocessor and works through tiles of rows. Two warps bring Q, K and V
into shared memory (producer.py); two to four consumer warpgroups own 64 rows each and run, for
every tile of keys j,

    S_j = Q K_j^T            on the tensor cores
    P_j, sums                softmax.py, or in_place.py
    O = alpha O + P_j V_j    on the tensor cores

(walk.py), then store what became of them (finish.py). Two more warps square query and keys for the
vitals (squares.py). The product P_(j-1) V_(j-1) is issued behind S_j, so a warpgroup asks the
tensor cores for two products in a row and then leaves them to the other warpgroups while it
computes exponentials. The same source gives the kernel without statistics, the one with them, and
the one for scores alone.

Two consumers, or four, are one team of eight or sixteen warps: they run the same instructions, each
at its own pace, so that those of all fit into the instruction caches. A team has a power of two of
warps, so three consumers are three teams, each with a copy. Nothing in a team's work may make all
of its warps meet (pipeline.py).

Full tiles are computed without looking for the largest score, the first one with a look at a few.
Tiles of rows for which that did not do are done once more at the end, carefully: a tile of keys
then never counts as full, and before the first comes one in which all is hidden.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from scaledot.backends.cuda.hopper.finish import finish, outgrown
from scaledot.backends.cuda.hopper.pipeline import (
    agreed,
    consumer_of_thread,
    either,
    hand_back_keys,
    hand_back_values,
    let_next_begin,
    new_pipe,
    one_per_thread,
    pass_turn,
    take_turns,
    wait_for_values,
)
from scaledot.backends.cuda.hopper.producer import load_keys, load_values
from scaledot.backends.cuda.hopper.schedule import Call, Plan
from scaledot.backends.cuda.hopper.softmax import of_product
from scaledot.backends.cuda.hopper.squares import square_0, square_1
from scaledot.backends.cuda.hopper.tasks import take, tell_missed
from scaledot.backends.cuda.hopper.walk import Rows, attend_keys, measure_keys, row_factor


@gluon.constexpr_function
def few_registers(plan):
    """Of a warp that computes no attention, where all who do are one team."""
    if plan.SQUARES == "no":
        return 24
    return 32 if plan.CONSUMERS == 4 else 40


@gluon.jit
def consume(call, pipe, NTH: gl.constexpr):
    """The NTH team: all consumers, or one of three. `who` is the consumer of each thread."""
    plan = call.plan
    warps: gl.constexpr = plan.TEAM // 16
    s_layout: gl.constexpr = of_product(plan.TEAM, plan.KEYS)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    zero = gl.zeros([plan.TEAM, plan.KEYS], gl.float32, s_layout)
    q = pipe.q.index(NTH).reshape([plan.TEAM, plan.D])
    who = consumer_of_thread(NTH, plan)
    take_turns(who, plan)
    step = 0
    careful = 0
    missed = -1
    outgrew = gl.zeros([plan.TEAM], gl.int32, row_layout)
    while missed != 0:
        there = 1
        while there != 0:
            tile, round, there = take(call, pipe, step, who)
            if there != 0:
                row = tile.row + NTH * plan.TEAM + gl.arange(0, plan.TEAM, row_layout)
                low, high = call.reach(tile, row)
                factor = row_factor(call, tile, high - low)
                rows = Rows(call, pipe, q, low, high, factor, zero, who)
                if plan.VALUES:
                    sums, acc, step = attend_keys(rows, tile, step, NTH)
                else:
                    sums, step = measure_keys(rows, tile, step, NTH)
                    acc = zero
                finish(call, tile, sums, acc, NTH)
                rows_out = gl.convert_layout(outgrown(call, tile, sums, acc, NTH), row_layout)
                outgrew = outgrew | (rows_out << (round & 31))
        pass_turn(who, step, plan, ALONE=True)
        missed = 0
        if careful == 0:
            missed = gl.reduce(outgrew, 0, either)
            if plan.TOGETHER:
                tell_missed(pipe, missed, plan)
        # A step without keys and values, see producer.py
        hand_back_keys(step, warps, plan)
        if plan.VALUES:
            wait_for_values(pipe, step, who, plan)
            hand_back_values(step, plan)
        else:
            hand_back_values(careful, plan)  # of no other step: one each time
        step += 1
        if not plan.TOGETHER and careful == 0:
            missed = agreed(one_per_thread(warps) + missed, plan)
        careful += 1


@gluon.jit
def consume_0(call, pipe):
    consume(call, pipe, 0)


@gluon.jit
def consume_1(call, pipe):
    consume(call, pipe, 1)


@gluon.jit
def consume_2(call, pipe):
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
    broken,
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
    IN_PLACE: gl.constexpr,
    CUT: gl.constexpr,
    RUN: gl.constexpr,
    FEW: gl.constexpr,
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
        IN_PLACE,
        CUT,
        RUN,
        FEW,
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
        broken,
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
        let_next_begin(plan.TEAM // 16)
    pipe = new_pipe(plan, q_desc, k_desc, v_desc)
    fence_async_shared()
    # Registers: 64 Ki for all; consumers get what the others leave, 232 or 240, or 160, or 112.
    if plan.TOGETHER:
        few: gl.constexpr = few_registers(plan)
        gl.warp_specialize(
            [
                (consume_0, (call, pipe)),
                (load_keys, (call, pipe, q_desc, k_desc)),
                (load_values, (call, pipe, v_desc)),
                (square_0, (call, pipe)),
                (square_1, (call, pipe)),
            ],
            [1, 1, 1, 1],
            [few, few, few, few],
        )
    else:
        gl.warp_specialize(
            [
                (consume_0, (call, pipe)),
                (consume_1, (call, pipe)),
                (consume_2, (call, pipe)),
                (load_keys, (call, pipe, q_desc, k_desc)),
                (load_values, (call, pipe, v_desc)),
                (square_0, (call, pipe)),
                (square_1, (call, pipe)),
            ],
            [4, 4, 1, 1, 1, 1],
            [160, 160, 32, 32, 32, 32],
        )
