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

    @gluon.constexpr_function
    def __init__(self, m, pivot, l, w, p2, a, b):
        self.m = m
        self.pivot = pivot
        self.l = l
        self.w = w
        self.p2 = p2
        self.a = a
        self.b = b


@gluon.jit
def no_sums(scores):
    row_layout: gl.constexpr = gl.SliceLayout(1, scores.type.layout)
    nothing = fold(scores * 0.0)
    low = gl.full([64], -INFINITY, gl.float32, row_layout)
    return Sums(low, low, nothing, nothing, nothing, nothing, nothing)


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
def move_pivot(s, sums, scale, MASKED: gl.constexpr):
    """Hidden scores are -inf."""
    m = gl.maximum(sums.m, gl.convert_layout(row_max(s), sums.m.type.layout))
    top = m * scale
    pivot = gl.where(top - sums.pivot > SLACK, top, sums.pivot)
    base = pivot
    if MASKED:
        base = gl.where(pivot == -INFINITY, 0.0, pivot)  # nothing seen yet: -inf - -inf is NaN
    d = gl.where(sums.pivot == -INFINITY, 0.0, sums.pivot - base)
    return Move(m, pivot, base, d, gl.exp2(d))


@gluon.jit
def add_tile(s, sums, move, visible, before, scale, plan, MASKED: gl.constexpr):
    """The sums with one more tile of scores, and P in the type of the values.

    `visible` says which scores are not hidden. before: a quarter of the keys that the row has met.
    """
    u = s * scale - by_row(move.base, s)
    p = gl.exp2(u)
    factor = by_row(move.alpha, sums.l)
    w = sums.w
    p2 = sums.p2
    a = sums.a
    b = sums.b
    if plan.STATISTICS:
        shift = by_row(move.d, sums.l)
        if MASKED:
            u = gl.where(visible, u, 0.0)  # P is 0 there, and 0 * inf would be NaN
        w = (w + shift * sums.l) * factor + fold(p * u)
        p2 = p2 * (factor * factor) + fold(p * p)
        if plan.MOMENTS:
            b = b + shift * (2.0 * a + before * shift) + fold(u * u)
            a = a + before * shift + fold(u)
    l = sums.l * factor + fold(p)
    return Sums(move.m, move.pivot, l, w, p2, a, b), narrow(p, plan.dtype)


@gluon.jit
def fold(x):
    """Sums over the keys that one thread holds: [64, KEYS] -> [64, 4], nothing exchanged.

    In a product's result, two neighbouring columns belong to one thread, eight to the four threads
    of a row.
    """
    mine = x.reshape([x.shape[0], x.shape[1] // 8, 4, 2]).permute((0, 2, 1, 3))
    return gl.sum(mine.reshape([x.shape[0], 4, x.shape[1] // 4]), 2)


@gluon.jit
def row_max(x):
    """In two steps, so that four maxima are on their way at once."""
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
