"""Find the softmax of rows far from 0 anew, with additive scores (see backward/softmax.py)."""

import triton
import triton.language as tl

from scaledot.backends.cuda.additive.pairs import group_of, tile_scores
from scaledot.backends.cuda.additive.units import tokens_of
from scaledot.backends.cuda.backward.pairs import load_softmax
from scaledot.backends.cuda.backward.softmax import add_pairs, far_rows, start_pairs, store_renewed
from scaledot.backends.cuda.logits import row_scale
from scaledot.backends.cuda.visible import Place, find_rows, key_tiles


@triton.jit
def renew_kernel(call, score, turned, blocks, cut):
    """Renew BLOCK_M rows over the keys that they see; blocks without far rows end at once."""
    program = tl.program_id(0)
    block = program % blocks
    head = (program // blocks).to(tl.int64)  # b * H + h
    b = head // call.heads
    row, seq = find_rows(call, b, block, cut.BLOCK_M)
    if row >= seq.row_end:
        return
    place = Place(b, head % call.heads, seq)
    row_end = tl.minimum(row + cut.BLOCK_M, seq.row_end)
    rows = row + tl.arange(0, cut.BLOCK_M)
    places = head * call.queries + rows
    far = far_rows(load_softmax(turned, head * call.queries, rows, row_end))
    if tl.max(tl.where(far, 1, 0), 0) == 0:
        return
    queries = tokens_of(score.query, head, 0, rows, rows < row_end, score)
    factor = row_scale(call, place, rows)
    sums = start_pairs(call, b, place.h, cut.BLOCK_M)
    tiles = key_tiles(row, row_end, seq, call.window, True, cut.BLOCK_N)
    for start in range(tiles.begin, tiles.end, cut.BLOCK_N):
        columns = start + tl.arange(0, cut.BLOCK_N)
        keys = tokens_of(score.key, group_of(call, place), 0, columns, columns < seq.key_end, score)
        tile = tile_scores(queries, keys, factor, call, place, score, turned, cut.V, False)
        sums = add_pairs(
            sums, tile.raw, tile.grad_p, tile.factor, tile.i, tile.j, call, place, True, True, 0
        )
    store_renewed(turned, places, sums, far)
