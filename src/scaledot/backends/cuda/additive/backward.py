"""Gradients of additive attention, in Triton; every tanh is computed anew, none is kept.

A program owns a block of tokens of one side, lays them along its threads and walks over tiles of
the other side, so that a sum over the other side stays within a thread (rows.py, keys.py; the
formulas are in pairs.py). Few long heads are shared by several programs (`splits`), each with a
copy of the sums, added up in order at the end: the same inputs give the same bits.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from scaledot.backends.cuda.additive.keys import keys_kernel
from scaledot.backends.cuda.additive.mask import mask_kernel
from scaledot.backends.cuda.additive.pairs import Cut, Turned
from scaledot.backends.cuda.additive.prepare import describe_score
from scaledot.backends.cuda.additive.rows import rows_kernel
from scaledot.backends.cuda.additive.softmax import renew_kernel
from scaledot.backends.cuda.arguments import NO_HEADS, NO_NUMBERS, compute_type, constants
from scaledot.backends.cuda.backward.mask_share import share_mask
from scaledot.backends.cuda.backward.softmax import row_softmax
from scaledot.backends.cuda.backward.totals import (
    no_pairs,
    scale_gradient,
    sink_gradient,
    summed_to,
    sums_to_zero,
)
from scaledot.backends.cuda.launching import launch
from scaledot.backends.cuda.replay import Once
from scaledot.backends.cuda.visible import blocks_of
from scaledot.backends.inputs import Gradients, Inputs, Wanted
from scaledot.problem import Settings

ENOUGH_PROGRAMS = 512  # about four for each multiprocessor of a large GPU
MAX_SPLITS = 8


class Config(NamedTuple):
    """The cut of the work: tokens that a program owns, and of the other side at a time."""

    own: int
    other: int
    warps: int
    registers: int | None = None  # of a thread, at most


# With 128 registers a thread, 512 programs run at once on the 132 multiprocessors of an H200.
FLOAT32 = Config(128, 16, 4, registers=128)
FLOAT64 = Config(32, 16, 4)


def backward(
    inputs: Inputs,
    settings: Settings,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    wanted: Wanted,
    config: Config | None = None,
) -> Gradients:
    """The gradients of the inputs, each of its tensor's type and shape, contiguous."""
    query, key, value, weight = inputs.query, inputs.key, inputs.value, inputs.weight
    assert value is not None
    assert weight is not None
    batch, heads, queries, width = query.shape
    groups, keys = key.shape[1], key.shape[2]
    if not (batch and heads and groups and queries and keys):
        return no_pairs(inputs, wanted)
    dtype = compute_type(query)
    if config is None:
        config = FLOAT64 if dtype == torch.float64 else FLOAT32
    call, score = describe_score(inputs, settings, Once())
    call = call._replace(value=NO_HEADS)
    softmax = row_softmax(grad_out, out, lse.contiguous())
    blind = (lse == -math.inf).unsqueeze(-1)  # their NaN may reach no product
    turned = Turned(
        _turn(value, score.key.tokens, dtype),
        _turn(grad_out.masked_fill(blind, 0.0), score.query.tokens, dtype),
        *softmax,
    )
    options = {"num_warps": config.warps}
    if config.registers is not None and score.PTX.value:
        options["maxnreg"] = config.registers
    units, slope = score.UNITS.value, 4.0 * weight.to(dtype).unsqueeze(-1)  # [B|1, H, D, 1]
    by_rows = Cut(**constants(V=value.shape[-1], BLOCK_M=config.own, BLOCK_N=config.other))
    by_keys = Cut(**constants(V=value.shape[-1], BLOCK_M=config.other, BLOCK_N=config.own))

    def zeros(*shape: int) -> Tensor:
        return query.new_zeros(shape, dtype=dtype)

    blocks = blocks_of(call, queries, config.own)
    common = {"call": call, "score": score, "turned": turned}
    arguments = {**common, "blocks": blocks, "cut": by_rows}
    launch(renew_kernel, batch * heads * blocks, query, arguments, **options)
    common["call"] = call = call._replace(sinks=NO_NUMBERS)
    splits = _splits(batch * heads * blocks)
    row_units = zeros(splits, batch, heads, units, queries)
    weight_units = zeros(splits, batch, heads, units, queries) if wanted.weight else None
    centred = sums_to_zero(inputs, settings)
    row_scales = zeros(4, splits, batch, heads, queries) if wanted.head_scale else None
    arguments = {
        **common,
        "row_units_ptr": row_units,
        "weight_units_ptr": weight_units,
        "row_scales_ptr": row_scales,
        "blocks": blocks,
        "splits": splits,
        "cut": by_rows,
        **constants(CENTRED=centred),
    }
    launch(rows_kernel, splits * batch * heads * blocks, query, arguments, **options)
    grad_query = (row_units.sum(0)[:, :, :width] * slope).mT.to(query.dtype)

    blocks = blocks_of(call, keys, config.own)
    splits = _splits(batch * groups * blocks)
    key_units = zeros(splits, batch, heads, units, keys)
    values = zeros(splits, batch, groups, value.shape[-1], keys)
    arguments = {
        **common,
        "key_units_ptr": key_units,
        "grad_value_ptr": values,
        "blocks": blocks,
        "splits": splits,
        "cut": by_keys,
    }
    launch(keys_kernel, splits * batch * groups * blocks, query, arguments, **options)
    each = key_units.sum(0)[:, :, :width] * slope
    grad_key = each.unflatten(1, (groups, heads // groups)).sum(2).mT.to(key.dtype)

    grad_mask = None
    if wanted.mask:
        assert inputs.mask is not None
        grad_mask, own, programs = share_mask(inputs.mask, config.other, config.own)
        arguments = {**common, "own": own, "cut": by_keys}
        launch(mask_kernel, programs, query, arguments, **options)
    return Gradients(
        query=grad_query.contiguous(),
        key=grad_key.contiguous(),
        value=values.sum(0).mT.to(value.dtype).contiguous(),
        mask=grad_mask,
        head_scale=None
        if row_scales is None
        else scale_gradient(inputs.head_scale, row_scales.sum(1), settings, centred),
        sinks=sink_gradient(inputs.sinks, *softmax) if wanted.sinks else None,
        weight=None
        if weight_units is None
        else summed_to(weight, weight_units.sum((0, -1))[:, :, :width]),
    )


def _splits(programs: int) -> int:
    return min(max(ENOUGH_PROGRAMS // programs, 1), MAX_SPLITS)


def _turn(tensor: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """[B, heads, n, width] as [B, heads, width, tokens], tokens along the memory, 0 to spare."""
    turned = tensor.new_zeros((*tensor.shape[:2], tensor.shape[-1], tokens), dtype=dtype)
    turned[..., : tensor.shape[2]] = tensor.mT
    return turned
