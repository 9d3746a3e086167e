"""The softmax of a tile in which nothing is hidden, as one text for the assembler.

Written in Gluon, each sum of a tile is a new number, and the assembler has its own mind about their
order: it takes the exponentials first and leaves most sums to the end, where the units for
exponentials have nothing to do. Where it finds numbers that change in place, it puts the sums of a
score beside the exponential of a later one, in whatever order they are written. So here is all of a
tile (`Config.in_place`): scores become P in their registers, and sums grow in theirs.

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
    """The sums of a run with one more tile of scores, and P in the type of the values."""
    first = first_score(s, sums.first)
    pivot = spread(sums.pivot, sums.l)
    scale = gl.zeros_like(sums.l) + scale
    state = joined(
        joined(joined(sums.l, sums.w), joined(sums.p2, sums.top)),
        joined(joined(sums.a, sums.b), joined(pivot, scale)),
    )
    n: gl.constexpr = s.shape[1] // 2  # scores of a thread
    p, state = gl.inline_asm_elementwise(
        tile_text(n, MOMENTS),
        tile_constraints(n),
        [s, as_wide_as(s, state)],
        dtype=(gl.float32, gl.float32),
        is_pure=True,
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
def tile_text(n, moments):
    """n scores of a thread: two columns of one row, the same two of the other, the next two."""

    def total(kind, i):
        return f"${n + EACH * kind + i % EACH}"

    def before(kind, i):
        return f"${3 * n + EACH * kind + i}"

    text = "{ .reg .b32 larger; .reg .f32 scale, below0, below1;"
    text += "".join(f".reg .f32 u{i};" for i in range(n))
    for i in range(EACH * (PIVOT if moments else A)):
        text += f"mov.f32 ${n + i}, {before(0, i)};"
    text += f"mov.f32 scale, {before(SCALE, 0)};"
    text += f"neg.f32 below0, {before(PIVOT, 0)}; neg.f32 below1, {before(PIVOT, 2)};"
    for i in range(0, n, 2):
        j = i + 1
        for k in (i, j):
            text += f"fma.rn.f32 u{k}, ${k}, scale, below{i // 2 % 2};"
        for k in (i, j):
            text += f"ex2.approx.ftz.f32 ${k}, u{k};"
        for k in (i, j):
            text += f"add.f32 {total(L, k)}, {total(L, k)}, ${k};"
        for k in (i, j):
            text += f"fma.rn.f32 {total(P2, k)}, ${k}, ${k}, {total(P2, k)};"
        # Not negative, so in order as integers: three at a time.
        text += f"max.s32 larger, ${i}, ${j}; max.s32 {total(TOP, i)}, {total(TOP, i)}, larger;"
        for k in (i, j):
            text += f"fma.rn.f32 {total(W, k)}, ${k}, u{k}, {total(W, k)};"
        if moments:
            for k in (i, j):
                text += f"add.f32 {total(A, k)}, {total(A, k)}, u{k};"
            for k in (i, j):
                text += f"fma.rn.f32 {total(B, k)}, u{k}, u{k}, {total(B, k)};"
    return text + "}"
