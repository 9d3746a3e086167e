"""Shared memory between those who fill it and those who read it, and how they wait for each other.

The tensor memory accelerator signals a full buffer through an mbarrier. All else is said through
the multiprocessor's named barriers: at an operation on an mbarrier the compiler makes all warps of
a team meet first, a named barrier's arrival stops nobody. So where all consumers are one team,
whoever filled a buffer waits for it, too, and tells each consumer by a named barrier.

A named barrier counts threads and knows no phases: nobody may arrive at one for the next time
before all have for this time. Hence one for each stage.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

# Numbers of named barriers. Triton takes 0 and 1, then one for each team but the first, which those
# of one warp do not use.
KEYS_READY = gl.constexpr(4)  # one a consumer and stage; for consumers that are one team
VALUES_READY = gl.constexpr(8)  # the same; four consumers have no values, and eight of the keys
KEYS_BACK = gl.constexpr(12)  # one a stage
VALUES_BACK = gl.constexpr(14)
TURN = gl.constexpr(6)  # one a consumer, of three teams
AGREEMENT = 9  # of three teams
VALUE_WAITERS = gl.constexpr(128 + 32)  # threads: a consumer and whoever tells it


@aggregate
class Pipe:
    q: gl.shared_memory_descriptor  # [teams, 1, 1, TEAM, D]
    k: gl.shared_memory_descriptor  # [STAGES, 1, 1, KEYS, D]
    v: gl.shared_memory_descriptor  # [STAGES, 1, 1, KEYS, V]
    k_full: gl.shared_memory_descriptor  # for the first keys of a tile of rows: the query, too
    v_full: gl.shared_memory_descriptor
    task: gl.shared_memory_descriptor  # [16], see tasks.py
    missed: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, k, v, k_full, v_full, task, missed):
        self.q = q
        self.k = k
        self.v = v
        self.k_full = k_full
        self.v_full = v_full
        self.task = task
        self.missed = missed


@gluon.jit
def new_pipe(plan, q_desc, k_desc, v_desc):
    gl.static_assert(plan.STAGES == 2, "a loader is one step ahead, and barriers are numbered so")
    gl.static_assert(plan.CONSUMERS >= 2, "one team, or three")
    gl.static_assert(plan.CONSUMERS <= 4, "one team, or three")
    gl.static_assert(plan.CONSUMERS < 4 or not plan.VALUES, "no barriers are left for values")
    gl.static_assert(plan.CONSUMERS < 4 or not plan.TURNS, "turns are between two, or three teams")
    gl.static_assert(plan.RUN > 1 or not plan.IN_PLACE, "in place sums grow over a run")
    D: gl.constexpr = plan.D
    V: gl.constexpr = plan.V
    KEYS: gl.constexpr = plan.KEYS
    teams: gl.constexpr = plan.ROWS // plan.TEAM
    q = gl.allocate_shared_memory(plan.dtype, [teams, 1, 1, plan.TEAM, D], q_desc.layout)
    k = gl.allocate_shared_memory(plan.dtype, [plan.STAGES, 1, 1, KEYS, D], k_desc.layout)
    v = gl.allocate_shared_memory(plan.dtype, [plan.STAGES, 1, 1, KEYS, V], v_desc.layout)
    task = gl.allocate_shared_memory(gl.int32, [16], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    missed = gl.allocate_shared_memory(gl.int32, [16], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Pipe(q, k, v, new_barriers(plan.STAGES), new_barriers(plan.STAGES), task, missed)


@gluon.jit
def new_barriers(number: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(barriers.index(i), count=1)
    return barriers


@gluon.jit
def stage_of(step, plan):
    """Which buffer. By a mask: consumers wait for the number before each product."""
    return step & (plan.STAGES - 1)


@gluon.jit
def wait_full(full, step, plan):
    """The buffer of a step is full when its mbarrier has turned over once more."""
    mbarrier.wait(full.index(stage_of(step, plan)), (step // plan.STAGES) & 1)


@gluon.jit
def wait_for_keys(pipe, step, who, plan):
    """A consumer, for the keys of a step; before the first of a tile of rows, its task and query.
    Where consumers are one team and take turns: for its turn, too.

    who: the number of the thread's consumer, see `consumer_of_thread`.
    """
    if plan.TOGETHER:
        number = who * plan.STAGES + (stage_of(step, plan) + KEYS_READY)
        _named_barrier(number, barrier_text("sync", key_waiters(plan)))
    else:
        wait_full(pipe.k_full, step, plan)


@gluon.jit
def wait_for_values(pipe, step, who, plan):
    if plan.TOGETHER:
        number = who * plan.STAGES + (stage_of(step, plan) + VALUES_READY)
        _named_barrier(number, barrier_text("sync", VALUE_WAITERS))
    else:
        wait_full(pipe.v_full, step, plan)


@gluon.jit
def tell(NUMBER: gl.constexpr, step, THREADS: gl.constexpr, plan):
    """Each consumer that what it waits for is there."""
    for who in gl.static_range(plan.CONSUMERS):
        meet("arrive", who * plan.STAGES + (stage_of(step, plan) + NUMBER), 1, THREADS)


@gluon.jit
def hand_back_keys(step, WARPS: gl.constexpr, plan):
    """So many warps have read the keys of a step."""
    meet("arrive", KEYS_BACK + stage_of(step, plan), WARPS, key_readers(plan))


@gluon.jit
def hand_back_values(step, plan):
    meet("arrive", VALUES_BACK + stage_of(step, plan), plan.TEAM // 16, value_readers(plan))


@gluon.constexpr_function
def key_readers(plan):
    """Threads: consumers, the warp that loads, the two that square."""
    return 128 * plan.CONSUMERS + 32 + (0 if plan.SQUARES == "no" else 64)


@gluon.constexpr_function
def value_readers(plan):
    return 128 * plan.CONSUMERS + 32


@gluon.constexpr_function
def key_waiters(plan):
    """Threads: a consumer, whoever tells it, and the other consumer, if that passes on the turn."""
    return 128 + 32 + (128 if plan.TURNS else 0)


@gluon.jit
def wait_turn(who, plan):
    if plan.TURNS and not plan.TOGETHER:  # else it comes with the keys
        _named_barrier(who + TURN, barrier_text("sync", 256))


@gluon.jit
def pass_turn(who, step, plan, ALONE: gl.constexpr):
    """The first consumer's turn goes to the second one's same step, that to the first one's next.
    So none is two steps ahead of the other, and nobody arrives at a barrier twice.

    ALONE: at a step with S alone or nothing at all, at which three teams take no turns.
    """
    if plan.TURNS:
        if plan.TOGETHER:
            number = (1 - who) * plan.STAGES + (stage_of(step + who, plan) + KEYS_READY)
            _named_barrier(number, barrier_text("arrive", key_waiters(plan)))
        elif not ALONE:
            _named_barrier((who + 1) % plan.CONSUMERS + TURN, barrier_text("arrive", 256))


@gluon.jit
def take_turns(who, plan):
    """The first goes first."""
    if plan.TURNS:
        if plan.TOGETHER:
            _named_barrier(who, last_text(1, KEYS_READY, key_waiters(plan)))
        else:
            _named_barrier(who, last_text(plan.CONSUMERS - 1, TURN, 256))


@gluon.constexpr_function
def last_text(last, number, threads):
    return (
        f"{{ .reg .pred last; setp.eq.s32 last, $1, {last}; @last bar.arrive {number}, {threads};"
        "mov.b32 $0, $1; }"
    )


@gluon.jit
def consumer_of_thread(NTH: gl.constexpr, plan):
    if plan.TOGETHER:
        layout: gl.constexpr = one_each(plan.TEAM // 16)
        return gl.arange(0, 2 * plan.TEAM, layout) // 128
    else:
        return one_per_thread(4) + NTH


@gluon.jit
def meet(WHAT: gl.constexpr, number, WARPS: gl.constexpr, THREADS: gl.constexpr):
    _named_barrier(one_per_thread(WARPS) + number, barrier_text(WHAT, THREADS))


@gluon.jit
def one_per_thread(WARPS: gl.constexpr):
    return gl.full([32 * WARPS], 0, gl.int32, one_each(WARPS))


@gluon.constexpr_function
def one_each(warps):
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.jit
def _named_barrier(number, text: gl.constexpr):
    gl.inline_asm_elementwise(
        text, "=r,r,~{memory}", [number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def barrier_text(what, threads):
    return f"bar.{what} $1, {threads}; mov.b32 $0, $1;"


@gluon.jit
def let_next_begin(WARPS: gl.constexpr):
    """Programs of the next launch, if it was made for that (launching.enter), may begin as soon as
    all of this one have: they get the multiprocessors that it leaves first."""
    text: gl.constexpr = "griddepcontrol.launch_dependents; mov.b32 $0, $1;"
    _named_barrier(one_per_thread(WARPS), text)


@gluon.jit
def in_round(bits, round):
    """Rounds 32 apart share a bit."""
    return ((bits >> (round & 31)) & 1) == 1


@gluon.jit
def agreed(bits, plan):
    """The bits that any thread of the program has set. [threads]; all of them meet here."""
    text: gl.constexpr = agreement_text(key_readers(plan) + 32)
    any = gl.inline_asm_elementwise(text, "=&r,r", [bits], dtype=gl.int32, is_pure=False, pack=1)
    return gl.reduce(any, 0, either)


@gluon.jit
def either(a, b):
    return a | b


@gluon.constexpr_function
def agreement_text(threads):
    """First whether there is any bit; as a rule there is none."""
    meet = f"bar.red.or.pred any, {AGREEMENT}, {threads}, mine;"
    bits = ""
    for i in range(32):
        bits += f"and.b32 one, $1, {1 << i}; setp.ne.b32 mine, one, 0; {meet}"
        bits += f"@any or.b32 $0, $0, {1 << i};"
    return (
        "{ .reg .pred mine, any; .reg .b32 one; mov.b32 $0, 0; setp.ne.b32 mine, $1, 0;"
        f"{meet} @!any bra.uni DONE; {bits} DONE: }}"
    )
