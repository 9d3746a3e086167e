"""dbias = dA of the pairs that read it, summed: a program owns a tile of the mask."""

import triton
import triton.language as tl

from scaledot.backends.cuda.backward.mask_share import find_share, store_share
from scaledot.backends.cuda.backward.pairs import (
    Rows,
    alive_rows,
    down,
    load_softmax,
    pair_gradients,
    wide_product,
)
from scaledot.backends.cuda.logits import matrix_of, row_scale
from scaledot.backends.cuda.visible import Place, key_tiles, sequence_of


@triton.jit
def mask_kernel(call, incoming, own, cut):
    share = find_share(call, own, cut.BLOCK_M, cut.BLOCK_N)
    total = tl.zeros([cut.BLOCK_M, cut.BLOCK_N], call.FLOAT)
    for b in range(share.b, share.b_stop):
        for index in range(0, tl.maximum(call.sequences, 1)):
            b64 = tl.cast(b, tl.int64)
            seq = sequence_of(call, index, b64)
            for h in range(share.h, share.h_stop):
                place = Place(b64, tl.cast(h, tl.int64), seq)
                total = _add_pairs(total, share, call, place, incoming, cut)
    store_share(call, own, share, total)


@triton.jit
def _add_pairs(total, share, call, place, incoming, cut):
    """dA of one head's rows and keys in the share onto `total`, tile on tile.

    Tiles lie where the mask's lie; what of them is not of this sequence adds nothing.
    """
    b, h, seq = place
    query = matrix_of(call.query, b, h)
    grad_out = matrix_of(incoming, b, h)
    key = matrix_of(call.key, b, h // call.repeats)
    value = matrix_of(call.value, b, h // call.repeats)
    lines = (b * call.heads + h) * call.queries
    first_row = tl.maximum(share.row, seq.row // cut.BLOCK_M * cut.BLOCK_M)
    for row in range(first_row, tl.minimum(share.row_stop, seq.row_end), cut.BLOCK_M):
        rows = row + tl.arange(0, cut.BLOCK_M)
        mine = (rows >= seq.row) & (rows < seq.row_end)
        own_rows = tl.where(mine, rows, seq.row_end)
        softmax = load_softmax(incoming, lines, own_rows, seq.row_end)
        alive = alive_rows(rows, softmax, seq.row_end)
        factor = row_scale(call, place, rows)
        if call.LOG_N:
            factor = factor[:, None]
        queries = Rows(query, alive, seq.row_end)
        grads = Rows(grad_out, alive, seq.row_end)
        # Tiles of keys that none of these rows reaches add nothing.
        begin, end = tl.maximum(row, seq.row), tl.minimum(row + cut.BLOCK_M, seq.row_end)
        reach = key_tiles(begin, end, seq, call.window, True, cut.BLOCK_N)
        first_key = tl.maximum(share.key, reach.begin // cut.BLOCK_N * cut.BLOCK_N)
        for start in range(first_key, tl.minimum(share.key_stop, reach.end), cut.BLOCK_N):
            columns = start + tl.arange(0, cut.BLOCK_N)
            inside = tl.where(columns >= seq.key, columns, seq.key_end)
            keys = Rows(key, inside, seq.key_end)
            scores = wide_product(queries, keys, cut.D, cut.BLOCK_D, call, cut)  # [M, N]
            values = Rows(value, inside, seq.key_end)
            grad_p = wide_product(grads, values, cut.V, cut.BLOCK_V, call, cut)  # [M, N]
            _, _, grad_a, _ = pair_gradients(
                scores,
                grad_p,
                factor,
                down(softmax),
                rows[:, None],
                inside[None, :],
                call,
                place,
                True,
                query.ptr.dtype.element_ty == call.FLOAT,
            )
            total += tl.where(mine[:, None], grad_a, 0.0)
    return total
