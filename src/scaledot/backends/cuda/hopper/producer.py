"""The warpgroup that brings tiles into shared memory, and measures what the consumers need not."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from scaledot.backends.cuda.hopper.pipeline import (
    FIRST_STAGE,
    agreed,
    handed_back,
    in_round,
    named_barrier,
    one_per_thread,
)
from scaledot.backends.cuda.hopper.squares import square_keys, square_query


@gluon.jit
def produce(call, pipe, q_desc, k_desc, v_desc):
    plan = call.plan
    step = 0  # tiles of keys so far, of all tiles of rows
    turn = 0  # tiles of rows so far
    careful = 0
    missed = -1
    while missed != 0:
        for round in range(call.rounds()):
            entry, block, there = call.place(round)
            if there and in_round(missed, round):
                tile = call.tile(entry, block, careful)
                key_head = tile.head // call.group
                mbarrier.wait(pipe.q_empty.index(0), (turn & 1) ^ 1)
                mbarrier.expect(pipe.q_full.index(0), q_desc.block_type.nbytes * plan.CONSUMERS)
                for part in gl.static_range(plan.CONSUMERS):
                    place = [tile.batch, tile.head, tile.first_query + tile.row + part * 64, 0]
                    full = pipe.q_full.index(0)
                    tma.async_copy_global_to_shared(q_desc, place, full, pipe.q.index(part))
                for back in range(tile.stop - tile.start):
                    j = tile.stop - 1 - back
                    place = [tile.batch, key_head, tile.first_key + j * plan.KEYS, 0]
                    _fill(k_desc, place, pipe.k, pipe.k_full, step, FIRST_STAGE, plan)
                    if plan.VALUES:
                        number: gl.constexpr = FIRST_STAGE + plan.STAGES
                        _fill(v_desc, place, pipe.v, pipe.v_full, step, number, plan)
                    if plan.SQUARES == "both":
                        square_keys(call, tile, j, pipe, step)
                    step += 1
                if plan.SQUARES != "no":
                    square_query(call, tile, pipe, turn)
                turn += 1
        missed = 0
        if plan.STEADY and careful == 0:
            missed = agreed(one_per_thread(), plan)
        careful += 1


@gluon.jit
def _fill(desc, place, buffers, full, step, FIRST: gl.constexpr, plan):
    stage = step % plan.STAGES
    if step >= plan.STAGES:  # once around, every buffer has to be handed back first
        number = one_per_thread() + (stage + FIRST)
        named_barrier(number, handed_back("sync", plan.CONSUMERS))
    mbarrier.expect(full.index(stage), desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, place, full.index(stage), buffers.index(stage))
