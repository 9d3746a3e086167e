"""The part of a mask's gradient that a program owns, and who reads that part of the mask.

A program owns one tile of the mask as the caller made it, and goes over all that was broadcast from
it: batch entries, heads, and, where the mask has but one of them, rows or keys.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from scaledot.backends.cuda.arguments import constants


class Own(NamedTuple):
    """The gradient [batch, heads, rows, keys], contiguous, in the mask's own sizes."""

    ptr: Any
    batch: Any
    heads: Any
    row_blocks: Any
    key_blocks: Any
    ONE_ROW: Any
    ONE_KEY: Any


class Share(NamedTuple):
    """[b, b_stop), ...: what reads the tile."""

    b: Any
    b_stop: Any
    h: Any
    h_stop: Any
    row: Any
    row_stop: Any
    key: Any
    key_stop: Any


def share_mask(mask: Tensor, block_m: int, block_n: int) -> tuple[Tensor, Own, int]:
    """The gradient to be filled, its record for the kernel, and how many programs fill it."""
    grad = torch.empty(mask.shape, dtype=mask.dtype, device=mask.device)
    batch, heads, rows, keys = mask.shape
    row_blocks, key_blocks = -(-rows // block_m), -(-keys // block_n)
    one = constants(ONE_ROW=rows == 1, ONE_KEY=keys == 1)
    own = Own(grad, batch, heads, row_blocks, key_blocks, **one)
    return grad, own, batch * heads * row_blocks * key_blocks


@triton.jit
def find_share(call, own, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    program = tl.program_id(0)
    key = program % own.key_blocks * BLOCK_N
    row = program // own.key_blocks % own.row_blocks * BLOCK_M
    h = program // own.key_blocks // own.row_blocks % own.heads
    b = program // own.key_blocks // own.row_blocks // own.heads
    b_stop, h_stop, row_stop, key_stop = b + 1, h + 1, row + BLOCK_M, key + BLOCK_N
    if own.batch == 1:
        b_stop = b + call.batch
    if own.heads == 1:
        h_stop = h + call.heads
    if own.ONE_ROW:
        row_stop = row + call.queries
    if own.ONE_KEY:
        key_stop = key + call.keys
    return Share(b, b_stop, h, h_stop, row, row_stop, key, key_stop)


@triton.jit
def store_share(call, own, share, total):
    """total: dA [M, N] of the pairs that read the tile."""
    rows = share.row + tl.arange(0, total.shape[0])
    columns = share.key + tl.arange(0, total.shape[1])
    own_rows, own_keys = call.queries, call.keys
    if own.ONE_ROW:
        total = tl.sum(total, 0, keep_dims=True)
        rows, own_rows = tl.arange(0, 1), 1
    if own.ONE_KEY:
        total = tl.sum(total, 1, keep_dims=True)
        columns, own_keys = tl.arange(0, 1), 1
    first = (tl.cast(share.b, tl.int64) * own.heads + share.h) * own_rows
    ptrs = own.ptr + (first + rows)[:, None] * own_keys + columns[None, :]
    inside = (rows < own_rows)[:, None] & (columns < own_keys)[None, :]
    tl.store(ptrs, total.to(own.ptr.dtype.element_ty), mask=inside)
