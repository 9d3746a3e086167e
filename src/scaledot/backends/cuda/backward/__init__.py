"""Gradients of attention with dot scores, in Triton; the probabilities are computed anew.

With P = 2^(x - lse2) (x the softmax's argument in base 2), delta_i = dO_i . O_i (far from 0 lse2
and delta are renewed, see softmax.py), and dropout's factors on P where it is multiplied by V and
on dP:

    dP = dO V^T      dA = P (dP - delta)      dS = dA, times 1 - (c / cap)^2 where there is a cap
    dV = P^T dO      dQ = scale dS K          dK = scale dS^T Q
    dscale_h = sum_ij dS_ij q_i . k_j          dsink_h = -sum_i p_sink,i delta_i
    dbias = dA, summed over what was broadcast

Three kernels, in which every number has one writer, so that the same inputs give the same bits: one
program a block of keys for dK and dV (keys.py: it walks over all query heads of its key head), one
a block of rows for dQ (rows.py), one a tile of the mask for dbias (mask.py). P, dA and dS of a tile
are found in one place for all of them (pairs.py). Where a head is too wide for shared memory, each
program owns a part of the columns of its result and multiplies part by part.

Rows that see no key pass nothing on: their lse of -inf becomes a pivot of +inf, which makes P zero,
and nothing else of them is read.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from scaledot.backends.cuda.arguments import (
    NO_NUMBERS,
    aligned,
    aligned_rows,
    constants,
    describe_call,
    dot_precision,
    filled_width,
    has_little_memory,
    padded,
    rows_of,
)
from scaledot.backends.cuda.backward.keys import keys_kernel
from scaledot.backends.cuda.backward.mask import mask_kernel
from scaledot.backends.cuda.backward.mask_share import share_mask
from scaledot.backends.cuda.backward.pairs import Cut, Incoming
from scaledot.backends.cuda.backward.rows import rows_kernel
from scaledot.backends.cuda.backward.softmax import renew_far_rows, row_softmax
from scaledot.backends.cuda.backward.totals import (
    no_pairs,
    scale_gradient,
    sink_gradient,
    sums_to_zero,
)
from scaledot.backends.cuda.counts import with_counts
from scaledot.backends.cuda.visible import blocks_of
from scaledot.backends.inputs import Gradients, Inputs, Wanted
from scaledot.problem import Settings


class Config(NamedTuple):
    """The cut of the work: rows and keys of a tile, for dK and dV, then for dQ."""

    keys_m: int
    keys_n: int
    rows_m: int
    rows_n: int
    warps: int
    stages: int


# By bytes of an element and the larger of the padded widths.
CONFIGS = {
    (2, 64): Config(64, 128, 128, 64, 8, 2),
    (2, 128): Config(32, 128, 128, 64, 8, 2),
    (2, 256): Config(32, 64, 128, 32, 8, 1),
    (2, 512): Config(32, 32, 32, 32, 8, 1),
    (4, 64): Config(32, 32, 32, 32, 8, 2),
    (4, 128): Config(16, 16, 32, 16, 8, 1),
    (8, 64): Config(16, 32, 32, 16, 4, 1),
}
SMALLEST = Config(16, 16, 16, 16, 8, 1)
WIDEST = {2: 512, 4: 256, 8: 256}  # columns of a head whose four tiles fit in shared memory
# Instead of what has no room in that of a smaller GPU, 99 KiB.
LITTLE_MEMORY_CONFIGS = {
    CONFIGS[2, 128]: Config(32, 128, 64, 64, 8, 2),
    CONFIGS[2, 256]: Config(32, 32, 64, 32, 8, 1),
}
LITTLE_MEMORY_WIDEST = {2: 256, 4: 256, 8: 128}


def config_for(query: Tensor, widest: int) -> Config:
    size = query.element_size()
    widths = [width for bytes_, width in CONFIGS if bytes_ == size and width >= widest]
    config = CONFIGS[size, min(widths)] if widths else SMALLEST
    return LITTLE_MEMORY_CONFIGS.get(config, config) if has_little_memory(query) else config


def backward(
    inputs: Inputs,
    settings: Settings,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    wanted: Wanted,
    config: Config | None = None,
    whole: bool = True,
) -> Gradients:
    """The gradients of the inputs, each of its tensor's type and shape, contiguous.

    whole=False: lse and out are of more keys than these.
    """
    inputs, grad_out = aligned(inputs), aligned_rows(grad_out)
    query, key, value = inputs.query, inputs.key, inputs.value
    assert value is not None
    batch, heads, queries, _ = query.shape
    groups, keys = key.shape[1], key.shape[2]
    if not (batch and heads and groups and queries and keys):
        return no_pairs(inputs, wanted)
    cut = _cut(query, value)
    parts = cut.PARTS.value
    if config is None:
        config = config_for(query, max(cut.BLOCK_D.value, cut.BLOCK_V.value))
    call = with_counts(describe_call(inputs, settings))
    softmax = row_softmax(grad_out, out, lse.contiguous())
    common: dict[str, Any] = {
        "incoming": Incoming(*rows_of(grad_out), *softmax),
        "num_warps": config.warps,
        "num_stages": config.stages,
        "enable_fp_fusion": query.element_size() == 2,  # as in the forward pass
    }
    by_rows = cut._replace(**constants(BLOCK_M=config.rows_m, BLOCK_N=config.rows_n))
    if whole:
        renew_far_rows(call=call, cut=by_rows, **common)
    common["call"] = call._replace(sinks=NO_NUMBERS)
    grad_query, grad_key, grad_value = (
        torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (query, key, value)
    )

    blocks = blocks_of(call, keys, config.keys_n)
    tiles = cut._replace(**constants(BLOCK_M=config.keys_m, BLOCK_N=config.keys_n))
    keys_kernel[(batch * groups * blocks * parts,)](
        grad_key_ptr=grad_key, grad_value_ptr=grad_value, blocks=blocks, cut=tiles, **common
    )

    centred = whole and sums_to_zero(inputs, settings)
    row_scales = softmax.delta.new_zeros(4, *softmax.delta.shape) if wanted.head_scale else None
    blocks = blocks_of(call, queries, config.rows_m)
    rows_kernel[(batch * heads * blocks * parts,)](
        grad_query_ptr=grad_query,
        row_scales_ptr=row_scales,
        blocks=blocks,
        cut=by_rows,
        **constants(CENTRED=centred),
        **common,
    )

    grad_mask = None
    if wanted.mask:
        assert inputs.mask is not None
        grad_mask, own, programs = share_mask(inputs.mask, config.rows_m, config.rows_n)
        mask_kernel[(programs,)](own=own, cut=by_rows, **common)
    return Gradients(
        query=grad_query,
        key=grad_key,
        value=grad_value,
        mask=grad_mask,
        head_scale=None
        if row_scales is None
        else scale_gradient(inputs.head_scale, row_scales, settings, centred),
        sinks=sink_gradient(inputs.sinks, *softmax) if wanted.sinks else None,
        weight=None,
    )


def _cut(query: Tensor, value: Tensor) -> Cut:
    """The widths of the tiles; their rows and keys come from the configuration."""
    widest = (LITTLE_MEMORY_WIDEST if has_little_memory(query) else WIDEST)[query.element_size()]
    d, v = query.shape[-1], value.shape[-1]
    block_d, block_v = min(padded(d), widest), min(padded(v), widest)
    parts = max(triton.cdiv(d, block_d), triton.cdiv(v, block_v), 1)
    return Cut(
        **constants(
            D=filled_width(query),
            V=filled_width(value),
            OUT_D=d,
            OUT_V=v,
            BLOCK_D=block_d,
            BLOCK_V=block_v,
            PARTS=parts,
            BLOCK_M=0,
            BLOCK_N=0,
            PRECISION=dot_precision(query),
        )
    )
