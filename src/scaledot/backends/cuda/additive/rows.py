"""The sums of dq, dw and dscale over keys: a program owns a block of rows, tiles [keys, rows]."""

import triton
import triton.language as tl

from scaledot.backends.cuda.additive.pairs import add_units, group_of, tile_gradients
from scaledot.backends.cuda.additive.units import tokens_of
from scaledot.backends.cuda.backward.pairs import (
    add_scales,
    load_softmax,
    score_centre,
    start_scales,
    store_scales,
)
from scaledot.backends.cuda.logits import row_scale
from scaledot.backends.cuda.visible import Place, find_rows, key_tiles


@triton.jit
def rows_kernel(
    call,
    score,
    turned,
    row_units_ptr,
    weight_units_ptr,
    row_scales_ptr,
    blocks,
    splits,
    cut,
    CENTRED: tl.constexpr,
):
    """BLOCK_M rows over every splits-th tile of the keys that they see.

    row_units and weight_units [splits, B, H, units, Q]; row_scales [4, splits, B, H, Q], CENTRED:
    see backward/rows.py.
    """
    program = tl.program_id(0)
    split = program % splits
    block = program // splits % blocks
    head = (program // splits // blocks).to(tl.int64)  # b * H + h
    b = head // call.heads
    row, seq = find_rows(call, b, block, cut.BLOCK_M)
    if row >= seq.row_end:
        return
    place = Place(b, head % call.heads, seq)
    row_end = tl.minimum(row + cut.BLOCK_M, seq.row_end)
    rows = row + tl.arange(0, cut.BLOCK_M)
    inside = rows < row_end
    queries = tokens_of(score.query, head, 0, rows, inside, score)
    softmax = load_softmax(turned, head * call.queries, rows, row_end)
    factor = row_scale(call, place, rows)
    copy = tl.cast(split, tl.int64) * call.batch * call.heads + head
    row_units_ptr += copy * score.UNITS * call.queries
    if weight_units_ptr is not None:
        weight_units_ptr += copy * score.UNITS * call.queries

    scales = start_scales(cut.BLOCK_M, call.FLOAT)
    across_rows = factor
    if call.LOG_N:
        across_rows = factor[None, :]
    centre = score_centre(softmax.pivot[None, :], across_rows, CENTRED)
    tiles = key_tiles(row, row_end, seq, call.window, True, cut.BLOCK_N)
    for start in range(tiles.begin + split * cut.BLOCK_N, tiles.end, splits * cut.BLOCK_N):
        columns = start + tl.arange(0, cut.BLOCK_N)
        keys = tokens_of(score.key, group_of(call, place), 0, columns, columns < seq.key_end, score)
        pairs = tile_gradients(
            queries, keys, softmax, factor, call, place, score, turned, cut.V, False
        )
        if row_scales_ptr is not None:
            scales = add_scales(scales, pairs.p, pairs.grad_s, pairs.raw - centre, 0)
        add_units(
            pairs.grad_raw,
            keys,
            queries,
            pairs.distance,
            row_units_ptr,
            weight_units_ptr,
            call.queries,
            score,
        )
    if row_scales_ptr is not None:
        plane = tl.cast(splits, tl.int64) * call.batch * call.heads * call.queries
        store_scales(row_scales_ptr + copy * call.queries + rows, plane, scales, inside)
