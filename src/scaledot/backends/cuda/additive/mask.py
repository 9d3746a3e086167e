"""dbias = dA of the pairs that read it, summed: a program owns a tile of the mask."""

import triton
import triton.language as tl

from scaledot.backends.cuda.additive.pairs import group_of, tile_gradients
from scaledot.backends.cuda.additive.units import tokens_of
from scaledot.backends.cuda.backward.mask_share import find_share, store_share
from scaledot.backends.cuda.backward.pairs import load_softmax
from scaledot.backends.cuda.logits import row_scale
from scaledot.backends.cuda.visible import Place, sequence_of


@triton.jit
def mask_kernel(call, score, turned, own, cut):
    share = find_share(call, own, cut.BLOCK_M, cut.BLOCK_N)
    total = tl.zeros([cut.BLOCK_M, cut.BLOCK_N], call.FLOAT)
    for b in range(share.b, share.b_stop):
        b64 = tl.cast(b, tl.int64)
        for index in range(0, tl.maximum(call.sequences, 1)):
            seq = sequence_of(call, index, b64)
            # Tiles lie where the mask's lie; what is not of this sequence is hidden.
            first = tl.maximum(share.row, seq.row // cut.BLOCK_M * cut.BLOCK_M)
            stop = tl.minimum(share.row_stop, seq.row_end)
            for h in range(share.h, share.h_stop):
                place = Place(b64, tl.cast(h, tl.int64), seq)
                for row in range(first, stop, cut.BLOCK_M):
                    for column in range(share.key, share.key_stop, cut.BLOCK_N):
                        total += _bias_gradients(row, column, call, place, score, turned, cut)
    store_share(call, own, share, total)


@triton.jit
def _bias_gradients(row, column, call, place, score, turned, cut):
    """dA [M, N] of rows and keys of one head; 0 where they are not of the sequence."""
    seq = place.seq
    head = place.b * call.heads + place.h
    rows = row + tl.arange(0, cut.BLOCK_M)
    columns = column + tl.arange(0, cut.BLOCK_N)
    inside = (rows >= seq.row) & (rows < seq.row_end)
    key_mask = (columns >= seq.key) & (columns < seq.key_end)
    queries = tokens_of(score.query, head, 0, rows, inside, score)
    keys = tokens_of(score.key, group_of(call, place), 0, columns, key_mask, score)
    lines = head * call.queries
    softmax = load_softmax(turned, lines, tl.where(inside, rows, seq.row_end), seq.row_end)
    factor = row_scale(call, place, rows)
    pairs = tile_gradients(queries, keys, softmax, factor, call, place, score, turned, cut.V, True)
    return tl.where(inside[:, None] & key_mask[None, :], pairs.grad_a, 0.0)
