"""From the sums of a tile's rows to what is stored of them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from scaledot.backends.cuda.hopper.softmax import (
    INFINITY,
    LN2,
    LOG2E,
    SLACK,
    by_row,
    narrow,
)

FARTHEST_PIVOT = gl.constexpr(65536.0)  # a float32 of this size is off by 2^-8 at most
SWAPPED = gl.constexpr("=r,=r,=r,=r,0,1,2,3")


@gluon.jit
def scale_of(call):
    """What is left to multiply scores with."""
    if call.plan.FACTOR != "no":
        return 1.0
    else:
        return call.scale


@gluon.jit
def finish(call, tile, sums, acc, NTH: gl.constexpr):
    """From the sums to lse, the planes of statistics.py, and the output."""
    plan = call.plan
    layout: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    row = tile.row + NTH * plan.TEAM + gl.arange(0, plan.TEAM, layout)
    low, high = call.reach(tile, row)  # again: cheaper than to keep them all along
    l = gl.convert_layout(gl.sum(sums.l, 1), layout)
    blind = high <= low
    pivot = gl.convert_layout(gl.max(sums.pivot, 1), layout)
    above = gl.log2(l)  # the lse from the pivot, beside which it may be too small to be seen
    lse = gl.where(l == 0.0, float("nan"), pivot + above)  # all logits of the row are -inf: 0 / 0
    share = 1.0 / l  # of a key at the pivot
    sink = -INFINITY
    if plan.SINKS:
        at = tile.batch.to(gl.int64) * call.sink_batch + tile.head
        sink = gl.load(call.sinks + at).to(gl.float32) * LOG2E
        larger = gl.maximum(lse, sink)
        both = larger + gl.log2(gl.exp2(lse - larger) + gl.exp2(sink - larger))
        # By the share of all keys: 2^(pivot - lse) may be 0 where they are far above the pivot.
        share = share * gl.exp2(lse - both)
        above += both - lse
        lse = gl.where(blind, -INFINITY, both)

    inside = row < tile.queries
    entry = (tile.batch * call.heads + tile.head).to(gl.int64)
    place = entry * call.queries + tile.first_query + row
    if plan.HIDES:
        # 0 times a number that is not finite is NaN.
        broken = gl.sum(acc * 0.0, 1) != 0.0
        gl.store(call.broken + place, gl.where(broken, 1, 0).to(gl.int8), mask=inside)
    gl.store(call.lse + place, gl.where(blind, -INFINITY, lse * LN2), mask=inside)
    if plan.STATISTICS:
        w = gl.convert_layout(gl.sum(sums.w, 1), layout)
        p2 = gl.convert_layout(gl.sum(sums.p2, 1), layout)
        top_share = gl.convert_layout(gl.max(sums.top, 1), layout)
        top = pivot + gl.log2(top_share)
        broken = (w != w) | (l != l)
        # -sum p log2 p, every term counted from the lse
        entropy = share * (l * above - w)
        squares = p2 * share * share
        if plan.SINKS:
            broken = broken | (lse != lse)
            off = gl.exp2(sink - lse)
            entropy += gl.where(off > 0.0, off * (lse - sink), off)
            squares += off * off
        in_first_thread = gl.arange(0, 4, gl.SliceLayout(0, sums.first.type.layout)) == 0
        first = gl.sum(gl.where(in_first_thread[None, :], sums.first, 0.0), 1)
        first = gl.convert_layout(first, layout)
        # As the last tile left it, see `Rows.seen`: of a masked tile in base 2.
        scaled = (tile.full_start > tile.start) | (tile.full_stop <= tile.full_start)
        if plan.FEW:  # but the first is not
            scaled = scaled & (tile.stop - tile.start > 1)
        elif not plan.STEADY:  # the first counts as masked, even where it is full and the only one
            scaled = scaled | (tile.stop - tile.start == 1)
        first = gl.where(scaled, first, first * scale_of(call))
        first_p = gl.where(low > 0, 0.0, gl.exp2(first - pivot) * share)
        n = gl.maximum(high - low, 0).to(gl.float32)
        plane = (call.batch * call.heads).to(gl.int64) * call.queries
        at = call.statistics + place
        gl.store(at, of_row(top * LN2, -INFINITY, blind, broken), mask=inside)
        gl.store(at + plane, of_row(lse * LN2, -INFINITY, blind, broken), mask=inside)
        entropy = gl.maximum(entropy * LN2, 0.0)
        gl.store(at + 2 * plane, of_row(entropy, 0.0, blind, broken), mask=inside)
        gl.store(at + 3 * plane, of_row(top_share * share, 0.0, blind, broken), mask=inside)
        gl.store(at + 4 * plane, of_row(squares, 0.0, blind, broken), mask=inside)
        gl.store(at + 5 * plane, of_row(first_p, 0.0, blind, broken), mask=inside)
        gl.store(at + 6 * plane, n, mask=inside)
        if plan.MOMENTS == "all":
            store_moments(call, tile, sums, layout, NTH)
    if plan.VALUES:
        store_output(call, tile, acc, share, NTH)


@gluon.jit
def store_moments(call, tile, sums, layout: gl.constexpr, NTH: gl.constexpr):
    """Mean and m2 of the scores so far; and how many those are, where some will not be summed."""
    plan = call.plan
    row = tile.row + NTH * plan.TEAM + gl.arange(0, plan.TEAM, layout)
    low, high = call.reach(tile, row)
    if plan.MOMENTS == "edges":
        low = gl.minimum(tile.full_stop * plan.KEYS, high)
    n = (high - low).to(gl.float32)
    a = gl.convert_layout(gl.sum(sums.a, 1), layout)
    b = gl.convert_layout(gl.sum(sums.b, 1), layout)
    mean = a / gl.maximum(n, 1.0)
    m2 = gl.where(n > 0.0, gl.maximum(b - a * mean, 0.0) * (LN2 * LN2), 0.0)
    pivot = gl.convert_layout(gl.max(sums.pivot, 1), layout)
    mean = gl.where(n > 0.0, (pivot + mean) * LN2, 0.0)
    inside = row < tile.queries
    entry = (tile.batch * call.heads + tile.head).to(gl.int64)
    plane = (call.batch * call.heads).to(gl.int64) * call.queries
    at = call.statistics + entry * call.queries + tile.first_query + row
    gl.store(at + 7 * plane, mean, mask=inside)
    gl.store(at + 8 * plane, m2, mask=inside)
    if plan.MOMENTS == "edges":
        gl.store(at + 9 * plane, n, mask=inside)


@gluon.jit
def outgrown(call, tile, sums, acc, NTH: gl.constexpr):
    """[m]: 1 where a row has left its pivot so far behind that a sum leaves float32 or its digits,
    or where the first few scores gave it none; or where it is so large that the scores of a full
    tile, which are scaled as they are counted from it, leave its rounding in every exponent.

    A pivot that moves later may make l small again, or NaN, but never p2. What is NaN by right will
    be NaN again.
    """
    plan = call.plan
    layout: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    row = tile.row + NTH * plan.TEAM + gl.arange(0, plan.TEAM, layout)
    low, high = call.reach(tile, row)
    # 0 times a number that is not finite is NaN.
    lost = gl.abs(sums.pivot) > FARTHEST_PIVOT
    l = gl.where(lost, float("nan"), sums.l + sums.p2 * 0.0)
    l = gl.convert_layout(gl.sum(l, 1), layout)
    if plan.STATISTICS:
        out = (l > 2.0**60) | (l != l)  # p2 is at most l^2
    else:
        out = (l > 2.0**100) | (l != l)
    out = out | (gl.sum(acc * 0.0, 1) != 0.0)
    if plan.MOMENTS == "all":
        # Scores that lie far above the pivot and close together: their variance is lost beside
        # the square of their distance. With care it is no more than the slack.
        n = (high - low).to(gl.float32)
        a = gl.convert_layout(gl.sum(sums.a, 1), layout)
        b = gl.convert_layout(gl.sum(sums.b, 1), layout)
        out = out | ((a > n * SLACK) & (b * n - a * a < b * n * 0.03))
    return gl.where(out & (row < tile.queries) & (low < high), 1, 0)


@gluon.jit
def of_row(values, empty, blind, broken):
    return gl.where(broken, float("nan"), gl.where(blind, empty, values))


@gluon.jit
def store_output(call, tile, acc, share, NTH: gl.constexpr):
    plan = call.plan
    out = side_by_side(narrow(acc * by_row(share, acc), plan.dtype))
    layout: gl.constexpr = out.type.layout
    row = tile.row + NTH * plan.TEAM + gl.arange(0, plan.TEAM, gl.SliceLayout(1, layout))
    column = gl.arange(0, plan.V, gl.SliceLayout(0, layout))
    inside = (row < tile.queries)[:, None]
    if plan.NARROW:
        inside = inside & (column < call.value_width)[None, :]
    start = tile.batch.to(gl.int64) * call.out_batch + tile.head.to(gl.int64) * call.out_head
    line = (tile.first_query + row).to(gl.int64) * (call.out_row * 8)
    at = call.out + start * 8 + line[:, None] + column[None, :]
    gl.store(at, out, mask=inside)
    if call.some_are_blind(tile):  # seldom, so afterwards: a choice for each number is not
        low, high = call.reach(tile, row)
        gl.store(at, gl.zeros_like(out), mask=inside & (high <= low)[:, None])


@gluon.jit
def side_by_side(x):
    """[m, n] of 16 bits, laid out so that a store of eight bytes a thread fills whole sectors.

    In a product's result, column 16 g + 8 a + 2 b + e belongs to the thread b = 2 b1 + b0 of four.
    Neighbours swap: it gets column 16 g + 8 b0 + 4 b1 + 2 a + e.
    """
    m: gl.constexpr = x.shape[0]
    n: gl.constexpr = x.shape[1]
    x = gl.inline_asm_elementwise(swap_text(), SWAPPED, [x], dtype=x.dtype, is_pure=False, pack=8)
    x = x.reshape([m, n // 16, 2, 2, 2, 2]).permute((0, 1, 4, 3, 2, 5)).reshape([m, n])
    layout: gl.constexpr = rows_of_a_warp(m, n)
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.constexpr_function
def rows_of_a_warp(rows, width):
    """[rows, width]: a warp has 16 rows, a thread four columns in a row, four threads 16."""
    further = []
    column = 16
    while column < width:
        further.append([0, column])
        column *= 2
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0], *further],
        lane_bases=[[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[row, 0] for row in (16, 32, 64) if row < rows],
        block_bases=[],
        shape=[rows, width],
    )


@gluon.constexpr_function
def swap_text():
    """Two rows by turns, of each the words a = 0 and 1: the odd threads' first for the others'
    second."""
    text = "{ .reg .pred odd; .reg .b32 lane, word; mov.u32 lane, %laneid;"
    text += "and.b32 lane, lane, 1; setp.ne.b32 odd, lane, 0;"
    for first, second in (("$0", "$2"), ("$1", "$3")):
        text += f"selp.b32 word, {first}, {second}, odd;"
        text += "shfl.sync.bfly.b32 word, word, 1, 31, 0xffffffff;"
        text += f"selp.b32 {first}, word, {first}, odd;"
        text += f"selp.b32 {second}, {second}, word, odd;"
    return text + "}"
