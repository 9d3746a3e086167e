"""How many keys each row sees where a mask tensor has a say: the n of the `log_n` scale."""

import torch
import triton
import triton.language as tl

from scaledot.backends.cuda.arguments import Call, numbers_of
from scaledot.backends.cuda.launching import launch
from scaledot.backends.cuda.logits import masked_pairs
from scaledot.backends.cuda.visible import Place, blocks_of, find_rows, key_tiles

BLOCK_M, BLOCK_N = 32, 128


def with_counts(call: Call) -> Call:
    """The call with the numbers of visible keys, where position alone does not say them."""
    mask = call.mask.ptr
    if mask is None or not call.LOG_N:
        return call
    heads = mask.shape[1]
    counts = torch.empty(call.batch, heads, call.queries, dtype=torch.int32, device=mask.device)
    blocks = blocks_of(call, call.queries, BLOCK_M)
    if counts.numel():
        arguments = {
            "call": call,
            "counts_ptr": counts,
            "mask_heads": heads,
            "blocks": blocks,
            "BLOCK_M": BLOCK_M,
            "BLOCK_N": BLOCK_N,
        }
        launch(_count_kernel, call.batch * heads * blocks, counts, arguments)
    return call._replace(counts=numbers_of(counts))


@triton.jit(do_not_specialize=["mask_heads", "blocks"])
def _count_kernel(
    call, counts_ptr, mask_heads, blocks, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """counts_ptr: [B, mask_heads, Q]."""
    program = tl.program_id(0)
    h = (program // blocks % mask_heads).to(tl.int64)
    b = (program // blocks // mask_heads).to(tl.int64)
    row, seq = find_rows(call, b, program % blocks, BLOCK_M)
    rows = row + tl.arange(0, BLOCK_M)
    count = tl.zeros([BLOCK_M], tl.int32)
    if row < seq.row_end:
        row_end = tl.minimum(row + BLOCK_M, seq.row_end)
        tiles = key_tiles(row, row_end, seq, call.window, True, BLOCK_N)
        for start in range(tiles.begin, tiles.end, BLOCK_N):
            columns = start + tl.arange(0, BLOCK_N)
            _, seen, _ = masked_pairs(call, Place(b, h, seq), rows[:, None], columns[None, :])
            count += tl.sum(seen.to(tl.int32), 1)
    offsets = (b * mask_heads + h) * call.queries + rows
    tl.store(counts_ptr + offsets, count, mask=rows < seq.row_end)
