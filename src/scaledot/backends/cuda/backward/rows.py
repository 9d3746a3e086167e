"""dQ = scale dS K: a program owns a block of rows. Its tiles are [rows, keys]."""

import triton
import triton.language as tl

from scaledot.backends.cuda.backward.pairs import (
    Rows,
    add_one_by_one,
    add_scales,
    alive_rows,
    down,
    load_softmax,
    pair_gradients,
    product,
    score_centre,
    start_scales,
    store_rows,
    store_scales,
    wide_product,
)
from scaledot.backends.cuda.logits import LN2, holds_broken, load_rows, matrix_of, row_scale
from scaledot.backends.cuda.visible import Place, find_rows, key_tiles, span_of


@triton.jit(do_not_specialize=["blocks"])
def rows_kernel(call, incoming, grad_query_ptr, row_scales_ptr, blocks, cut, CENTRED: tl.constexpr):
    """BLOCK_M rows over the keys that they see.

    row_scales [4, B, H, Q]: the sums of `add_scales`, where the scale's gradient is wanted. Not by
    way of dS K, which rounds dS: its rows would no longer sum to 0, and q . k may be far from it.
    CENTRED: they do sum to 0, so q . k may count from any number.
    """
    own_part = tl.program_id(0) % cut.PARTS  # of the columns of dQ
    program = tl.program_id(0) // cut.PARTS
    block = blocks - 1 - program % blocks  # the last rows see the most keys
    h = (program // blocks % call.heads).to(tl.int64)
    b = (program // blocks // call.heads).to(tl.int64)
    row, seq = find_rows(call, b, block, cut.BLOCK_M)
    if row >= seq.row_end:
        return
    place = Place(b, h, seq)
    row_end = tl.minimum(row + cut.BLOCK_M, seq.row_end)
    rows = row + tl.arange(0, cut.BLOCK_M)
    lines = (b * call.heads + h) * call.queries
    softmax = load_softmax(incoming, lines, rows, row_end)
    factor = row_scale(call, place, rows)
    if call.LOG_N:
        factor = factor[:, None]

    alive = alive_rows(rows, softmax, seq.row_end)
    queries = Rows(matrix_of(call.query, b, h), alive, row_end)
    grads = Rows(matrix_of(incoming, b, h), alive, row_end)
    q = load_rows(queries.matrix, alive, row_end, cut.D, cut.BLOCK_D, True, own_part)  # [M, D]
    do = load_rows(grads.matrix, alive, row_end, cut.V, cut.BLOCK_V, True, own_part)  # [M, V]
    MASKED: tl.constexpr = tl.constexpr(call.mask.ptr is not None)
    BEFORE: tl.constexpr = tl.constexpr(call.window.left is not None)
    tiles = key_tiles(row, row_end, seq, call.window, MASKED, cut.BLOCK_N)
    SCALES: tl.constexpr = tl.constexpr(row_scales_ptr is not None)
    centre = score_centre(softmax.pivot[:, None], factor, CENTRED)
    grad_q = tl.zeros([cut.BLOCK_M, cut.BLOCK_D], call.FLOAT)  # before the scale
    scales = start_scales(cut.BLOCK_M, call.FLOAT)
    for part in tl.static_range(3):
        if (part == 0 and not MASKED) or part == 1 or (part == 2 and BEFORE):
            begin, end = span_of(tiles, part)
            grad_q, scales = _add_key_tiles(
                grad_q,
                scales,
                begin,
                end,
                q,
                do,
                queries,
                grads,
                own_part,
                softmax,
                factor,
                centre,
                rows,
                call,
                place,
                part != 0,
                False,
                SCALES,
                cut,
            )
    if MASKED or BEFORE or call.window.right is not None:
        # The row's own numbers are sound, its gradient is not: a key hidden from it may be broken.
        poisoned = (tl.sum(grad_q * 0.0, 1) != 0.0) & (tl.abs(softmax.pivot) < float("inf"))
        if tl.max(poisoned.to(tl.int32), 0) > 0:  # noqa: SIM102, Triton would compute both
            if _hides_broken_keys(tiles, call, place, cut):
                grad_q, _ = _add_key_tiles(
                    tl.zeros_like(grad_q),
                    scales,
                    tiles.begin,
                    tiles.end,
                    q,
                    do,
                    queries,
                    grads,
                    own_part,
                    softmax,
                    factor,
                    centre,
                    rows,
                    call,
                    place,
                    True,
                    True,
                    False,
                    cut,
                )
    blind = softmax.pivot == float("inf")
    grad_q = tl.where(blind[:, None], 0.0, grad_q)
    if SCALES:
        mine = (rows < row_end) & (own_part == 0) & (blind == 0)
        plane = tl.cast(call.batch, tl.int64) * call.heads * call.queries
        store_scales(row_scales_ptr + lines + rows, plane, scales, mine)
    grad_q = grad_q * (factor * LN2)
    store_rows(grad_query_ptr, lines, rows, row_end, own_part, grad_q, cut.OUT_D, cut.BLOCK_D)


@triton.jit
def _add_key_tiles(
    grad_q,
    scales,
    begin,
    end,
    q,
    do,
    queries,
    grads,
    own_part,
    softmax,
    factor,
    centre,
    rows,
    call,
    place,
    EDGE: tl.constexpr,
    CLEAN: tl.constexpr,
    SCALES: tl.constexpr,
    cut,
):
    """Add the keys from `begin` to `end` to dQ and the scale's gradient.

    EDGE: some are hidden. CLEAN: and what is not finite reaches only the rows that see its key.
    """
    STAGES: tl.constexpr = tl.constexpr(1 if CLEAN else None)
    key_end = place.seq.key_end
    key = matrix_of(call.key, place.b, place.h // call.repeats)
    value = matrix_of(call.value, place.b, place.h // call.repeats)
    for start in tl.range(begin, end, cut.BLOCK_N, num_stages=STAGES):
        columns = start + tl.arange(0, cut.BLOCK_N)
        if cut.PARTS == 1:
            v = load_rows(value, columns, key_end, cut.V, cut.BLOCK_V, EDGE)  # [N, V]
            grad_p = product(do, v, call, cut)  # [M, N]
            k = load_rows(key, columns, key_end, cut.D, cut.BLOCK_D, EDGE)  # [N, D]
            scores = product(q, k, call, cut)  # [M, N]
        else:
            values = Rows(value, columns, key_end)
            grad_p = wide_product(grads, values, cut.V, cut.BLOCK_V, call, cut)
            keys = Rows(key, columns, key_end)
            scores = wide_product(queries, keys, cut.D, cut.BLOCK_D, call, cut)
            k = load_rows(key, columns, key_end, cut.D, cut.BLOCK_D, True, own_part)
        p, _, _, grad_s = pair_gradients(
            scores,
            grad_p,
            factor,
            down(softmax),
            rows[:, None],
            columns[None, :],
            call,
            place,
            EDGE,
            q.dtype == call.FLOAT,
        )
        if SCALES:
            scales = add_scales(scales, p, grad_s, scores - centre, 1)
        if CLEAN:
            keys = Rows(key, columns, key_end)
            grad_q = add_one_by_one(grad_q, grad_s, keys, own_part, cut.BLOCK_N, cut.D, cut.BLOCK_D)
        else:
            grad_q = tl.dot(
                grad_s.to(k.dtype), k, grad_q, input_precision=cut.PRECISION, out_dtype=call.FLOAT
            )  # dS K
    return grad_q, scales


@triton.jit
def _hides_broken_keys(tiles, call, place, cut):
    """Whether a key that is not finite lies in a tile of keys that hides something."""
    key = matrix_of(call.key, place.b, place.h // call.repeats)
    found = False
    for part in tl.static_range(1, 3):
        begin, end = span_of(tiles, part)
        stop = place.seq.key_end
        found |= holds_broken(key, begin, end, stop, cut.D, cut.BLOCK_D, cut.BLOCK_N)
    return found
