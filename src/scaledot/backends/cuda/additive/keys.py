"""The sums of dk and dv over rows: a program owns a block of keys. Its tiles are [rows, keys]."""

import triton
import triton.language as tl

from scaledot.backends.cuda.additive.pairs import add_units, add_values, tile_gradients
from scaledot.backends.cuda.additive.units import tokens_of
from scaledot.backends.cuda.backward.pairs import load_softmax
from scaledot.backends.cuda.logits import row_scale
from scaledot.backends.cuda.visible import Place, find_keys, row_tiles


@triton.jit
def keys_kernel(call, score, turned, key_units_ptr, grad_value_ptr, blocks, splits, cut):
    """BLOCK_N keys over every splits-th tile of the rows that see them.

    key_units [splits, B, H, units, K], for a key's units are weighted by each query head's weight
    apart; grad_value [splits, B, G, V, K].
    """
    program = tl.program_id(0)
    split = program % splits
    block = program // splits % blocks
    group = (program // splits // blocks).to(tl.int64)  # b * G + g
    groups = call.heads // call.repeats
    b = group // groups
    key_first, seq, _ = find_keys(call, b, block, cut.BLOCK_N)
    if key_first >= seq.key_end:
        return
    key_stop = tl.minimum(key_first + cut.BLOCK_N, seq.key_end)
    columns = key_first + tl.arange(0, cut.BLOCK_N)
    keys = tokens_of(score.key, group, 0, columns, columns < key_stop, score)
    copy = tl.cast(split, tl.int64) * call.batch
    grad_value_ptr += (copy * groups + group) * cut.V * call.keys
    tiles = row_tiles(key_first, key_stop, seq, call.window, True, cut.BLOCK_M)
    for repeat in range(0, call.repeats):
        place = Place(b, group % groups * call.repeats + repeat, seq)
        head = b * call.heads + place.h
        lines = head * call.queries
        units_ptr = key_units_ptr + (copy * call.heads + head) * score.UNITS * call.keys
        for start in range(tiles.begin + split * cut.BLOCK_M, tiles.end, splits * cut.BLOCK_M):
            rows = start + tl.arange(0, cut.BLOCK_M)
            inside = rows < seq.row_end
            queries = tokens_of(score.query, head, 0, rows, inside, score)
            softmax = load_softmax(turned, lines, rows, seq.row_end)
            factor = row_scale(call, place, rows)
            pairs = tile_gradients(
                queries, keys, softmax, factor, call, place, score, turned, cut.V, True
            )
            do_ptr = turned.grad_out_ptr + head * cut.V * queries.stride
            add_values(pairs.used, do_ptr, queries, keys, grad_value_ptr, call.keys, cut.V)
            add_units(
                pairs.grad_raw, queries, keys, pairs.distance, units_ptr, None, call.keys, score
            )
