"""The warps that bring tiles into shared memory: one for query and keys, one for values.

After the last tile of rows comes a step without keys, so that whoever waits for the next hears that
there is none; with its buffers comes back which rounds are to be done once more.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from scaledot.backends.cuda.hopper.pipeline import (
    KEYS_BACK,
    KEYS_READY,
    VALUE_WAITERS,
    VALUES_BACK,
    VALUES_READY,
    in_round,
    key_readers,
    key_waiters,
    meet,
    stage_of,
    tell,
    value_readers,
    wait_full,
)
from scaledot.backends.cuda.hopper.tasks import missed_rounds, publish, publish_end


@gluon.jit
def load_keys(call, pipe, q_desc, k_desc):
    """With the first keys of a tile of rows its task and its query: those before have then been
    read, since the last keys have been handed back."""
    plan = call.plan
    step = 0  # tiles of keys so far, of all tiles of rows
    careful = 0
    missed = -1  # rounds, a bit each, whose rows are still to be done: at first all
    while missed != 0:
        first = step  # of this time through all rounds: before it all buffers are free
        for round in range(call.rounds()):
            entry, block, there = call.place(round)
            if there and in_round(missed, round):
                tile = call.tile(entry, block, careful)
                number = tile.stop - tile.start
                if step > first:
                    _wait_for_keys_back(step - 1, plan)
                publish(pipe, tile, round)
                _copy_query(call, tile, q_desc, k_desc, pipe, step)
                _copy_keys(call, tile, 0, k_desc, pipe, step)
                if number > 1:
                    _expect_keys(k_desc, pipe, step + 1, plan)
                    _copy_keys(call, tile, 1, k_desc, pipe, step + 1)
                for back in range(number):
                    _tell_of_keys(pipe, step, plan)
                    if back > 0:
                        _wait_for_keys_back(step - 1, plan)
                        if back + 1 < number:
                            _expect_keys(k_desc, pipe, step + 1, plan)
                            _copy_keys(call, tile, back + 1, k_desc, pipe, step + 1)
                    step += 1
        if step > first:
            _wait_for_keys_back(step - 1, plan)
        publish_end(pipe)
        mbarrier.arrive(pipe.k_full.index(stage_of(step, plan)), count=1)
        _tell_of_keys(pipe, step, plan)
        _wait_for_keys_back(step, plan)
        step += 1
        missed = missed_rounds(pipe, careful, plan)
        careful += 1


@gluon.jit
def load_values(call, pipe, v_desc):
    plan = call.plan
    step = 0
    careful = 0
    missed = -1
    while missed != 0:
        if plan.VALUES:
            first = step
            for round in range(call.rounds()):
                entry, block, there = call.place(round)
                if there and in_round(missed, round):
                    tile = call.tile(entry, block, careful)
                    for back in range(tile.stop - tile.start):
                        if step >= first + plan.STAGES:
                            _wait_for_values_back(step - plan.STAGES, plan)
                        stage = stage_of(step, plan)
                        full = pipe.v_full.index(stage)
                        mbarrier.expect(full, v_desc.block_type.nbytes)
                        place = _place_of_keys(call, tile, back)
                        tma.async_copy_global_to_shared(v_desc, place, full, pipe.v.index(stage))
                        _tell_of_values(pipe, step, plan)
                        step += 1
            if step >= first + plan.STAGES:
                _wait_for_values_back(step - plan.STAGES, plan)
            mbarrier.arrive(pipe.v_full.index(stage_of(step, plan)), count=1)
            _tell_of_values(pipe, step, plan)
            if step > first:
                _wait_for_values_back(step - 1, plan)
        _wait_for_values_back(step, plan)  # without values, too: what was missed is known then
        step += 1
        missed = missed_rounds(pipe, careful, plan)
        careful += 1


@gluon.jit
def _copy_query(call, tile, q_desc, k_desc, pipe, step):
    plan = call.plan
    full = pipe.k_full.index(stage_of(step, plan))
    teams: gl.constexpr = plan.ROWS // plan.TEAM
    query_bytes: gl.constexpr = q_desc.block_type.nbytes * teams
    mbarrier.expect(full, k_desc.block_type.nbytes + query_bytes)
    for team in gl.static_range(teams):
        place = [tile.batch, tile.head, tile.first_query + tile.row + team * plan.TEAM, 0]
        tma.async_copy_global_to_shared(q_desc, place, full, pipe.q.index(team))


@gluon.jit
def _expect_keys(k_desc, pipe, step, plan):
    mbarrier.expect(pipe.k_full.index(stage_of(step, plan)), k_desc.block_type.nbytes)


@gluon.jit
def _copy_keys(call, tile, back, k_desc, pipe, step):
    stage = stage_of(step, call.plan)
    place = _place_of_keys(call, tile, back)
    tma.async_copy_global_to_shared(k_desc, place, pipe.k_full.index(stage), pipe.k.index(stage))


@gluon.jit
def _place_of_keys(call, tile, back):
    """Of the last tile but `back` that the rows meet."""
    last = tile.stop - 1
    j = last - back
    key = tile.first_key + j * call.plan.KEYS
    if call.plan.FEW:  # with care all of the first is hidden; what lies behind the keys is zeros
        key = gl.where((tile.careful != 0) & (j == last), call.keys, key)
    return [tile.batch, tile.head // call.group, key, 0]


@gluon.jit
def _wait_for_keys_back(step, plan):
    meet("sync", KEYS_BACK + stage_of(step, plan), 1, key_readers(plan))


@gluon.jit
def _wait_for_values_back(step, plan):
    meet("sync", VALUES_BACK + stage_of(step, plan), 1, value_readers(plan))


@gluon.jit
def _tell_of_keys(pipe, step, plan):
    """Consumers that cannot wait for an mbarrier."""
    if plan.TOGETHER:
        wait_full(pipe.k_full, step, plan)
        tell(KEYS_READY, step, key_waiters(plan), plan)


@gluon.jit
def _tell_of_values(pipe, step, plan):
    if plan.TOGETHER:
        wait_full(pipe.v_full, step, plan)
        tell(VALUES_READY, step, VALUE_WAITERS, plan)
