"""Mean and variance of each row's logits over whole blocks of keys, without the logits.

A row sees a long run of keys from the first on, and its logits over them are z = s q.k. With the
mean k' and the covariance C of those N keys,

    mean of z    s q.k'
    m2 of z      s^2 N q^T C q      squared deviations from that mean, summed

which costs 2 d^2 operations a row, however many keys there are; the two sums in the pass over the
scores would cost four a key. So the forward kernel sums only the keys behind the last whole block,
and says in a tenth plane how many they were. (A matrix wider than 128 does not fit into a program;
where every row sees every key, whole_moments.py does with less.) Three launches, none of which
waits for the host:

    measure blocks    mean and Gram matrix of each block of keys, about its own mean
    run on            the same of all keys up to the end of each block, by Chan's rule
    add to rows       the row's own part and that of its blocks together, by the same rule

Everything is centred before it is squared, so a large common part of the keys, which moves no
probability, costs no digits. A key that is not finite breaks the logits of all rows that see it,
and those rows count nowhere.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from scaledot.backends.cuda.arguments import strides
from scaledot.backends.cuda.replay import ONCE, Once
from scaledot.backends.cuda.statistics import PLANES
from scaledot.backends.cuda.whole_moments import by_lane, centre_of
from scaledot.backends.inputs import Inputs
from scaledot.problem import Settings

KEYS = 64  # read at a time
PART = 32  # of the width that is multiplied at a time
MOST_BLOCKS = 32  # one program holds a row of all their matrices


def block_for(keys: int) -> int:
    """Keys of a block: few are cheaper here, but the pass sums what is over."""
    return max(512, 1 << (-(-keys // MOST_BLOCKS) - 1).bit_length())


def add_blocks(
    statistics: Tensor,
    inputs: Inputs,
    settings: Settings,
    block: int,
    tile_rows: int,
    launches: Once = ONCE,
) -> None:
    """Completes the planes mean and m2 of statistics [10, B, H, Q].

    A row's moments so far are of plane 9 many keys, the last that it sees; all before them are
    missing, and are whole blocks of `block` keys, equally many for each row of a tile of
    `tile_rows`.
    """
    query, key = inputs.query, inputs.key
    batch, heads, queries, width = query.shape
    groups, keys = key.shape[1:3]
    assert statistics.is_contiguous()
    assert statistics.shape[0] == PLANES + 1
    assert tile_rows % 64 == 0
    blocks = keys // block
    if blocks == 0:
        return
    padded = max(1 << (width - 1).bit_length(), 16)
    matrix_rows = batch * groups * blocks * padded
    matrices = launches.room(query, matrix_rows * padded, torch.float32)
    # Covariances as the sum of two, so that products of few bits lose nothing that counts.
    kind = torch.bfloat16 if query.dtype == torch.bfloat16 else torch.float32
    covariances = launches.room(query, 2 * matrix_rows * padded, kind).view(2, -1)
    means = launches.room(query, 2 * matrix_rows, torch.float32).view(2, -1)
    warps = 4 if padded <= 64 else 8
    sizes = {"keys": keys, "block": block, "blocks": blocks, "WIDTH": padded}
    measured = {
        "key_ptr": key,
        "matrices_ptr": matrices,
        "means_ptr": means[0],
        "groups": groups,
        "width": width,
        **strides("k", key, "bhnd"),
        **sizes,
        "KEYS": KEYS,
        "LANES": min(32 * warps * 8 // padded, KEYS),
    }
    launches.launch(_measure_blocks, batch * groups * blocks, key, measured, num_warps=warps)
    run = {
        "matrices_ptr": matrices,
        "means_ptr": means[0],
        "covariances_ptr": covariances[0],
        "rest_ptr": covariances[1],
        "running_ptr": means[1],
    }
    run |= sizes | {"BLOCKS": 1 << (blocks - 1).bit_length()}
    launches.launch(_run_on, batch * groups * padded, key, run, num_warps=4)
    rows = 128 if tile_rows % 128 == 0 else 64
    tiles = -(-queries // rows)
    added = {
        "statistics_ptr": statistics,
        "query_ptr": query,
        "covariances_ptr": covariances[0],
        "rest_ptr": covariances[1],
        "running_ptr": means[1],
        "head_scale_ptr": inputs.head_scale,
        "batch": batch,
        "heads": heads,
        "groups": groups,
        "queries": queries,
        "width": width,
        "scale": float(settings.scale),
        "tiles": tiles,
        **strides("q", query, "bhmd"),
        **strides("scale_", inputs.head_scale, "bh"),
        "block": block,
        "blocks": blocks,
        "WIDTH": padded,
        "LOG_N": settings.log_n,
        "ROWS": rows,
        "PART": min(PART, padded),
    }
    # With fewer registers, two programs share a multiprocessor.
    most = {} if warps == 4 else {"maxnreg": 128}
    launches.launch(_add_to_rows, batch * heads * tiles, query, added, num_warps=warps, **most)


@triton.jit
def _measure_blocks(
    key_ptr,
    matrices_ptr,
    means_ptr,
    groups,
    width,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_kd,
    keys,
    block,
    blocks,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program a block."""
    place = tl.program_id(0).to(tl.int64)
    head, index = place // blocks, (place % blocks).to(tl.int32)
    keys_ptr = key_ptr + (head // groups) * stride_kb + (head % groups) * stride_kh
    d = tl.arange(0, WIDTH)
    start = index * block
    stop = tl.minimum(start + block, keys)

    some = _load(keys_ptr, start, stop, d, width, stride_kn, stride_kd, KEYS)
    centre = centre_of(some, start + tl.arange(0, KEYS) < stop)
    gram = tl.zeros([WIDTH, WIDTH], tl.float32)
    sums = tl.zeros([LANES, WIDTH], tl.float32)
    lost = sums  # in rounding
    for at in range(start, stop, KEYS):
        x = _load(keys_ptr, at, stop, d, width, stride_kn, stride_kd, KEYS)
        inside = at + tl.arange(0, KEYS) < stop
        off = tl.where(inside[:, None], x.to(tl.float32) - centre[None, :], 0.0)
        narrow = off.to(x.dtype)
        sums += by_lane(off, LANES)
        lost += by_lane(off - narrow.to(tl.float32), LANES)
        gram = tl.dot(tl.trans(narrow), narrow, gram, input_precision="ieee")
    total = tl.sum(sums, 0)
    mean = centre + total / (stop - start)
    # About the mean of the block itself: of the numbers that were multiplied, rounded as they were.
    total -= tl.sum(lost, 0)
    gram -= total[:, None] * (total / (stop - start))[None, :]
    tl.store(matrices_ptr + place * WIDTH * WIDTH + d[:, None] * WIDTH + d[None, :], gram)
    tl.store(means_ptr + place * WIDTH + d, mean)


@triton.jit
def _load(tokens_ptr, start, stop, d, width, stride_n, stride_d, TOKENS: tl.constexpr):
    """[TOKENS, WIDTH] from `start` on, zeros from `stop` on and behind the width."""
    n = start + tl.arange(0, TOKENS)
    at = tokens_ptr + n.to(tl.int64)[:, None] * stride_n + d[None, :] * stride_d
    return tl.load(at, mask=(n < stop)[:, None] & (d < width)[None, :], other=0.0)


@triton.jit
def _run_on(
    matrices_ptr,
    means_ptr,
    covariances_ptr,
    rest_ptr,
    running_ptr,
    keys,
    block,
    blocks,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Gram matrices of single blocks become covariances of all keys so far; one program a row."""
    program = tl.program_id(0)
    head, row = (program // WIDTH).to(tl.int64), program % WIDTH
    d = tl.arange(0, WIDTH)
    index = tl.arange(0, BLOCKS)
    there = index < blocks
    size = tl.where(there, tl.minimum(keys - index * block, block), 0).to(tl.float32)
    number = tl.maximum(tl.cumsum(size, 0), 1.0)
    place = (head * blocks + index) * WIDTH
    means = tl.load(means_ptr + place[:, None] + d[None, :], mask=there[:, None], other=0.0)
    own = tl.load(means_ptr + place + row, mask=there, other=0.0)
    # Counted from the mean of the first block, which all rows see.
    centre = tl.sum(tl.where((index == 0)[:, None], means, 0.0), 0)
    own_centre = tl.sum(tl.where(index == 0, own, 0.0), 0)
    off = means - centre[None, :]
    own_off = own - own_centre
    at = (place + row)[:, None] * WIDTH + d[None, :]
    gram = tl.load(matrices_ptr + at, mask=there[:, None], other=0.0)
    gram += (own_off * size)[:, None] * tl.where(there[:, None], off, 0.0)
    shift = tl.cumsum(tl.where(there[:, None], off * size[:, None], 0.0), 0) / number[:, None]
    own_shift = tl.cumsum(tl.where(there, own_off * size, 0.0), 0) / number
    covariance = tl.cumsum(gram, 0) / number[:, None] - own_shift[:, None] * shift
    kind: tl.constexpr = covariances_ptr.dtype.element_ty
    rounded = covariance.to(kind).to(tl.float32)
    if kind == tl.float32:  # to the bits that a product in TF32 takes
        rounded = (covariance.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    tl.store(covariances_ptr + at, rounded, mask=there[:, None])
    tl.store(rest_ptr + at, covariance - rounded, mask=there[:, None])
    tl.store(running_ptr + place + row, own_centre + own_shift, mask=there)


@triton.jit
def _add_to_rows(
    statistics_ptr,
    query_ptr,
    covariances_ptr,
    rest_ptr,
    running_ptr,
    head_scale_ptr,
    batch,
    heads,
    groups,
    queries,
    width,
    scale,
    tiles,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_qd,
    stride_scale_b,
    stride_scale_h,
    block,
    blocks,
    WIDTH: tl.constexpr,
    LOG_N: tl.constexpr,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
):
    """One program a tile of rows."""
    program = tl.program_id(0).to(tl.int64)
    head, tile = program // tiles, (program % tiles).to(tl.int32)
    entry, own = head // heads, head % heads
    row = tile * ROWS + tl.arange(0, ROWS)
    inside = row < queries
    plane = tl.cast(batch, tl.int64) * heads * queries
    at = statistics_ptr + head * queries + row
    count = tl.load(at + 6 * plane, mask=inside, other=0.0)
    here = tl.load(at + 9 * plane, mask=inside, other=0.0)
    one = statistics_ptr + head * queries + tile * ROWS  # the rows of a tile miss the same keys
    there = tl.load(one + 6 * plane) - tl.load(one + 9 * plane)
    # The last block that they see; to the nearest: past 2^24 a count has lost its last bits.
    last = (there / block + 0.5).to(tl.int32) - 1
    there = ((last + 1) * block).to(tl.float32)
    if there > 0.0:
        d = tl.arange(0, WIDTH)
        place = (entry * groups + own // (heads // groups)) * blocks
        place = (place + last) * WIDTH
        rows_ptr = query_ptr + entry * stride_qb + own * stride_qh
        product = tl.zeros([ROWS, WIDTH], tl.float32)
        for first in range(0, WIDTH, PART):
            part = first + tl.arange(0, PART)
            x = _load(rows_ptr, tile * ROWS, queries, part, width, stride_qm, stride_qd, ROWS)
            # A covariance is its own transpose: read like this, a column is what a product wants.
            entries = (place + d)[None, :] * WIDTH + part[:, None]
            covariance = tl.load(covariances_ptr + entries)
            rest = tl.load(rest_ptr + entries)
            x = x.to(rest.dtype)
            product = tl.dot(x, covariance, product, input_precision="tf32")
            product = tl.dot(x, rest, product, input_precision="tf32")
        q = _load(rows_ptr, tile * ROWS, queries, d, width, stride_qm, stride_qd, ROWS)
        q = q.to(tl.float32)
        mean_key = tl.load(running_ptr + place + d)
        factor = scale
        if head_scale_ptr is not None:
            each = head_scale_ptr + entry * stride_scale_b + own * stride_scale_h
            factor = scale * tl.load(each).to(tl.float32)
        if LOG_N:
            factor = factor * tl.log(tl.maximum(count, 1.0))
        spread = tl.sum(product * q, 1)
        # What is not a number stays so.
        m2 = factor * factor * there * tl.where(spread < 0.0, 0.0, spread)
        mean = factor * tl.sum(q * mean_key[None, :], 1)
        off = tl.load(at + 7 * plane, mask=inside, other=0.0) - mean
        share = here / (here + there)
        mean += off * share
        m2 += off * off * there * share
        m2 += tl.load(at + 8 * plane, mask=inside, other=0.0)
        tl.store(at + 7 * plane, mean, mask=inside)
        tl.store(at + 8 * plane, m2, mask=inside)
