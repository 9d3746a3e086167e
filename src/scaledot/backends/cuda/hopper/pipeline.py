"""Shared memory between the producer and the consumers, and how they wait for each other.

The tensor memory accelerator signals a full buffer through an mbarrier. Consumers hand a buffer
back, and hand each other the turn at the tensor cores, through the multiprocessor's named barriers:
an `mbarrier.arrive` would stop the whole warpgroup first, a named barrier's arrival does not.
Triton itself uses the numbers 0 to 4 in a kernel of four partitions.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

FIRST_TURN = 5  # one number a consumer
FIRST_STAGE = gl.constexpr(8)  # one a stage of keys, then one a stage of values
AGREEMENT = 15


@aggregate
class Pipe:
    q: gl.shared_memory_descriptor  # [CONSUMERS, 1, 1, 64, D]
    k: gl.shared_memory_descriptor  # [STAGES, 1, 1, KEYS, D]
    v: gl.shared_memory_descriptor  # [STAGES, 1, 1, KEYS, V]
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, k, v, q_full, q_empty, k_full, v_full):
        self.q = q
        self.k = k
        self.v = v
        self.q_full = q_full
        self.q_empty = q_empty
        self.k_full = k_full
        self.v_full = v_full


@gluon.jit
def new_pipe(plan, q_desc, k_desc, v_desc):
    gl.static_assert(plan.STAGES <= 3, "the next number of a barrier is taken")
    D: gl.constexpr = plan.D
    V: gl.constexpr = plan.V
    KEYS: gl.constexpr = plan.KEYS
    CONSUMERS: gl.constexpr = plan.CONSUMERS
    q = gl.allocate_shared_memory(plan.dtype, [CONSUMERS, 1, 1, 64, D], q_desc.layout)
    k = gl.allocate_shared_memory(plan.dtype, [plan.STAGES, 1, 1, KEYS, D], k_desc.layout)
    v = gl.allocate_shared_memory(plan.dtype, [plan.STAGES, 1, 1, KEYS, V], v_desc.layout)
    return Pipe(
        q,
        k,
        v,
        new_barriers(1, 1),
        new_barriers(1, CONSUMERS),
        new_barriers(plan.STAGES, 1),
        new_barriers(plan.STAGES, 1),
    )


@gluon.jit
def new_barriers(number: gl.constexpr, arrivals: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(barriers.index(i), count=arrivals)
    return barriers


@gluon.jit
def wait_for_keys(pipe, step, plan):
    _wait_for(pipe.k_full, step, plan)


@gluon.jit
def wait_for_values(pipe, step, plan):
    _wait_for(pipe.v_full, step, plan)


@gluon.jit
def _wait_for(full, step, plan):
    """The buffer of a step is full when its barrier has turned over once more."""
    mbarrier.wait(full.index(step % plan.STAGES), (step // plan.STAGES) & 1)


@gluon.jit
def let_next_begin():
    """Programs of the next launch, if it was made for that (launching.enter), may begin as soon as
    all of this one have: they get the multiprocessors that it leaves first."""
    text: gl.constexpr = "griddepcontrol.launch_dependents; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(
        text, "=r,r", [one_per_thread()], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def in_round(bits, round):
    """Rounds 32 apart share a bit."""
    return ((bits >> (round & 31)) & 1) == 1


@gluon.jit
def agreed(bits, plan):
    """The bits that any thread of the program has set. [threads]; all of them meet here."""
    any = gl.inline_asm_elementwise(
        agreement_text(plan.CONSUMERS), "=&r,r", [bits], dtype=gl.int32, is_pure=False, pack=1
    )
    return gl.reduce(any, 0, either)


@gluon.jit
def either(a, b):
    return a | b


@gluon.constexpr_function
def agreement_text(consumers):
    """First whether there is any bit; as a rule there is none."""

    def meet():
        return f"bar.red.or.pred any, {AGREEMENT}, {128 * consumers + 128}, mine;"

    bits = ""
    for i in range(32):
        bits += f"and.b32 one, $1, {1 << i}; setp.ne.b32 mine, one, 0; {meet()}"
        bits += f"@any or.b32 $0, $0, {1 << i};"
    return (
        "{ .reg .pred mine, any; .reg .b32 one; mov.b32 $0, 0; setp.ne.b32 mine, $1, 0;"
        f"{meet()} @!any bra.uni DONE; {bits} DONE: }}"
    )


@gluon.jit
def hand_back_keys(step, plan):
    """A consumer has read the keys of a step."""
    number = one_per_thread() + (step % plan.STAGES + FIRST_STAGE)
    named_barrier(number, handed_back("arrive", plan.CONSUMERS))


@gluon.jit
def hand_back_values(step, plan):
    number = one_per_thread() + (step % plan.STAGES + FIRST_STAGE + plan.STAGES)
    named_barrier(number, handed_back("arrive", plan.CONSUMERS))


@gluon.jit
def wait_turn(WHO: gl.constexpr, plan):
    if plan.TURNS:
        named_barrier(one_per_thread(), turn("sync", WHO))


@gluon.jit
def pass_turn(WHO: gl.constexpr, plan):
    if plan.TURNS:
        named_barrier(one_per_thread(), turn("arrive", (WHO + 1) % plan.CONSUMERS))


@gluon.jit
def one_per_thread():
    return gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def named_barrier(number, text: gl.constexpr):
    gl.inline_asm_elementwise(text, "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def handed_back(what, consumers):
    """All consumers and the producer meet."""
    return f"bar.{what} $1, {128 * consumers + 128}; mov.b32 $0, $1;"


@gluon.constexpr_function
def turn(what, who):
    """The consumer whose turn it is and the one before it meet."""
    return f"bar.{what} {FIRST_TURN + who}, 256; mov.b32 $0, $1;"
