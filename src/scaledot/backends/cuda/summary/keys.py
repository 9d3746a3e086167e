"""The squares of the keys in a launch of their own, which need not wait for the pass over them."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from scaledot.backends.cuda.arguments import padded, strides
from scaledot.backends.cuda.launching import enter_beside, leave_beside
from scaledot.backends.cuda.replay import Once
from scaledot.backends.cuda.summary.places import MAX_CHUNKS

ENTRIES = 8192  # that a program squares at a time


def square_keys(key: Tensor, launches: Once, beside: bool) -> Tensor:
    """Sums of the squares of key [B, G, K, D], equally many for each head, as `fill` takes.

    beside: see launching.enter_beside.
    """
    batch, groups, keys, width = key.shape
    wide = padded(width)
    at_a_time = max(ENTRIES // wide, 1)
    chunks = min(-(-keys // at_a_time), MAX_CHUNKS)
    sums = launches.room(key, batch * groups * chunks, torch.float32)
    arguments: dict[str, Any] = {
        "key_ptr": key,
        "sums_ptr": sums,
        "groups": groups,
        "keys": keys,
        "width": width,
        "chunks": chunks,
        **strides("k", key, "bhnd"),
        "KEYS": at_a_time,
        "WIDTH": wide,
        "BESIDE": beside,
    }
    programs = batch * groups * chunks
    launches.launch(squares_kernel, programs, key, arguments, num_warps=4, launch_pdl=beside)
    return sums


@triton.jit
def squares_kernel(
    key_ptr,
    sums_ptr,
    groups,
    keys,
    width,
    chunks,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_kd,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    BESIDE: tl.constexpr,
):
    """Chunk c of n takes the tiles c, c + n, c + 2n ... of KEYS keys of its head."""
    if BESIDE:
        enter_beside()
    program = tl.program_id(0).to(tl.int64)
    head, chunk = program // chunks, (program % chunks).to(tl.int32)
    keys_ptr = key_ptr + (head // groups) * stride_kb + (head % groups) * stride_kh
    d = tl.arange(0, WIDTH)
    squares = tl.zeros([KEYS, WIDTH], tl.float32)
    for first in range(chunk * KEYS, keys, chunks * KEYS):
        n = first + tl.arange(0, KEYS).to(tl.int64)
        inside = (n < keys)[:, None] & (d < width)[None, :]
        at = keys_ptr + n[:, None] * stride_kn + d.to(tl.int64)[None, :] * stride_kd
        # The pass beside it reads keys and values again, most of them others: they need the cache.
        entries = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")
        squares += entries.to(tl.float32) * entries.to(tl.float32)
    tl.store(sums_ptr + program, tl.sum(tl.sum(squares, 1), 0))
    if BESIDE:
        leave_beside()
