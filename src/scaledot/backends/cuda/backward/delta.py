"""delta_i = dO_i . O_i: what every pair of row i has in common in the softmax's gradient."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from scaledot.backends.cuda.arguments import heads_of, padded
from scaledot.backends.cuda.logits import load_rows, matrix_of

TILE = 8192  # numbers of dO at a time
MOST_ROWS = 64


def row_deltas(grad_out: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """[B, H, Q]; 0 in rows that see no key, whatever comes in."""
    batch, heads, queries, width = out.shape
    delta = torch.empty_like(lse)
    block_v = padded(width)
    block_m = max(min(TILE // block_v, MOST_ROWS), 1)
    blocks = triton.cdiv(queries, block_m)
    arguments: dict[str, Any] = {
        "grad_out": heads_of(grad_out),
        "out": heads_of(out),
        "lse_ptr": lse,
        "delta_ptr": delta,
        "heads": heads,
        "queries": queries,
        "blocks": blocks,
        "V": width,
        "BLOCK_V": block_v,
        "BLOCK_M": block_m,
    }
    _delta_kernel[(batch * heads * blocks,)](**arguments)
    return delta


@triton.jit(do_not_specialize=["heads", "queries", "blocks"])
def _delta_kernel(
    grad_out,
    out,
    lse_ptr,
    delta_ptr,
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
    lines = (b * heads + h) * queries
    lse = tl.load(lse_ptr + lines + rows, mask=rows < queries, other=0.0)
    do = load_rows(matrix_of(grad_out, b, h), rows, queries, V, BLOCK_V, True).to(lse.dtype)
    o = load_rows(matrix_of(out, b, h), rows, queries, V, BLOCK_V, True).to(lse.dtype)
    delta = tl.where(lse == float("-inf"), 0.0, tl.sum(do * o, 1))
    tl.store(delta_ptr + lines + rows, delta, mask=rows < queries)
