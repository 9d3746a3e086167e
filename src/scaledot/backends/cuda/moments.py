"""Mean and variance of each row's logits over whole blocks of keys, without the logits.

A row sees a long run of keys from the first on, and its logits over them are z = s q.k. With the
mean k' and the covariance C of those N keys,

    mean of z    s q.k'
    m2 of z      s^2 N q^T C q      squared deviations from that mean, summed

which costs 2 d^2 operations a row, however many keys there are; the two sums in the pass over the
scores would cost four a key. So the forward kernel sums only the keys behind the last whole block,
and says in a tenth plane how many they were. (Where every row sees every key, whole_moments.py does
with less.) Three launches, none of which waits for the host:

    measure keys    mean and scatter matrix of each block of keys, about its own mean (gram.py)
    run on          the same of all keys up to the end of each block, by Chan's rule
    add to rows     the row's own part and that of its blocks together, by the same rule

C is symmetric: of a matrix of four quarters A, B, B^T, D, for the halves x and y of a query,

    q^T C q = x.(A x) + y.(2 B^T x + D y)

so three quarters are kept, that off the diagonal doubled. They are kept as the sum of two bfloat16
numbers, so that products of few bits lose nothing that counts; so are queries of float16.

A key that is not finite breaks the logits of all rows that see it, and those rows count nowhere.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from scaledot.backends.cuda import gram
from scaledot.backends.cuda.arguments import strides
from scaledot.backends.cuda.launching import enter
from scaledot.backends.cuda.replay import ONCE, Once
from scaledot.backends.cuda.statistics import PLANES, ROW_PLANES
from scaledot.backends.inputs import Inputs
from scaledot.problem import Settings

COUNT, MEAN, M2 = (tl.constexpr(ROW_PLANES.index(name)) for name in ("count", "mean", "m2"))
HERE = tl.constexpr(PLANES)  # of how many keys the moments are so far
MOST_BLOCKS = 32
ROWS = 64  # that a product of a warpgroup has
MOST_TILES = 16  # of rows, one program
STAGES = 3  # of tiles, of which all but one are on their way
RUN_ENTRIES = 256  # of a matrix, one program
RUN_STAGES = 6  # of blocks
LONGEST_SQUARED = 1024  # blocks; in longer sums of the tensor cores, which cut off, squares drift
WIDEST = 128  # for which the matrices fit into shared memory


def block_for(keys: int, width: int) -> int:
    """Keys of a block. The pass sums what is over, but each block has a matrix: of wide ones fewer,
    so that they take at most some 100 bytes a key."""
    return max(512 if width <= 64 else 1024, 1 << (-(-keys // MOST_BLOCKS) - 1).bit_length())


def add_blocks(
    statistics: Tensor,
    inputs: Inputs,
    settings: Settings,
    block: int,
    tile_rows: int,
    launches: Once = ONCE,
    beside: bool = False,
) -> Tensor | None:
    """Completes the planes mean and m2 of statistics [10, B, H, Q].

    A row's moments so far are of plane 9 many keys, the last that it sees; all before them are
    missing, and are whole blocks of `block` keys, equally many for each row of a tile of
    `tile_rows` and no fewer than for the tile before. Returns sums of the squares of the keys where
    it has read just those that count, in short blocks, equally many for each head, as
    `summary.fill` takes.
    beside: the first launch need not wait for the one before it (launching.enter_beside).
    """
    query, key = inputs.query, inputs.key
    assert statistics.is_contiguous()
    assert statistics.shape[0] == PLANES + 1
    assert tile_rows % ROWS == 0
    assert block & (block - 1) == 0
    assert query.dtype in (torch.bfloat16, torch.float16)
    assert query.shape[-1] <= WIDEST
    batch, heads, queries, _ = query.shape
    blocks = key.shape[2] // block
    if blocks == 0:
        return None
    plan = gram.plan_for(query.shape[-1])
    grams = gram.measure(key, plan, block, launches, beside)
    covariances, running = _run_on_all(grams, key, plan, block, launches, beside)
    tiles_each = min(max(block // ROWS, 1), MOST_TILES)  # so that most meet one matrix
    tiles = -(-queries // (ROWS * tiles_each))
    in_steps = gram.strides_in_steps("q", query, "bhnd")
    arguments: dict[str, Any] = {
        "statistics_ptr": statistics,
        "query_ptr": query,
        "covariances_ptr": covariances,
        "running_ptr": running,
        "head_scale_ptr": inputs.head_scale,
        "batch": batch,
        "heads": heads,
        "groups": key.shape[1],
        "queries": queries,
        "scale": float(settings.scale),
        "programs": tiles,
        **in_steps,
        **strides("scale_", inputs.head_scale, "bh"),
        "block": block,
        "blocks": blocks,
        "WIDTH": plan.width,
        "PART": min(plan.width, 64),
        "FILLED": query.shape[-1] == plan.width,
        "LOG_N": settings.log_n,
        "ROWS": ROWS,
        "TILES": tiles_each,
        "STAGES": gram.stages_for(STAGES, query, in_steps),
        "SOON": beside,
    }
    # With fewer registers, more programs share a multiprocessor.
    options: dict[str, Any] = {"maxnreg": 128 if plan.width <= 64 else 255}
    options |= {"num_warps": 4, "num_stages": 1, "launch_pdl": beside}
    launches.launch(_add_to_rows, batch * heads * tiles, query, arguments, **options)
    told = inputs.key_lengths is None and block <= LONGEST_SQUARED
    return grams.squares if told else None


def _run_on_all(
    grams: gram.Grams, key: Tensor, plan: gram.Plan, block: int, launches: Once, soon: bool
) -> tuple[Tensor, Tensor]:
    """For each head and block: two numbers for each entry of three quarters, and the mean."""
    batch, groups, keys = key.shape[:3]
    blocks = keys // block
    part = min(plan.width, 64)
    parts = 2 * (plan.width // part) - 1
    covariances = launches.room(
        key, batch * groups * blocks * parts * part * part * 2, torch.bfloat16
    )
    running = launches.room(key, batch * groups * blocks * plan.width, torch.float32)
    rows = RUN_ENTRIES // part
    arguments: dict[str, Any] = {
        "matrices_ptr": grams.matrices,
        "means_ptr": grams.means,
        "covariances_ptr": covariances,
        "running_ptr": running,
        "block": block,
        "blocks": blocks,
        "chunks": -(-keys // block),
        "WIDTH": plan.width,
        "PART": part,
        "ROWS": rows,
        "STAGES": RUN_STAGES,
        "SOON": soon,
    }
    programs = batch * groups * parts * part // rows
    options = {"num_warps": 2, "num_stages": 1, "launch_pdl": soon}
    launches.launch(_run_on, programs, key, arguments, **options)
    return covariances, running


@triton.jit
def _run_on(
    matrices_ptr,
    means_ptr,
    covariances_ptr,
    running_ptr,
    block,
    blocks,
    chunks,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    SOON: tl.constexpr,
):
    """Scatter matrices of single blocks become covariances of all keys so far; one program a few
    rows of a quarter. Means are counted from that of the first block, which all rows see."""
    if SOON:
        enter(LAST=False)
    PARTS: tl.constexpr = 2 * (WIDTH // PART) - 1
    program = tl.program_id(0).to(tl.int64)
    head, part, row, e, d = gram.place_in_parts(program, WIDTH, PART, ROWS)
    column = tl.arange(0, PART)
    means_ptr += head * chunks * WIDTH
    entries = e[:, None] * WIDTH + d[None, :]
    written = part * (PART * PART * 2) + row[:, None] % PART * PART + column[None, :]
    origin_e = tl.load(means_ptr + e)
    origin_d = tl.load(means_ptr + d)
    scatter = tl.zeros([ROWS, PART], tl.float32)
    sum_e = tl.zeros([ROWS], tl.float32)
    sum_d = tl.zeros([PART], tl.float32)
    times = tl.where(part == 1, 2.0, 1.0)  # also for its mirror image, which is left out
    on_diagonal = (row >= 0) & (part != 1)
    for index in tl.range(0, blocks, num_stages=STAGES):
        own = tl.load(matrices_ptr + (head * chunks + index) * (WIDTH * WIDTH) + entries)
        off_e = tl.load(means_ptr + index * WIDTH + e) - origin_e
        off_d = tl.load(means_ptr + index * WIDTH + d) - origin_d
        # In blocks: each has as many keys as the others.
        scatter += own + (off_e * block)[:, None] * off_d[None, :]
        sum_e += off_e
        sum_d += off_d
        share = 1.0 / (index + 1)
        shift_e = sum_e * share
        covariance = scatter * (share / block) - shift_e[:, None] * (sum_d * share)[None, :]
        covariance *= times
        rounded = covariance.to(tl.bfloat16)
        place = head * blocks + index
        at = covariances_ptr + place * (PARTS * PART * PART * 2) + written
        tl.store(at, rounded)
        tl.store(at + PART * PART, (covariance - rounded.to(tl.float32)).to(tl.bfloat16))
        tl.store(running_ptr + place * WIDTH + e, origin_e + shift_e, mask=on_diagonal)


@triton.jit
def _add_to_rows(
    statistics_ptr,
    query_ptr,
    covariances_ptr,
    running_ptr,
    head_scale_ptr,
    batch,
    heads,
    groups,
    queries,
    scale,
    programs,
    stride_qb,
    stride_qh,
    stride_qn,
    stride_qd,
    width,
    stride_scale_b,
    stride_scale_h,
    block,
    blocks,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    FILLED: tl.constexpr,
    LOG_N: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    SOON: tl.constexpr,
):
    """One program some tiles of rows. x and y are the halves of what is wider than PART."""
    if SOON:
        enter(LAST=False)
    WIDE: tl.constexpr = WIDTH > PART
    MATRIX: tl.constexpr = PART * PART
    program = tl.program_id(0).to(tl.int64)
    head, start = program // programs, (program % programs).to(tl.int32) * (ROWS * TILES)
    entry, own = head // heads, head % heads
    key_head = entry * groups + own // (heads // groups)
    factor = scale
    if head_scale_ptr is not None:
        each = head_scale_ptr + entry * stride_scale_b + own * stride_scale_h
        factor = scale * tl.load(each).to(tl.float32)
    rows_ptr = query_ptr + (entry * stride_qb + own * stride_qh) * STEP
    step = (stride_qn, stride_qd)
    plane = tl.cast(batch, tl.int64) * heads * queries
    planes_ptr = statistics_ptr + head * queries
    d = tl.arange(0, PART)
    square = d[:, None] * PART + d[None, :]

    # The last block that each tile sees; to the nearest: past 2^24 a count has lost its last bits.
    first_row = start + tl.arange(0, TILES) * ROWS
    inside = first_row < queries
    seen = tl.load(planes_ptr + COUNT * plane + first_row, mask=inside, other=0.0)
    seen -= tl.load(planes_ptr + HERE * plane + first_row, mask=inside, other=0.0)
    lasts = (seen / block + 0.5).to(tl.int32) - 1
    final = gram.uniform(tl.max(lasts, 0))
    lowest = gram.uniform(tl.min(tl.where(inside, lasts, final), 0))
    # Most often one: a program has as many rows as a block has keys.
    for last in range(tl.maximum(lowest, 0), final + 1):
        there = ((last + 1) * block).to(tl.float32)
        place = key_head * blocks + last
        matrix_ptr = covariances_ptr + place * ((2 * (WIDTH // PART) - 1) * MATRIX * 2) + square
        xx = tl.load(matrix_ptr)
        xx_rest = tl.load(matrix_ptr + MATRIX)
        x_mean_key = gram.in_columns(tl.load(running_ptr + place * WIDTH + d), tl.bfloat16)
        xy, xy_rest, yy, yy_rest, y_mean_key = xx, xx_rest, xx, xx_rest, x_mean_key
        if WIDE:
            xy = tl.load(matrix_ptr + 2 * MATRIX)
            xy_rest = tl.load(matrix_ptr + 3 * MATRIX)
            yy = tl.load(matrix_ptr + 4 * MATRIX)
            yy_rest = tl.load(matrix_ptr + 5 * MATRIX)
            y_mean_key = tl.load(running_ptr + place * WIDTH + PART + d)
            y_mean_key = gram.in_columns(y_mean_key, tl.bfloat16)
        begin = start + gram.uniform(tl.sum((inside & (lasts < last)).to(tl.int32), 0)) * ROWS
        end = start + gram.uniform(tl.sum((inside & (lasts <= last)).to(tl.int32), 0)) * ROWS
        for at in tl.range(begin, end, ROWS, num_stages=STAGES):
            row = at + tl.arange(0, ROWS)
            read = tl.minimum(row, queries - 1)
            x = gram.load_all_tokens(rows_ptr, read, d, width, step, STEP, FILLED)
            product = _times(x, xx, tl.zeros([ROWS, PART], tl.float32), True)
            product = _times(x, xx_rest, product, False)
            spread = tl.sum(product * x.to(tl.float32), 1)
            means = _times(x, x_mean_key, tl.zeros([ROWS, 16], tl.float32), True)
            if WIDE:
                y = gram.load_all_tokens(rows_ptr, read, PART + d, width, step, STEP, FILLED)
                product = _times(x, xy, tl.zeros([ROWS, PART], tl.float32), True)
                product = _times(x, xy_rest, product, False)
                product = _times(y, yy, product, True)
                product = _times(y, yy_rest, product, False)
                spread += tl.sum(product * y.to(tl.float32), 1)
                means = _times(y, y_mean_key, means, True)
            mean = tl.sum(means, 1)
            row_ptr = planes_ptr + read
            here = tl.load(row_ptr + HERE * plane)
            own_factor = factor
            if LOG_N:
                own_factor *= tl.log(tl.maximum(tl.load(row_ptr + COUNT * plane), 1.0))
            mean *= own_factor
            # What is not a number stays so.
            m2 = own_factor * own_factor * there * tl.where(spread < 0.0, 0.0, spread)
            off = tl.load(row_ptr + MEAN * plane) - mean
            share = here / (here + there)
            m2 += off * off * there * share + tl.load(row_ptr + M2 * plane)
            tl.store(row_ptr + MEAN * plane, mean + off * share, mask=row < queries)
            tl.store(row_ptr + M2 * plane, m2, mask=row < queries)


@triton.jit
def _times(x, matrix, product, ALL: tl.constexpr):
    """x times a matrix of bfloat16 added to the product. ALL: also the bits of x that a bfloat16
    does not hold."""
    near = x.to(tl.bfloat16)
    product = tl.dot(near, matrix, product)
    if ALL and x.dtype == tl.float16:
        far = (x.to(tl.float32) - near.to(tl.float32)).to(tl.bfloat16)
        product = tl.dot(far, matrix, product)
    return product
