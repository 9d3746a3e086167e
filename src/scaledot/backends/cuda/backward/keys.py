"""dK = scale dS^T Q and dV = P^T dO: a program owns a block of keys. Its tiles are [keys, rows]."""

import triton
import triton.language as tl

from scaledot.backends.cuda.backward.pairs import (
    Rows,
    across,
    add_one_by_one,
    alive_rows,
    load_softmax,
    pair_gradients,
    product,
    store_rows,
    wide_product,
)
from scaledot.backends.cuda.logits import LN2, holds_broken, load_rows, matrix_of, number, row_scale
from scaledot.backends.cuda.visible import Place, Tiles, find_keys, row_tiles, span_of


@triton.jit(do_not_specialize=["blocks"])
def keys_kernel(call, incoming, grad_key_ptr, grad_value_ptr, blocks, cut):
    """BLOCK_N keys, over all rows and query heads that see them."""
    groups = call.heads // call.repeats
    own_part = tl.program_id(0) % cut.PARTS  # of the columns of dK and dV
    program = tl.program_id(0) // cut.PARTS
    block = program % blocks  # the first keys are seen by the most rows
    g = (program // blocks % groups).to(tl.int64)
    b = (program // blocks // groups).to(tl.int64)
    start, seq, stored_end = find_keys(call, b, block, cut.BLOCK_N)
    if start >= stored_end:
        return
    columns = start + tl.arange(0, cut.BLOCK_N)
    keys = Rows(matrix_of(call.key, b, g), columns, seq.key_end)
    values = Rows(matrix_of(call.value, b, g), columns, seq.key_end)
    k = load_rows(keys.matrix, columns, seq.key_end, cut.D, cut.BLOCK_D, True)  # [N, D]
    v = load_rows(values.matrix, columns, seq.key_end, cut.V, cut.BLOCK_V, True)  # [N, V]
    MASKED: tl.constexpr = tl.constexpr(call.mask.ptr is not None)
    BEFORE: tl.constexpr = tl.constexpr(call.window.right is not None)
    tiles = _tiles(call, start, seq, cut)
    grad_k = tl.zeros([cut.BLOCK_N, cut.BLOCK_D], call.FLOAT)
    grad_v = tl.zeros([cut.BLOCK_N, cut.BLOCK_V], call.FLOAT)
    for repeat in range(0, call.repeats):
        place = Place(b, g * call.repeats + repeat, seq)
        for part in tl.static_range(3):
            if (part == 0 and not MASKED) or part == 1 or (part == 2 and BEFORE):
                first, stop = span_of(tiles, part)
                grad_k, grad_v = _add_row_tiles(
                    grad_k,
                    grad_v,
                    first,
                    stop,
                    k,
                    v,
                    keys,
                    values,
                    own_part,
                    call,
                    place,
                    incoming,
                    part != 0,
                    False,
                    cut,
                )
    if MASKED or BEFORE or call.window.left is not None:
        # Rows that see none of these keys may have broken queries or gradients.
        poisoned = (tl.sum(grad_k * 0.0, 1) != 0.0) | (tl.sum(grad_v * 0.0, 1) != 0.0)
        if tl.max(poisoned.to(tl.int32), 0) > 0:  # noqa: SIM102, Triton would compute both
            if _hides_broken_rows(tiles, seq.row_end, b, g, call, incoming, cut):
                grad_k = tl.zeros_like(grad_k)
                grad_v = tl.zeros_like(grad_v)
                for repeat in range(0, call.repeats):
                    grad_k, grad_v = _add_row_tiles(
                        grad_k,
                        grad_v,
                        tiles.begin,
                        tiles.end,
                        k,
                        v,
                        keys,
                        values,
                        own_part,
                        call,
                        Place(b, g * call.repeats + repeat, seq),
                        incoming,
                        True,
                        True,
                        cut,
                    )
    if not call.LOG_N and call.head_scale.ptr is None:  # one factor for the whole call
        grad_k = grad_k * number(call.scale, call.FLOAT)
    # Keys past their length share the block: a row that is not finite hides from them as well.
    real = (columns < seq.key_end)[:, None]
    grad_k, grad_v = tl.where(real, grad_k, 0.0), tl.where(real, grad_v, 0.0)
    first = (b * groups + g) * call.keys
    store_rows(grad_key_ptr, first, columns, stored_end, own_part, grad_k, cut.OUT_D, cut.BLOCK_D)
    store_rows(grad_value_ptr, first, columns, stored_end, own_part, grad_v, cut.OUT_V, cut.BLOCK_V)


@triton.jit
def _tiles(call, start, seq, cut):
    """The tiles of rows that see some of the block's keys."""
    end = tl.minimum(start + cut.BLOCK_N, seq.key_end)
    tiles = row_tiles(start, end, seq, call.window, call.mask.ptr is not None, cut.BLOCK_M)
    # A block that the sequence does not fill has hidden keys in every tile.
    whole = start + cut.BLOCK_N <= seq.key_end
    full = tl.where(whole, tiles.full, tiles.begin)
    full_end = tl.where(whole, tiles.full_end, tiles.begin)
    last = tl.where(start < seq.key_end, tiles.end, tiles.begin)
    return Tiles(tiles.begin, full, full_end, last)


@triton.jit
def _add_row_tiles(
    grad_k,
    grad_v,
    begin,
    end,
    k,
    v,
    keys,
    values,
    own_part,
    call,
    place,
    incoming,
    EDGE: tl.constexpr,
    CLEAN: tl.constexpr,
    cut,
):
    """Add the rows from `begin` to `end` of one head to dK and dV.

    EDGE: some pairs are hidden. CLEAN: and what is not finite reaches only the keys that its row
    sees.
    """
    STAGES: tl.constexpr = tl.constexpr(1 if CLEAN else None)
    row_end = place.seq.row_end
    query = matrix_of(call.query, place.b, place.h)
    grad_out = matrix_of(incoming, place.b, place.h)
    lines = (place.b * call.heads + place.h) * call.queries
    for start in tl.range(begin, end, cut.BLOCK_M, num_stages=STAGES):
        rows = start + tl.arange(0, cut.BLOCK_M)
        softmax = load_softmax(incoming, lines, rows, row_end)
        alive = rows
        if EDGE:
            alive = alive_rows(rows, softmax, row_end)
        factor = row_scale(call, place, rows)
        if call.LOG_N:
            factor = factor[None, :]
        if cut.PARTS == 1:
            q = load_rows(query, alive, row_end, cut.D, cut.BLOCK_D, EDGE)  # [M, D]
            scores = product(k, q, call, cut)  # [N, M]
            do = load_rows(grad_out, alive, row_end, cut.V, cut.BLOCK_V, EDGE)  # [M, V]
            grad_p = product(v, do, call, cut)  # [N, M]
        else:
            queries = Rows(query, alive, row_end)
            scores = wide_product(keys, queries, cut.D, cut.BLOCK_D, call, cut)
            grads = Rows(grad_out, alive, row_end)
            grad_p = wide_product(values, grads, cut.V, cut.BLOCK_V, call, cut)
            q = load_rows(query, alive, row_end, cut.D, cut.BLOCK_D, True, own_part)
            do = load_rows(grad_out, alive, row_end, cut.V, cut.BLOCK_V, True, own_part)
        _, p, _, grad_s = pair_gradients(
            scores,
            grad_p,
            factor,
            across(softmax),
            rows[None, :],
            keys.rows[:, None],
            call,
            place,
            EDGE,
            q.dtype == call.FLOAT,
        )
        if call.LOG_N or call.head_scale.ptr is not None:
            grad_s = grad_s * (factor * LN2)
        if CLEAN:
            some = Rows(grad_out, alive, row_end)
            grad_v = add_one_by_one(grad_v, p, some, own_part, cut.BLOCK_M, cut.V, cut.BLOCK_V)
            some = Rows(query, alive, row_end)
            grad_k = add_one_by_one(grad_k, grad_s, some, own_part, cut.BLOCK_M, cut.D, cut.BLOCK_D)
        else:
            grad_v = tl.dot(
                p.to(do.dtype), do, grad_v, input_precision=cut.PRECISION, out_dtype=call.FLOAT
            )  # P^T dO
            grad_k = tl.dot(
                grad_s.to(q.dtype), q, grad_k, input_precision=cut.PRECISION, out_dtype=call.FLOAT
            )  # dS^T Q
    return grad_k, grad_v


@triton.jit
def _hides_broken_rows(tiles, stop, b, g, call, incoming, cut):
    """Whether a query or a gradient that is not finite lies in a tile of rows that hides pairs."""
    found = False
    for repeat in range(0, call.repeats):
        query = matrix_of(call.query, b, g * call.repeats + repeat)
        grad_out = matrix_of(incoming, b, g * call.repeats + repeat)
        for part in tl.static_range(1, 3):
            begin, end = span_of(tiles, part)
            found |= holds_broken(query, begin, end, stop, cut.D, cut.BLOCK_D, cut.BLOCK_M)
            found |= holds_broken(grad_out, begin, end, stop, cut.V, cut.BLOCK_V, cut.BLOCK_M)
    return found
