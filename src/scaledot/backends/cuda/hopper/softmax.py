"""The online softmax of a warpgroup's 64 rows, with the sums that the vitals need.

For a tile of scores S, with x = scale S in base 2 (scale holds log2 e):

    u = x - pivot        P = 2^u        l = sum P        O = P V

The pivot is a running maximum that moves only when it has to: P may grow to 2^8 before rows are
rescaled, so that after the first tiles whole warps skip the rescaling of O. The true maximum m is
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
    m: gl.tensor  # [64]: the largest score, before the scale
    pivot: gl.tensor  # [64], in base 2
    l: gl.tensor  # [64, 4], as all that follow
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
    row_layout: gl.constexpr = gl.SliceLayout(1, scores.type.layout)
    none = gl.sum(by_thread(scores * 0.0), 2)
    low = gl.full([64], -INFINITY, gl.float32, row_layout)
    return Sums(low, low, none, none, none, none, none, none)


@gluon.jit
def without_moments(sums):
    none = gl.zeros_like(sums.a)
    return Sums(sums.m, sums.pivot, sums.l, sums.w, sums.p2, none, none, sums.first)


@aggregate
class Move:
    """Where a tile of scores moves the pivot."""

    m: gl.tensor  # [64], as all
    pivot: gl.tensor
    base: gl.tensor  # the pivot, 0 while it is -inf
    d: gl.tensor  # old pivot - new
    alpha: gl.tensor

    @gluon.constexpr_function
    def __init__(self, m, pivot, base, d, alpha):
        self.m = m
        self.pivot = pivot
        self.base = base
        self.d = d
        self.alpha = alpha


@gluon.jit
def move_pivot(s, sums, scale, plan, MASKED: gl.constexpr):
    """Hidden scores are -inf."""
    m = gl.maximum(sums.m, gl.convert_layout(row_max(s, plan), sums.m.type.layout))
    top = m * scale
    pivot = gl.where(top - sums.pivot > SLACK, top, sums.pivot)
    base = pivot
    if MASKED:
        base = gl.where(pivot == -INFINITY, 0.0, pivot)  # nothing seen yet: -inf - -inf is NaN
    d = gl.where(sums.pivot == -INFINITY, 0.0, sums.pivot - base)
    return Move(m, pivot, base, d, gl.exp2(d))


@gluon.jit
def add_tile(
    s, sums, move, visible, before, scale, nought, plan, MASKED: gl.constexpr, MOMENTS: gl.constexpr
):
    """The sums with one more tile of scores, and P in the type of the values.

    `visible` says which scores are not hidden. before: a quarter of the keys in a and b so far.
    """
    sums = follow(sums, move, first_score(s, sums.first), before, plan, MOMENTS)
    if MASKED or MOMENTS or not plan.QUARTERS:
        u = s * scale - by_row(move.base, s)
        p = gl.exp2(u)
        if MASKED and plan.STATISTICS:
            u = gl.where(visible, u, 0.0)  # P is 0 there, and 0 * inf would be NaN
        sums = add_sums(by_thread(u), by_thread(p), sums, plan, MOMENTS)
        return sums, narrow(p, plan.dtype)
    else:
        # Left alone, the compiler computes all exponents, then all exponentials, then all sums, and
        # each unit waits for the others. So a quarter may begin when the last but one is summed.
        base = by_row(move.base, sums.l) + gl.zeros_like(sums.l)
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
    factor = by_row(move.alpha, sums.l)
    w = sums.w
    p2 = sums.p2
    a = sums.a
    b = sums.b
    if plan.STATISTICS:
        shift = by_row(move.d, sums.l)
        w = (w + shift * sums.l) * factor
        p2 = p2 * (factor * factor)
        if MOMENTS:
            b = b + shift * (2.0 * a + before * shift)
            a = a + before * shift
    return Sums(move.m, move.pivot, sums.l * factor, w, p2, a, b, first)


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
    """In steps, so that many maxima are on their way at once; which steps, was measured."""
    if plan.QUARTERS:
        left, right = halves(x)
        x = gl.maximum(left, right)
        left, right = halves(x)
        x = gl.maximum(left, right)
        left, right = halves(x)
        return gl.max(gl.maximum(left, right), 1)
    else:
        return gl.max(gl.max(x.reshape([x.shape[0], 4, x.shape[1] // 4]), 1), 1)


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
def rescale(acc, alpha, V: gl.constexpr):
    """alpha O, skipped by warps whose rows all keep their pivot.

    A thread holds two rows of O, in pairs of columns by turns.
    """
    return gl.inline_asm_elementwise(
        rescale_text(V // 2),
        rescale_constraints(V // 2),
        [acc, by_row(alpha, acc)],
        dtype=gl.float32,
        is_pure=False,
        pack=V // 2,
    )


@gluon.constexpr_function
def rescale_text(n):
    keep = "".join(f"mov.f32 ${i}, ${n + i};" for i in range(n))
    times = "".join(f"mul.f32 ${i}, ${i}, ${2 * n + (i & 2)};" for i in range(n))
    one = "0f3F800000"
    return (
        "{ .reg .pred mine, all;"
        f"{keep} setp.eq.f32 mine, ${2 * n}, {one};"
        f"setp.eq.and.f32 mine, ${2 * n + 2}, {one}, mine;"
        "vote.sync.all.pred all, mine, 0xffffffff;"
        f"@all bra.uni SAME; {times} SAME: }}"
    )


@gluon.constexpr_function
def rescale_constraints(n):
    return ",".join(["=f"] * n + ["f"] * (2 * n))


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
