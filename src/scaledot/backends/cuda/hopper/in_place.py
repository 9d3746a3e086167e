"""The softmax of a tile in which nothing is hidden, as one text for the assembler.

Written in Gluon, each sum of a tile is a new number, and the assembler has its own mind about their
order: it takes the exponentials first and leaves most sums to the end, where the units for
exponentials have nothing to do. Where it finds numbers that change in place, it puts the sums of a
score beside the exponential of a later one. So here is all of a tile (`Config.in_place`): scores
become P in their registers, and sums grow in theirs.

Where P V of the tile before is still on its way, the wait for it stands in the text, too, behind
`Config.cut` exponentials: left alone, the assembler waits where it first runs out of registers,
before that product is done. Sums come AHEAD exponentials after their own, so that those before the
wait need not be awaited there.

A thread has two of each sum and row, for even and for odd columns: one alone is a chain of
additions that wait for each other. They are kept as [m, 8] over a run of tiles, then join the
row's.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from scaledot.backends.cuda.hopper.softmax import (
    Sums,
    at_home,
    by_thread,
    first_columns,
    first_score,
    halves,
    joined,
    narrow,
    spread,
)

AHEAD = 8
EACH = 4  # numbers of a kind that a thread has: of even and odd columns, of two rows
L, W, P2, TOP, A, B, PIVOT, SCALE = range(8)  # the kinds, as they stand in the state


@gluon.jit
def begin_run(s, sums):
    """No sums yet, [m, 8]; s is a tile of scores, or as large."""
    none = gl.zeros_like(first_columns(s, 8))
    return Sums(sums.pivot, none, none, none, none, none, none, sums.first)


@gluon.jit
def end_run(sums, before):
    """Those of a run and of all before it, [m, 4]."""
    home: gl.constexpr = before.l.type.layout
    l = before.l + at_home(gl.sum(by_thread(sums.l), 2), home)
    w = before.w + at_home(gl.sum(by_thread(sums.w), 2), home)
    p2 = before.p2 + at_home(gl.sum(by_thread(sums.p2), 2), home)
    a = before.a + at_home(gl.sum(by_thread(sums.a), 2), home)
    b = before.b + at_home(gl.sum(by_thread(sums.b), 2), home)
    top = gl.maximum(before.top, at_home(gl.max(by_thread(sums.top), 2), home))
    return Sums(sums.pivot, l, w, p2, a, b, top, sums.first)


@gluon.jit
def add_in_place(s, sums, scale, plan, MOMENTS: gl.constexpr):
    """The sums of a run with one more tile of scores, and P in the type of the values. Unless that
    was awaited before, or never asked for, P V of the tile before is there then."""
    first = first_score(s, sums.first)
    pivot = spread(sums.pivot, sums.l)
    scale = gl.zeros_like(sums.l) + scale
    state = joined(
        joined(joined(sums.l, sums.w), joined(sums.p2, sums.top)),
        joined(joined(sums.a, sums.b), joined(pivot, scale)),
    )
    n: gl.constexpr = s.shape[1] // 2  # scores of a thread
    CUT: gl.constexpr = plan.CUT if plan.VALUES and not plan.EARLY else 0
    p, state = gl.inline_asm_elementwise(
        tile_text(n, MOMENTS, plan.ORDER, plan.AT_ONCE, CUT),
        tile_constraints(n),
        [s, as_wide_as(s, state)],
        dtype=(gl.float32, gl.float32),
        is_pure=CUT == 0,
        pack=n,
    )
    left, right = halves(first_columns(state, 64))
    lw, pt = halves(left)
    l, w = halves(lw)
    p2, top = halves(pt)
    a = sums.a
    b = sums.b
    if MOMENTS:
        a, b = halves(halves(right)[0])
    return Sums(sums.pivot, l, w, p2, a, b, top, first), narrow(p, plan.dtype)


@gluon.jit
def as_wide_as(s, state):
    """What is more is never looked at: all tensors of an assembler's text have one shape."""
    if state.shape[1] == s.shape[1]:
        return state
    else:
        return as_wide_as(s, joined(state, state))


@gluon.constexpr_function
def tile_constraints(n):
    """P, which takes the scores' places; the state after; the scores; the state before."""
    return ",".join(["=f"] * n + ["=&f"] * n + [str(i) for i in range(n)] + ["f"] * n)


@gluon.constexpr_function
def tile_text(n, moments, order, at_once, cut):
    """n scores of a thread: two columns of one row, the same two of the other, the next two.

    `at_once` of them join one sum before the next, in `order`. cut: 0, or how many exponentials
    come before the wait. Nothing is moved over a `pmevent`, even one that never comes.
    """
    ahead = AHEAD if cut else 0
    kinds = [kind for kind in order if moments or kind not in "ab"]
    parts = []
    for start in range(0, n + ahead, at_once):
        few = range(start, min(start + at_once, n))
        summed = range(max(start - ahead, 0), max(start - ahead + at_once, 0))
        parts.append(_powers(few) + _sums(n, summed, kinds))
    text = "{ .reg .pred never; .reg .b32 larger; .reg .f32 scale, below0, below1;"
    text += "".join(f".reg .f32 u{i};" for i in range(n))
    for i in range(EACH * (PIVOT if moments else A)):
        text += f"mov.f32 ${n + i}, {_before(n, 0, i)};"
    text += f"mov.f32 scale, {_before(n, SCALE, 0)};"
    text += f"neg.f32 below0, {_before(n, PIVOT, 0)}; neg.f32 below1, {_before(n, PIVOT, 2)};"
    if cut:
        fence = "@never pmevent 1;"
        text += f"setp.lt.s32 never, {_before(n, TOP, 0)}, 0; {fence}"  # P is not negative
        wait = fence + "wgmma.wait_group.sync.aligned 0;"
        parts.insert(cut // at_once if cut < n else len(parts), wait)
    return text + "".join(parts) + "}"


@gluon.constexpr_function
def _powers(few):
    exponents = (f"fma.rn.f32 u{i}, ${i}, scale, below{i // 2 % 2};" for i in few)
    return "".join([*exponents, *(f"ex2.approx.ftz.f32 ${i}, u{i};" for i in few)])


@gluon.constexpr_function
def _sums(n, few, kinds):
    def total(kind, i):
        return f"${n + EACH * kind + i % EACH}"

    text = ""
    for kind in kinds:
        for i in few:
            p, u = f"${i}", f"u{i}"
            if kind == "l":
                text += f"add.f32 {total(L, i)}, {total(L, i)}, {p};"
            if kind == "p":
                text += f"fma.rn.f32 {total(P2, i)}, {p}, {p}, {total(P2, i)};"
            if kind == "w":
                text += f"fma.rn.f32 {total(W, i)}, {p}, {u}, {total(W, i)};"
            if kind == "a":
                text += f"add.f32 {total(A, i)}, {total(A, i)}, {u};"
            if kind == "b":
                text += f"fma.rn.f32 {total(B, i)}, {u}, {u}, {total(B, i)};"
            if kind == "t" and i % 2 == 1:
                # Not negative, so in order as integers: three at a time.
                top = total(TOP, i - 1)
                text += f"max.s32 larger, ${i - 1}, {p}; max.s32 {top}, {top}, larger;"
    return text


@gluon.constexpr_function
def _before(n, kind, i):
    """A number of the state before the tile."""
    return f"${3 * n + EACH * kind + i}"
