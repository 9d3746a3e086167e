"""The text that the assembler gets for a tile (hopper/in_place.py), carried out by hand.

No machine of these tests can run it, but its few instructions are soon interpreted.
"""

import re

import numpy as np
import pytest

from scaledot.backends import cuda

in_place = pytest.importorskip("scaledot.backends.cuda.hopper.in_place")
if cuda.backend.TRITON != (3, 6):
    pytest.skip("Gluon is that of triton 3.6", allow_module_level=True)

SCORES = 64  # of a thread: 32 of each of its two rows
EACH, L, W, P2, TOP, A, B, PIVOT, SCALE = (
    getattr(in_place, name) for name in ["EACH", "L", "W", "P2", "TOP", "A", "B", "PIVOT", "SCALE"]
)


def as_bits(x):
    return np.float32(x).view(np.int32)


OPERATIONS = {
    "mov.f32": lambda x: x,
    "neg.f32": lambda x: -x,
    "ex2.approx.ftz.f32": np.exp2,
    "add.f32": lambda x, y: x + y,
    "fma.rn.f32": lambda x, y, z: np.float32(np.float64(x) * np.float64(y) + np.float64(z)),
    "max.s32": lambda x, y: max(as_bits(x), as_bits(y)).view(np.float32),
}


def carried_out(text, registers):
    """All registers afterwards; a name that nothing was written to cannot be read."""
    registers = dict(registers)
    for statement in text.strip("{} ").split(";"):
        words = re.findall(r"[^\s,]+", statement)
        if not words or words[0] in (".reg", "setp.lt.s32", "@never") or "wait" in words[0]:
            continue
        operation, target, *sources = words
        registers[target] = np.float32(OPERATIONS[operation](*(registers[s] for s in sources)))
    return registers


def tile(moments, generator, order="lptwab", at_once=2, cut=0):
    """(scores, the state before, P, the state after) of one thread."""
    scores = generator.normal(size=SCORES).astype(np.float32)
    state = np.abs(generator.normal(size=SCORES)).astype(np.float32)
    state[EACH * SCALE :] = 0.7
    pivots = state[EACH * PIVOT :][:EACH]
    pivots[1], pivots[3] = pivots[0], pivots[2]  # of a row there is one
    registers = {f"${i}": number for i, number in enumerate(scores)}
    registers |= {f"${3 * SCORES + i}": number for i, number in enumerate(state)}
    after = carried_out(in_place.tile_text(SCORES, moments, order, at_once, cut), registers)
    p = np.array([after[f"${i}"] for i in range(SCORES)])
    return scores, state, p, after


WRITTEN = [  # sums of which order, how many scores at a time, the wait behind how many
    ("lptwab", 2, 0),
    ("lwtpab", 1, 0),
    ("pltwab", 4, 0),
    ("lwtpab", 1, 32),
    ("tpwlab", 4, 24),
    ("wtplab", 2, 8),
    ("lwtpab", 4, 64),
]


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("moments", [False, True])
def test_every_score_joins_every_sum_of_its_row(moments, written):
    scores, state, p, after = tile(moments, np.random.default_rng(3), *written)
    pivot, scale = state[EACH * PIVOT :], state[EACH * SCALE]
    for column in (0, 1):
        for row in (0, 1):
            place = 2 * row + column
            mine = np.array([i for i in range(SCORES) if i % EACH == place])
            u = scores[mine] * scale - pivot[2 * row]
            np.testing.assert_allclose(p[mine], np.exp2(u), rtol=1e-5)
            sums = {L: p[mine].sum(), W: (p[mine] * u).sum(), P2: (p[mine] ** 2).sum()}
            if moments:
                sums |= {A: u.sum(), B: (u * u).sum()}
            for kind, expected in sums.items():
                at = EACH * kind + place
                found = after[f"${SCORES + at}"]
                np.testing.assert_allclose(found, state[at] + expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("written", WRITTEN)
def test_the_largest_p_of_a_row_is_in_its_first_column(written):
    _, state, p, after = tile(False, np.random.default_rng(4), *written)
    for row in (0, 1):
        at = EACH * TOP + 2 * row
        of_row = [p[i] for i in range(SCORES) if i // 2 % 2 == row]
        assert after[f"${SCORES + at}"] == max(state[at], *of_row)
        assert after[f"${SCORES + at + 1}"] == state[at + 1]


def test_what_is_not_summed_is_not_touched():
    after = tile(False, np.random.default_rng(5))[3]
    written = {int(name[1:]) - SCORES for name in after if name.startswith("$")}
    written = {at for at in written if 0 <= at < SCORES}
    assert written == set(range(EACH * A))


@pytest.mark.parametrize("cut", [8, 24, 32, 64])
def test_the_wait_stands_behind_so_many_exponentials(cut):
    """A fence right before it; all sums before it only where all exponentials are."""
    text = in_place.tile_text(SCORES, False, "tpwlab", 4, cut)
    before, behind = text.split("wgmma.wait_group.sync.aligned 0;")
    assert before.endswith("@never pmevent 1;")
    assert before.count("ex2.approx") == cut
    assert behind.count("ex2.approx") == SCORES - cut
    assert bool(behind.count("add.f32")) == (cut < SCORES)


def test_nothing_is_awaited_where_nothing_is_on_its_way():
    text = in_place.tile_text(SCORES, True, "lptwab", 2, 0)
    assert "wgmma" not in text
    assert "pmevent" not in text
