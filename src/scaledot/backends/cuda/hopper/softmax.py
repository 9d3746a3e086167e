"""The online softmax of a warpgroup's 64 rows, with the sums that the vitals need.

For a tile of scores S, with x = scale S in base 2 (scale holds log2 e):

    u = x - pivot        P = 2^u        l = sum P        O = P V

The pivot is a running maximum that moves only when it has to: P may grow to 2^8 before rows are
rescaled, so that after the first tiles whole warps skip what a move costs. The true maximum m is
kept beside it. When the pivot moves by d = old - new (<= 0), everything follows exactly:

    alpha = 2^d        l' = alpha l        O' = alpha O

The statistics need up to four more sums of a row:

    w  = sum P u        w' = alpha (w + d l)        entropy = ln2 (log2 l - w / l)
    p2 = sum P^2        p2' = alpha^2 p2            sum p^2 = p2 / l^2
    a  = sum u          a' = a + n d                mean of the logits, n keys so far
    b  = sum u^2        b' = b + 2 d a + n d^2      their variance

They are kept as [64, 4]: each of the four threads that share a row sums the keys it holds, and the
four meet once, when the row is finished.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)
INFINITY = gl.constexpr(float("inf"))
SLACK = gl.constexpr(8.0)  # P stays below 2^8


@aggregate
class Sums:
    """All [64, 4]."""

    m: gl.tensor  # the largest score of the thread's keys, before the scale
    pivot: gl.tensor  # in base 2; each of a row's threads knows it
    l: gl.tensor
    w: gl.tensor
    p2: gl.tensor
    a: gl.tensor
    b: gl.tensor
    first: gl.tensor  # the score of the last tile's first key, in the row's first thread

    @gluon.constexpr_function
    def __init__(self, m, pivot, l, w, p2, a, b, first):
        self.m = m
        self.pivot = pivot
        self.l = l
        self.w = w
        self.p2 = p2
        self.a = a
        self.b = b
        self.first = first


@gluon.jit
def no_sums(scores):
    none = gl.sum(by_thread(scores * 0.0), 2)
    low = none - INFINITY
    return Sums(low, low, none, none, none, none, none, none)


@gluon.jit
def without_moments(sums):
    none = gl.zeros_like(sums.a)
    return Sums(sums.m, sums.pivot, sums.l, sums.w, sums.p2, none, none, sums.first)


@gluon.jit
def largest(s, sums, plan):
    """The largest score that each thread has met, or each row; hidden ones are -inf."""
    home: gl.constexpr = sums.m.type.layout
    if plan.LAZY:
        return gl.maximum(sums.m, at_home(thread_max(s), home))
    else:
        return gl.maximum(sums.m, by_row(row_max(s, plan), sums.m))


@aggregate
class Move:
    """Where a tile of scores moves the pivot; all [64, 4]."""

    m: gl.tensor
    pivot: gl.tensor
    d: gl.tensor  # old pivot - new, 0 where there was none
    alpha: gl.tensor  # 2^d

    @gluon.constexpr_function
    def __init__(self, m, pivot, d, alpha):
        self.m = m
        self.pivot = pivot
        self.d = d
        self.alpha = alpha


@gluon.jit
def move_pivot(m, sums, scale, plan):
    top = m * scale
    if plan.LAZY:
        pivot, d = jump(sums.pivot, top)
        return Move(m, pivot, d, d)  # alpha is found where it is needed
    else:
        pivot = gl.where(top - sums.pivot > SLACK, top, sums.pivot)
        d = gl.where(sums.pivot == -INFINITY, 0.0, sums.pivot - pivot)
        return Move(m, pivot, d, gl.exp2(d))


@gluon.jit
def jump(pivot, top):
    """The new pivots, and old - new.

    They seldom move: so a row's four threads do not ask each other for the largest score, unless
    one of the warp has found too large a one.
    """
    return gl.inline_asm_elementwise(
        jump_text(),
        "=f,=f,=f,=f,0,1,f,f",
        [pivot, top],
        dtype=(gl.float32, gl.float32),
        is_pure=False,
        pack=2,
    )


@gluon.constexpr_function
def jump_text():
    slack, nought, low = "0f41000000", "0f00000000", "0fFF800000"
    far, rows = "", ""
    for i in range(2):
        pivot, d, top = f"${i}", f"${2 + i}", f"${6 + i}"
        far += f"sub.f32 x, {top}, {pivot};"
        far += f"setp.gt.or.f32 far, x, {slack}, far;" if i else f"setp.gt.f32 far, x, {slack};"
        rows += f"mov.f32 x, {top};"
        for lane in (1, 2):
            rows += f"shfl.sync.bfly.b32 y, x, {lane}, 31, 0xffffffff; max.f32 x, x, y;"
        rows += f"sub.f32 y, x, {pivot}; setp.gt.f32 far, y, {slack}; sub.f32 y, {pivot}, x;"
        rows += f"setp.gt.and.f32 any, {pivot}, {low}, far; selp.f32 {d}, y, {nought}, any;"
        rows += f"selp.f32 {pivot}, x, {pivot}, far;"
    return (
        "{ .reg .pred far, any; .reg .f32 x, y;"
        f"mov.f32 $2, {nought}; mov.f32 $3, {nought}; {far}"
        f"vote.sync.any.pred any, far, 0xffffffff; @!any bra.uni STAY; {rows} STAY: }}"
    )


@gluon.jit
def add_tile(
    s, sums, move, visible, before, scale, nought, plan, MASKED: gl.constexpr, MOMENTS: gl.constexpr
):
    """The sums with one more tile of scores, and P in the type of the values.

    `visible` says which scores are not hidden. before: a quarter of the keys in a and b so far.
    """
    sums = follow(sums, move, first_score(s, sums.first), before, plan, MOMENTS)
    base = sums.pivot
    if MASKED:
        base = gl.where(base == -INFINITY, 0.0, base)  # nothing seen yet: -inf - -inf is NaN
    if MASKED or MOMENTS or not plan.QUARTERS:
        u = s * scale - spread(base, s)
        p = gl.exp2(u)
        if MASKED and plan.STATISTICS:
            u = gl.where(visible, u, 0.0)  # P is 0 there, and 0 * inf would be NaN
        sums = add_sums(by_thread(u), by_thread(p), sums, plan, MOMENTS)
        return sums, narrow(p, plan.dtype)
    else:
        # Left alone, the compiler computes all exponents, then all exponentials, then all sums, and
        # each unit waits for the others. So a quarter may begin when the last but one is summed.
        left, right = halves(s)
        s0, s1 = halves(left)
        s2, s3 = halves(right)
        first, p0 = add_quarter(s0, sums, base, scale, plan)
        second, p1 = add_quarter(s1, first, base, scale, plan)
        base = known_after(base, first, nought)
        third, p2 = add_quarter(s2, second, base, scale, plan)
        base = known_after(base, second, nought)
        fourth, p3 = add_quarter(s3, third, base, scale, plan)
        return fourth, joined(joined(p0, p1), joined(p2, p3))


@gluon.jit
def follow(sums, move, first, before, plan, MOMENTS: gl.constexpr):
    """The sums counted from the new pivot."""
    l = sums.l
    w = sums.w
    p2 = sums.p2
    a = sums.a
    b = sums.b
    if plan.LAZY and MOMENTS:
        l, w, p2, a, b = gl.inline_asm_elementwise(
            follow_text(5),
            tied_constraints(10, 4),
            [l, w, p2, a, b, move.d, before + gl.zeros_like(l)],
            dtype=(gl.float32, gl.float32, gl.float32, gl.float32, gl.float32),
            is_pure=False,
            pack=2,
        )
    elif plan.LAZY and plan.STATISTICS:
        l, w, p2 = gl.inline_asm_elementwise(
            follow_text(3),
            tied_constraints(6, 2),
            [l, w, p2, move.d],
            dtype=(gl.float32, gl.float32, gl.float32),
            is_pure=False,
            pack=2,
        )
    elif plan.LAZY:
        l = gl.inline_asm_elementwise(
            follow_text(1),
            tied_constraints(2, 2),
            [l, move.d],
            dtype=gl.float32,
            is_pure=False,
            pack=2,
        )
    else:
        d = move.d
        alpha = move.alpha
        if plan.STATISTICS:
            w = (w + d * l) * alpha
            p2 = p2 * (alpha * alpha)
            if MOMENTS:
                b = b + d * (2.0 * a + before * d)
                a = a + before * d
        l = l * alpha
    return Sums(move.m, move.pivot, l, w, p2, a, b, first)


@gluon.constexpr_function
def follow_text(sums):
    """sums: how many of l, w, p2, a, b there are."""
    move = 4 * sums
    rows = ""
    for i in range(2):
        l, w, p2, a, b = (f"${2 * which + i}" for which in range(5))
        rows += f"mov.f32 d, ${move + i}; ex2.approx.ftz.f32 alpha, d;"
        if sums > 1:
            rows += f"fma.rn.f32 {w}, d, {l}, {w}; mul.f32 {w}, {w}, alpha;"
            rows += f"mul.f32 {p2}, {p2}, alpha; mul.f32 {p2}, {p2}, alpha;"
        if sums > 3:
            rows += f"mul.f32 x, ${move + 2 + i}, d; fma.rn.f32 y, {a}, 0f40000000, x;"
            rows += f"fma.rn.f32 {b}, d, y, {b}; add.f32 {a}, {a}, x;"
        rows += f"mul.f32 {l}, {l}, alpha;"
    return f"{{ .reg .f32 d, alpha, x, y; {unless_moved(move, move + 1)} {rows} STAY: }}"


@gluon.constexpr_function
def unless_moved(first, second, stays="0f00000000"):
    """To STAY, where this is the number of all rows of the warp: they keep their pivot."""
    return (
        f".reg .pred all; setp.eq.f32 all, ${first}, {stays};"
        f"setp.eq.and.f32 all, ${second}, {stays}, all;"
        "vote.sync.all.pred all, all, 0xffffffff; @all bra.uni STAY;"
    )


@gluon.constexpr_function
def tied_constraints(n, inputs):
    """n numbers that are changed in place, and others."""
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * inputs)


@gluon.jit
def add_quarter(s, sums, base, scale, plan):
    """The sums with a quarter of a tile, and its P; base [64, 4] as each thread knows it."""
    mine = by_thread(s)
    beside: gl.constexpr = gl.SliceLayout(2, mine.type.layout)
    u = mine * scale - at_home(base, beside)[:, :, None]
    p = gl.exp2(u)
    sums = add_sums(u, p, sums, plan, False)
    n: gl.constexpr = s.shape[1]
    layout: gl.constexpr = s.type.layout
    p = p.reshape([64, 4, n // 8, 2]).permute((0, 2, 1, 3)).reshape([64, n])
    return sums, narrow(at_home(p, layout), plan.dtype)


@gluon.jit
def add_sums(u, p, sums, plan, MOMENTS: gl.constexpr):
    """u and p [64, 4, n / 4]: by thread."""
    home: gl.constexpr = sums.l.type.layout
    w = sums.w
    p2 = sums.p2
    a = sums.a
    b = sums.b
    if plan.STATISTICS:
        w = w + at_home(gl.sum(p * u, 2), home)
        p2 = p2 + at_home(gl.sum(p * p, 2), home)
        if MOMENTS:
            b = b + at_home(gl.sum(u * u, 2), home)
            a = a + at_home(gl.sum(u, 2), home)
    l = sums.l + at_home(gl.sum(p, 2), home)
    return Sums(sums.m, sums.pivot, l, w, p2, a, b, sums.first)


@gluon.jit
def by_thread(x):
    """[64, n] -> [64, 4, n / 4]: the keys that each of a row's four threads holds.

    In a product's result, two neighbouring columns belong to one thread, eight to the four threads
    of a row.
    """
    n: gl.constexpr = x.shape[1]
    return x.reshape([64, n // 8, 4, 2]).permute((0, 2, 1, 3)).reshape([64, 4, n // 4])


@gluon.jit
def first_score(s, like):
    """The score of the tile's first key, as it lies in the first of the row's threads."""
    home: gl.constexpr = like.type.layout
    quarter, _ = halves(halves(s)[0])
    eighth, _ = halves(quarter)
    if eighth.shape[1] > 8:
        eighth, _ = halves(eighth)
    return at_home(gl.split(by_thread(eighth))[0], home)


@gluon.jit
def at_home(x, layout: gl.constexpr):
    """The same registers under another name; an error where something would have to move."""
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def halves(x):
    """The left and the right columns of a product's result, each laid out as one."""
    n: gl.constexpr = x.shape[1] // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 16])
    left, right = gl.split(x.reshape([64, 2, n]).permute((0, 2, 1)))
    return at_home(left, layout), at_home(right, layout)


@gluon.jit
def joined(left, right):
    n: gl.constexpr = left.shape[1] * 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 16])
    return at_home(gl.join(left, right).permute((0, 2, 1)).reshape([64, n]), layout)


@gluon.jit
def known_after(base, sums, nought):
    """base | ((l | w | p2) & 0): the same number, but not before the sums are known.

    nought: a 0 of which the compiler does not know that it is one.
    """
    nowhere = gl.full([64, 4], 0, gl.int32, base.type.layout) + nought
    return gl.inline_asm_elementwise(
        "{ .reg .b32 any; lop3.b32 any, $2, $3, $4, 0xFE; lop3.b32 $0, $1, any, $5, 0xF8; }",
        "=r,r,r,r,r,r",
        [as_bits(base), as_bits(sums.l), as_bits(sums.w), as_bits(sums.p2), nowhere],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    ).to(gl.float32, bitcast=True)


@gluon.jit
def unknown(x):
    """The same integers, of which the compiler knows nothing."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def as_bits(x):
    return x.to(gl.int32, bitcast=True)


@gluon.jit
def row_max(x, plan):
    """[64]. In steps, so that many maxima are on their way at once; which steps, was measured."""
    if plan.QUARTERS:
        left, right = halves(x)
        left, right = halves(gl.maximum(left, right))
        left, right = halves(gl.maximum(left, right))
        return gl.max(gl.maximum(left, right), 1)
    else:
        return gl.max(gl.max(x.reshape([x.shape[0], 4, x.shape[1] // 4]), 1), 1)


@gluon.jit
def thread_max(x):
    """[64, 4]: of each thread's keys."""
    left, right = halves(x)
    left, right = halves(gl.maximum(left, right))
    return gl.max(by_thread(gl.maximum(left, right)), 2)


@gluon.jit
def by_row(values, like):
    """[64] as a column beside `like` [64, n]."""
    return gl.convert_layout(values, gl.SliceLayout(1, like.type.layout))[:, None]


@gluon.jit
def narrow(p, dtype: gl.constexpr):
    """To 16 bits, two at a time and in the order in which the tensor cores take them."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [p], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [p], dtype=gl.float16, is_pure=True, pack=2
        )


@gluon.jit
def spread(values, like):
    """[64, 4] -> [64, n]: for each column what its thread knows."""
    n: gl.constexpr = like.shape[1]
    layout: gl.constexpr = like.type.layout
    of_thread: gl.constexpr = gl.SliceLayout(2, by_thread(like).type.layout)
    wide = at_home(values, of_thread)[:, :, None].broadcast_to([64, 4, n // 4])
    wide = wide.reshape([64, 4, n // 8, 2]).permute((0, 2, 1, 3)).reshape([64, n])
    return at_home(wide, layout)


@gluon.jit
def rescale(acc, move, plan):
    """alpha O, skipped by warps whose rows all keep their pivot."""
    n: gl.constexpr = acc.shape[1] // 2  # that a thread holds
    return gl.inline_asm_elementwise(
        rescale_text(n, plan.LAZY),
        tied_constraints(n, n),
        [acc, spread(move.alpha, acc)],
        dtype=gl.float32,
        is_pure=False,
        pack=n,
    )


@gluon.constexpr_function
def rescale_text(n, lazy):
    """A thread holds two rows, in pairs of columns by turns. lazy: alpha is to be found yet."""
    first, second = 2 * n, 2 * n + 2
    power = "ex2.approx.ftz.f32" if lazy else "mov.f32"
    alpha = f"{power} r0, ${first}; {power} r2, ${second};"
    times = "".join(f"mul.f32 ${i}, ${i}, r{i & 2};" for i in range(n))
    stays = "0f00000000" if lazy else "0f3F800000"
    return f"{{ .reg .f32 r0, r2; {unless_moved(first, second, stays)} {alpha} {times} STAY: }}"


@gluon.jit
def bend(s, factor, cap, plan):
    """The scores in base 2, where no number alone can scale them: a cap, or a factor a row."""
    if plan.SOFTCAP:
        # c = cap tanh(z / cap), with tanh t = 1 - 2 / (e^2t + 1)
        s = s * by_row(factor / cap, s)
        power = gl.exp2(gl.minimum(s * 2.0, 80.0))
        s = (1.0 - 2.0 / (power + 1.0)) * (cap * LOG2E)
    else:
        s = s * by_row(factor, s)
    return s
