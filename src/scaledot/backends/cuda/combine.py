"""acc = share acc + other_share other, row by row, in one pass over the memory."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from scaledot.backends.cuda.arguments import heads_of, padded
from scaledot.backends.cuda.launching import launch
from scaledot.backends.cuda.logits import load_rows, matrix_of

TILE = 8192  # numbers at a time
MOST_ROWS = 64


def combine(acc: Tensor, share: Tensor, other: Tensor, other_share: Tensor) -> None:
    """acc [B, H, Q, V] in place; other of any type and layout; shares [B, H, Q]."""
    batch, heads, queries, width = acc.shape
    block_v = padded(width)
    block_m = max(min(TILE // block_v, MOST_ROWS), 1)
    blocks = -(-queries // block_m)
    arguments: dict[str, Any] = {
        "acc": heads_of(acc),
        "other": heads_of(other),
        "share_ptr": share.contiguous(),
        "other_share_ptr": other_share.contiguous(),
        "heads": heads,
        "queries": queries,
        "blocks": blocks,
        "V": width,
        "BLOCK_V": block_v,
        "BLOCK_M": block_m,
    }
    if acc.numel():
        launch(_combine_kernel, batch * heads * blocks, acc, arguments)


@triton.jit(do_not_specialize=["heads", "queries", "blocks"])
def _combine_kernel(
    acc,
    other,
    share_ptr,
    other_share_ptr,
    heads,
    queries,
    blocks,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    program = tl.program_id(0)
    rows = program % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    h = (program // blocks % heads).to(tl.int64)
    b = (program // blocks // heads).to(tl.int64)
    lines = (b * heads + h) * queries + rows
    inside = rows < queries
    share = tl.load(share_ptr + lines, mask=inside, other=0.0)[:, None]
    other_share = tl.load(other_share_ptr + lines, mask=inside, other=0.0)[:, None]
    place = matrix_of(acc, b, h)
    before = load_rows(place, rows, queries, V, BLOCK_V, True)
    more = load_rows(matrix_of(other, b, h), rows, queries, V, BLOCK_V, True).to(before.dtype)
    columns = tl.arange(0, BLOCK_V)
    ptrs = (
        place.ptr
        + rows.to(tl.int64)[:, None] * place.stride_row
        + columns.to(tl.int64)[None, :] * place.stride_column
    )
    both = before * share + more * other_share
    tl.store(ptrs, both, mask=inside[:, None] & (columns < V)[None, :])
