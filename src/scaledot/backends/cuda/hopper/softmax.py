"""The online softmax of a team's m rows, 64 a warpgroup, with the sums that the vitals need.

For a tile of scores S, with x = scale S in base 2 (scale holds log2 e):

    u = x - pivot        P = 2^u        l = sum P        O = P V

In tiles in which something may be hidden the pivot is a running maximum. It moves only when it has
to: P may grow to 2^8 before rows are rescaled. When it moves by d = old - new (<= 0), everything
follows exactly:

    alpha = 2^d        l' = alpha l        O' = alpha O

Each row meets such a tile first. Then its pivot is near enough for all others, as a rule: P in
bfloat16 has the range of float32, so the full tiles are computed without any maximum, and in the
first one the largest of eight scores will do (`Config.few`). Rows that outgrow it end with sums
that are too large, and are then done again, every tile with a maximum (kernel.py,
`finish.outgrown`). In float16 no pivot is ever good enough for the next tile, and all have a
maximum.

The statistics need up to four more sums of a row:

    w  = sum P u        w' = alpha (w + d l)        entropy = ln2 (log2 l - w / l)
    p2 = sum P^2        p2' = alpha^2 p2            sum p^2 = p2 / l^2
    a  = sum u          a' = a + n d                mean of the logits, n keys so far
    b  = sum u^2        b' = b + 2 d a + n d^2      their variance

and the largest P, from which the largest logit and its probability follow.

They are kept as [m, 4]: each of the four threads that share a row sums the keys it holds, and the
four meet once, when the row is finished.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)
INFINITY = gl.constexpr(float("inf"))
SLACK = gl.constexpr(8.0)  # how far, in base 2, a row may outgrow its pivot before that moves


@aggregate
class Sums:
    """All [m, 4]."""

    pivot: gl.tensor  # in base 2; each of a row's threads knows it
    l: gl.tensor
    w: gl.tensor
    p2: gl.tensor
    a: gl.tensor
    b: gl.tensor
    top: gl.tensor  # the largest P
    first: gl.tensor  # the first of the last tile's scores, in the row's first thread

    @gluon.constexpr_function
    def __init__(self, pivot, l, w, p2, a, b, top, first):
        self.pivot = pivot
        self.l = l
        self.w = w
        self.p2 = p2
        self.a = a
        self.b = b
        self.top = top
        self.first = first


@gluon.jit
def no_sums(scores):
    none = gl.sum(by_thread(scores * 0.0), 2)
    return Sums(none - INFINITY, none, none, none, none, none, none, none)


@gluon.jit
def from_pivot(pivot, none):
    return Sums(pivot, none.l, none.w, none.p2, none.a, none.b, none.top, none.first)


@gluon.jit
def without_moments(sums):
    none = gl.zeros_like(sums.a)
    return Sums(sums.pivot, sums.l, sums.w, sums.p2, none, none, sums.top, sums.first)


@aggregate
class Move:
    """Where a tile of scores moves the pivot; all [m, 4]."""

    top: gl.tensor  # the tile's largest score in base 2
    pivot: gl.tensor
    d: gl.tensor  # old pivot - new, 0 where there was none
    alpha: gl.tensor  # 2^d

    @gluon.constexpr_function
    def __init__(self, top, pivot, d, alpha):
        self.top = top
        self.pivot = pivot
        self.d = d
        self.alpha = alpha


@gluon.jit
def move_pivot(s, sums, scale, plan):
    """Hidden scores are -inf."""
    top = by_row(row_max(s, plan), sums.pivot) * scale
    pivot = gl.where(top - sums.pivot > SLACK, top, sums.pivot)
    d = gl.where(sums.pivot == -INFINITY, 0.0, sums.pivot - pivot)
    return Move(top, pivot, d, gl.exp2(d))


@gluon.jit
def follow(sums, move, before, plan, MOMENTS: gl.constexpr):
    """The sums counted from the new pivot. before: a quarter of the keys in a and b so far."""
    d = move.d
    alpha = move.alpha
    w = sums.w
    p2 = sums.p2
    a = sums.a
    b = sums.b
    top = sums.top
    if plan.STATISTICS:
        w = (w + d * sums.l) * alpha
        p2 = p2 * (alpha * alpha)
        top = gl.maximum(top * alpha, gl.exp2(move.top - seen_pivot(move.pivot)))
        if MOMENTS:
            b = b + d * (2.0 * a + before * d)
            a = a + before * d
    return Sums(move.pivot, sums.l * alpha, w, p2, a, b, top, sums.first)


@gluon.jit
def seen_pivot(pivot):
    """0 where a row has seen nothing yet: -inf - -inf would be NaN."""
    return gl.where(pivot == -INFINITY, 0.0, pivot)


@gluon.jit
def add_tile(
    s,
    sums,
    visible,
    scale,
    nought,
    plan,
    MASKED: gl.constexpr,
    STEADY: gl.constexpr,
    MOMENTS: gl.constexpr,
):
    """The sums with one more tile of scores, and P in the type of the values.

    `visible` says which scores are not hidden, where some are (MASKED).
    STEADY: the pivot was not moved for it, so that the largest P is still to be found.
    """
    IN_RUN: gl.constexpr = plan.RUN > 1 and not MASKED
    before = sums
    sums = of_one_tile(sums, first_score(s, sums.first), plan, IN_RUN)
    base = sums.pivot
    if MASKED:
        base = seen_pivot(base)
    if MASKED or MOMENTS or not plan.QUARTERS:
        u = s * scale - spread(base, s)
        p = gl.exp2(u)
        if MASKED and plan.STATISTICS:
            u = gl.where(visible, u, 0.0)  # P is 0 there, and 0 * inf would be NaN
        sums = add_sums(by_thread(u), by_thread(p), sums, plan, MOMENTS, STEADY)
        return with_those_before(sums, before, plan, IN_RUN), narrow(p, plan.dtype)
    else:
        # Left alone, the compiler computes all exponents, then all exponentials, then all sums, and
        # each unit waits for the others. So a quarter may begin when the last but one is summed.
        left, right = halves(s)
        s0, s1 = halves(left)
        s2, s3 = halves(right)
        one, p0 = add_quarter(s0, sums, base, scale, plan, STEADY)
        second, p1 = add_quarter(s1, one, base, scale, plan, STEADY)
        base = known_after(base, one, nought)
        third, p2 = add_quarter(s2, second, base, scale, plan, STEADY)
        base = known_after(base, second, nought)
        fourth, p3 = add_quarter(s3, third, base, scale, plan, STEADY)
        fourth = with_those_before(fourth, before, plan, IN_RUN)
        return fourth, joined(joined(p0, p1), joined(p2, p3))


@gluon.jit
def of_one_tile(sums, first, plan, IN_RUN: gl.constexpr):
    """Sums begin anew with each tile: a long row's are not one long chain of roundings. Where the
    pivot stays, l and a begin anew only with each run of tiles."""
    l = sums.l
    a = sums.a
    none = gl.zeros_like(sums.w)
    if plan.STATISTICS and not IN_RUN:
        l = none
        a = none
    return Sums(sums.pivot, l, none, none, a, none, sums.top, first)


@gluon.jit
def with_those_before(sums, before, plan, IN_RUN: gl.constexpr):
    if plan.STATISTICS:
        l = sums.l
        a = sums.a
        if not IN_RUN:
            l = before.l + l
            a = before.a + a
        w = before.w + sums.w
        p2 = before.p2 + sums.p2
        b = before.b + sums.b
        return Sums(sums.pivot, l, w, p2, a, b, sums.top, sums.first)
    else:
        return sums


@gluon.jit
def of_one_run(sums):
    """l and a begin anew: see `of_one_tile`."""
    none = gl.zeros_like(sums.l)
    return Sums(sums.pivot, none, sums.w, sums.p2, none, sums.b, sums.top, sums.first)


@gluon.jit
def with_runs_before(sums, before):
    l = before.l + sums.l
    a = before.a + sums.a
    return Sums(sums.pivot, l, sums.w, sums.p2, a, sums.b, sums.top, sums.first)


@gluon.jit
def add_quarter(s, sums, base, scale, plan, STEADY: gl.constexpr):
    """The sums with a quarter of a tile, and its P; base [m, 4] as each thread knows it."""
    mine = by_thread(s)
    beside: gl.constexpr = gl.SliceLayout(2, mine.type.layout)
    u = mine * scale - at_home(base, beside)[:, :, None]
    p = gl.exp2(u)
    sums = add_sums(u, p, sums, plan, False, STEADY)
    m: gl.constexpr = s.shape[0]
    n: gl.constexpr = s.shape[1]
    layout: gl.constexpr = s.type.layout
    p = p.reshape([m, 4, n // 8, 2]).permute((0, 2, 1, 3)).reshape([m, n])
    return sums, narrow(at_home(p, layout), plan.dtype)


@gluon.jit
def add_sums(u, p, sums, plan, MOMENTS: gl.constexpr, STEADY: gl.constexpr):
    """u and p [m, 4, n / 4]: by thread. STEADY: the largest P is not known from the pivot.

    A few scores at a time join one sum after the other: a register that was just read for one is
    still at hand for the next. While products run, what is read from the register file counts.
    """
    home: gl.constexpr = sums.l.type.layout
    if not plan.STATISTICS:
        l = sums.l + at_home(gl.sum(p, 2), home)
        return Sums(sums.pivot, l, sums.w, sums.p2, sums.a, sums.b, sums.top, sums.first)
    elif p.shape[2] > plan.AT_ONCE:
        u0, u1 = halves_by_thread(u)
        p0, p1 = halves_by_thread(p)
        sums = add_sums(u0, p0, sums, plan, MOMENTS, STEADY)
        return add_sums(u1, p1, sums, plan, MOMENTS, STEADY)
    else:
        return add_few(u, p, sums, plan, MOMENTS, STEADY)


@gluon.jit
def add_few(u, p, sums, plan, MOMENTS: gl.constexpr, STEADY: gl.constexpr):
    home: gl.constexpr = sums.l.type.layout
    l = sums.l
    w = sums.w
    p2 = sums.p2
    a = sums.a
    b = sums.b
    top = sums.top
    for i in gl.static_range(len(plan.ORDER)):
        if plan.ORDER[i] == "l":
            l = add_numbers(l, p)
        if plan.ORDER[i] == "w":
            w = add_products(w, u, p)
        if plan.ORDER[i] == "p":
            p2 = add_products(p2, p, p)
        if plan.ORDER[i] == "a" and MOMENTS:
            a = add_numbers(a, u)
        if plan.ORDER[i] == "b" and MOMENTS:
            b = add_products(b, u, u)
        if plan.ORDER[i] == "t" and STEADY:
            # Numbers that are not negative are in order as integers: three at a time.
            largest = at_home(gl.max(as_bits(p), 2), home)
            top = gl.maximum(as_bits(top), largest).to(gl.float32, bitcast=True)
    return Sums(sums.pivot, l, w, p2, a, b, top, sums.first)


@gluon.jit
def add_numbers(total, x):
    """total [m, 4] + the sum of x over the last dimension, one after the other."""
    home: gl.constexpr = total.type.layout
    if x.shape[2] == 1:
        return total + at_home(x.reshape(total.shape), home)
    else:
        x0, x1 = halves_by_thread(x)
        return add_numbers(add_numbers(total, x0), x1)


@gluon.jit
def add_products(total, x, y):
    """The same of x y: a multiply-add each. gl.sum would begin with a product."""
    home: gl.constexpr = total.type.layout
    if x.shape[2] == 1:
        x = at_home(x.reshape(total.shape), home)
        return total + x * at_home(y.reshape(total.shape), home)
    else:
        x0, x1 = halves_by_thread(x)
        y0, y1 = halves_by_thread(y)
        return add_products(add_products(total, x0, y0), x1, y1)


@gluon.jit
def halves_by_thread(x):
    """[m, 4, n] -> the first and the last [m, 4, n / 2]."""
    m: gl.constexpr = x.shape[0]
    n: gl.constexpr = x.shape[2]
    return gl.split(x.reshape([m, 4, 2, n // 2]).permute((0, 1, 3, 2)))


@gluon.jit
def by_thread(x):
    """[m, n] -> [m, 4, n / 4]: the keys that each of a row's four threads holds.

    In a product's result, two neighbouring columns belong to one thread, eight to the four threads
    of a row.
    """
    m: gl.constexpr = x.shape[0]
    n: gl.constexpr = x.shape[1]
    return x.reshape([m, n // 8, 4, 2]).permute((0, 2, 1, 3)).reshape([m, 4, n // 4])


@gluon.jit
def first_score(s, like):
    """The score of the tile's first key, as it lies in the first of the row's threads."""
    home: gl.constexpr = like.type.layout
    return at_home(gl.split(by_thread(first_columns(s, 8)))[0], home)


@gluon.jit
def first_columns(s, n: gl.constexpr):
    """Of eight, each of a row's threads has two."""
    if s.shape[1] == n:
        return s
    else:
        return first_columns(halves(s)[0], n)


@gluon.jit
def columns_before(end, s):
    """[m, n]: which columns lie before `end` [m].

    Thread t of a row has the columns 8 i + 2 t and the next: t is taken from the end, so that what
    is compared with it are constants.
    """
    column = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    return (column & ~6)[None, :] < end[:, None] - (column & 6)[None, :]


@gluon.jit
def at_home(x, layout: gl.constexpr):
    """The same registers under another name; an error where something would have to move."""
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def halves(x):
    """The left and the right columns of a product's result, each laid out as one."""
    m: gl.constexpr = x.shape[0]
    n: gl.constexpr = x.shape[1] // 2
    layout: gl.constexpr = of_product(m, n)
    left, right = gl.split(x.reshape([m, 2, n]).permute((0, 2, 1)))
    return at_home(left, layout), at_home(right, layout)


@gluon.jit
def joined(left, right):
    m: gl.constexpr = left.shape[0]
    n: gl.constexpr = left.shape[1] * 2
    layout: gl.constexpr = of_product(m, n)
    return at_home(gl.join(left, right).permute((0, 2, 1)).reshape([m, n]), layout)


@gluon.constexpr_function
def of_product(m, n):
    """How a product [m, n] lies in the registers: 16 rows a warp."""
    return gl.NVMMADistributedLayout([3, 0], [m // 16, 1], [16, n, 16])


@gluon.jit
def known_after(base, sums, nought):
    """base | ((l | w | p2) & 0): the same number, but not before the sums are known.

    nought: a 0 of which the compiler does not know that it is one.
    """
    nowhere = gl.full(base.shape, 0, gl.int32, base.type.layout) + nought
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
    """[m]. In steps, so that many maxima are on their way at once; which steps, was measured."""
    if plan.QUARTERS:
        left, right = halves(x)
        left, right = halves(gl.maximum(left, right))
        left, right = halves(gl.maximum(left, right))
        return gl.max(gl.maximum(left, right), 1)
    else:
        return gl.max(gl.max(x.reshape([x.shape[0], 4, x.shape[1] // 4]), 1), 1)


@gluon.jit
def by_row(values, like):
    """[m] as a column beside `like` [m, n]."""
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
    """[m, 4] -> [m, n]: for each column what its thread knows."""
    m: gl.constexpr = like.shape[0]
    n: gl.constexpr = like.shape[1]
    layout: gl.constexpr = like.type.layout
    of_thread: gl.constexpr = gl.SliceLayout(2, by_thread(like).type.layout)
    wide = at_home(values, of_thread)[:, :, None].broadcast_to([m, 4, n // 4])
    wide = wide.reshape([m, 4, n // 8, 2]).permute((0, 2, 1, 3)).reshape([m, n])
    return at_home(wide, layout)


@gluon.jit
def rescale(acc, move):
    """alpha O, skipped by warps whose rows all keep their pivot."""
    n: gl.constexpr = acc.shape[1] // 2  # that a thread holds
    return gl.inline_asm_elementwise(
        rescale_text(n),
        tied_constraints(n, n),
        [acc, spread(move.alpha, acc)],
        dtype=gl.float32,
        is_pure=False,
        pack=n,
    )


@gluon.constexpr_function
def tied_constraints(n, inputs):
    """n numbers that are changed in place, and others."""
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * inputs)


@gluon.constexpr_function
def rescale_text(n):
    """A thread holds two rows, in pairs of columns by turns."""
    first, second = f"${2 * n}", f"${2 * n + 2}"
    times = "".join(f"mul.f32 ${i}, ${i}, {second if i & 2 else first};" for i in range(n))
    return (
        "{ .reg .pred stay;"
        f"setp.eq.f32 stay, {first}, 0f3F800000; setp.eq.and.f32 stay, {second}, 0f3F800000, stay;"
        f"vote.sync.all.pred stay, stay, 0xffffffff; @stay bra.uni STAY; {times} STAY: }}"
    )


@gluon.jit
def bend(s, factor, cap, plan):
    """The scores in base 2, where no number alone can scale them: a cap, or a factor a row."""
    if plan.SOFTCAP:
        # c = cap tanh(z / cap), with tanh t = 1 - 2 / (e^2t + 1), or t - t^3 / 3 where that cancels
        s = s * by_row(factor / cap, s)
        power = gl.exp2(s * 2.0)  # infinite where the cap is reached; NaN stays NaN
        t = s * LN2
        small = t - t * t * t * (1.0 / 3.0)
        s = gl.where(t * t < 4e-4, small, 1.0 - 2.0 / (power + 1.0)) * (cap * LOG2E)
    else:
        s = s * by_row(factor, s)
    return s
