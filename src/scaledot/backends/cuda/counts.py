"""How many keys each row sees where a mask tensor has a say: the n of the `log_n` scale."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from scaledot.backends.cuda.arguments import strides
from scaledot.backends.cuda.tile import (
    find_sequence,
    key_tiles,
    load_mask,
    packed_blocks,
    sequence_of,
    split_mask,
    visible,
)
from scaledot.backends.inputs import Inputs
from scaledot.problem import Settings

BLOCK_M, BLOCK_N = 32, 128


def counts_for(inputs: Inputs, settings: Settings, shared: dict[str, Any]) -> dict[str, Any]:
    """The kernels' `counts_ptr` and its strides: None where position alone says the numbers."""
    if not settings.log_n or inputs.mask is None:
        return {"counts_ptr": None, **strides("count_", None, "bh")}
    counts = count_keys(inputs, settings, shared)
    return {"counts_ptr": counts, **strides("count_", counts, "bh")}


def count_keys(inputs: Inputs, settings: Settings, shared: dict[str, Any]) -> Tensor:
    """[B, H|1, Q] int32."""
    assert inputs.mask is not None
    batch, _, queries, _ = inputs.query.shape
    heads = inputs.mask.shape[1]
    counts = torch.empty(batch, heads, queries, dtype=torch.int32, device=inputs.query.device)
    blocks = triton.cdiv(queries, BLOCK_M)
    if inputs.cu_seqlens_q is not None:
        blocks = packed_blocks(queries, shared["sequences"], BLOCK_M)
    names = (
        "mask_ptr key_lengths_ptr cu_seqlens_q_ptr cu_seqlens_k_ptr queries keys sequences "
        "left right stride_mask_b stride_mask_h stride_mask_m stride_mask_n"
    )
    arguments: dict[str, Any] = {
        **{name: shared[name] for name in names.split()},
        "counts_ptr": counts,
        "heads": heads,
        "blocks": blocks,
        "BOTTOM_RIGHT": settings.bottom_right,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
    }
    if counts.numel():
        _count_kernel[(batch * heads * blocks,)](**arguments)
    return counts


@triton.jit
def _count_kernel(
    counts_ptr,
    mask_ptr,
    key_lengths_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    heads,
    blocks,
    queries,
    keys,
    sequences,
    left,
    right,
    stride_mask_b,
    stride_mask_h,
    stride_mask_m,
    stride_mask_n,
    BOTTOM_RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    program = tl.program_id(0)
    block = program % blocks
    head = (program // blocks % heads).to(tl.int64)
    batch = (program // blocks // heads).to(tl.int64)
    index, row = 0, block * BLOCK_M
    if cu_seqlens_q_ptr is not None:
        index, row = find_sequence(cu_seqlens_q_ptr, sequences, block, BLOCK_M)
    seq = sequence_of(
        index,
        batch,
        queries,
        keys,
        key_lengths_ptr,
        cu_seqlens_q_ptr,
        cu_seqlens_k_ptr,
        sequences,
        BOTTOM_RIGHT,
    )
    rows = row + tl.arange(0, BLOCK_M)
    mask_ptr += batch * stride_mask_b + head * stride_mask_h
    count = tl.zeros([BLOCK_M], tl.int32)
    if row < seq.row_end:
        row_end = tl.minimum(row + BLOCK_M, seq.row_end)
        tiles = key_tiles(row, row_end, seq, left, right, True, BLOCK_N)
        for start in range(tiles.begin, tiles.end, BLOCK_N):
            columns = start + tl.arange(0, BLOCK_N)
            seen = visible(rows, columns, seq, left, right)
            mask = load_mask(mask_ptr, stride_mask_m, stride_mask_n, rows, columns, seen)
            _, seen, _ = split_mask(mask, seen, tl.float32)
            count += tl.sum(seen.to(tl.int32), 1)
    offsets = (batch * heads + head) * queries + rows
    tl.store(counts_ptr + offsets, count, mask=rows < seq.row_end)
