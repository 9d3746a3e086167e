"""What is done to queries, keys and weights before a kernel of additive attention, in one launch.

A program takes the growth and the exponents (units.py) of some tokens of a head, or brings a
head's weights to the type that the kernels compute in. Four units of a token lie side by side, then
those of the next token: a thread loads them at once, and a warp those of neighbours.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from scaledot.backends.cuda.additive.units import (
    APART,
    FAR,
    FAR_REACH,
    NEAR,
    NEAR_REACH,
    Prepared,
    Score,
)
from scaledot.backends.cuda.arguments import (
    NO_HEADS,
    Call,
    compute_type,
    constant,
    describe_call,
    heads_of,
    padded,
    steps_of,
)
from scaledot.backends.cuda.counts import with_counts
from scaledot.backends.cuda.logits import LOG2E, entry
from scaledot.backends.cuda.replay import Once
from scaledot.backends.inputs import Inputs
from scaledot.problem import Settings

PREPARED_TOKENS = 64  # of one program
WIDEST_TILE = 128  # tokens: so far may a tile reach past the last one


def describe_score(inputs: Inputs, settings: Settings, launches: Once) -> tuple[Call, Score]:
    """The call, without queries and keys, and the score, with them."""
    query, key, weight = inputs.query, inputs.key, inputs.weight
    assert weight is not None
    width = query.shape[-1]
    units = max(-(-width // 4), 1) * 4
    dtype = compute_type(query)
    # Tiles start at multiples of their size, those of a packed sequence anywhere.
    past = WIDEST_TILE - 1 if inputs.cu_seqlens_q is not None else 0
    query_tokens = -(-(query.shape[2] + past) // WIDEST_TILE) * WIDEST_TILE
    key_tokens = -(-(key.shape[2] + past) // WIDEST_TILE) * WIDEST_TILE
    query_sizes = _sizes(query, units, query_tokens)
    sizes = [*query_sizes, *_sizes(key, units, key_tokens)]
    sizes.append(weight.shape[0] * weight.shape[1] * (units + 1))
    *parts, weights = launches.room(query, sum(sizes), dtype).split(sizes)
    score = Score(
        query=_prepared(parts[: len(query_sizes)], query_tokens),
        key=_prepared(parts[len(query_sizes) :], key_tokens),
        weight_ptr=weights,
        stride_weight_b=weight.shape[1] * (units + 1) if weight.shape[0] != 1 else 0,
        UNITS=constant(units),
        FACTORED=constant(dtype == torch.float32),
        PTX=constant(torch.version.cuda is not None and isinstance(_prepare_kernel, JITFunction)),
    )
    query_programs = query.shape[0] * query.shape[1] * score.query.tokens // PREPARED_TOKENS
    key_programs = key.shape[0] * key.shape[1] * score.key.tokens // PREPARED_TOKENS
    weight_programs = weight.shape[0] * weight.shape[1]
    programs = query_programs + key_programs + weight_programs
    if programs:
        arguments = {
            "query": heads_of(query),
            "key": heads_of(key),
            "weight_ptr": weight,
            "weight_steps": tuple(steps_of(weight)),
            "score": score,
            "heads": query.shape[1],
            "groups": key.shape[1],
            "queries": query.shape[2],
            "keys": key.shape[2],
            "width": width,
            "query_programs": query_programs,
            "key_programs": key_programs,
            "TOKENS": PREPARED_TOKENS,
            "BLOCK_D": min(padded(units), 64),
            "WEIGHTS": padded(units),
        }
        launches.launch(_prepare_kernel, programs, query, arguments, num_warps=8)
    call = with_counts(describe_call(inputs, settings))
    return call._replace(query=NO_HEADS, key=NO_HEADS), score


def _sizes(tensor: Tensor, units: int, tokens: int) -> list[int]:
    """How many numbers the fields of `Prepared` take for a tensor [B, heads, n, D].

    In numbers of the type that the kernels compute in; all are multiples of 16 bytes.
    """
    heads = tensor.shape[0] * tensor.shape[1]
    entries, distances = heads * units * tokens, heads * tokens
    if compute_type(tensor) == torch.float64:
        return [entries, distances // 2]
    return [entries, entries, distances]


def _prepared(parts: Sequence[Tensor], tokens: int) -> Prepared:
    """In float64 exponents take the place of growth, which is not read."""
    exponent, growth, distance = parts[0], parts[-2], parts[-1]
    return Prepared(exponent, growth, distance.view(torch.int32), tokens)


@triton.jit
def _prepare_kernel(
    query,
    key,
    weight_ptr,
    weight_steps,
    score,
    heads,
    groups,
    queries,
    keys,
    width,
    query_programs,
    key_programs,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WEIGHTS: tl.constexpr,
):
    program = tl.program_id(0)
    if program < query_programs:
        _prepare_tokens(query, score.query, program, heads, queries, width, score, TOKENS, BLOCK_D)
    elif program < query_programs + key_programs:
        program -= query_programs
        _prepare_tokens(key, score.key, program, groups, keys, width, score, TOKENS, BLOCK_D)
    else:
        program -= query_programs + key_programs
        _prepare_weights(weight_ptr, weight_steps, program, heads, width, score, WEIGHTS)


@triton.jit
def _prepare_tokens(
    entries,
    prepared,
    program,
    heads,
    tokens,
    width,
    score,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    blocks = prepared.tokens // TOKENS
    head = (program // blocks).to(tl.int64)  # b * heads + h
    token = program % blocks * TOKENS + tl.arange(0, TOKENS)
    inside = token < tokens
    entries_ptr = entry(entries, head // heads, head % heads)
    first = head * score.UNITS * prepared.tokens
    distance = tl.zeros([TOKENS], tl.int32)
    for start in range(0, score.UNITS, BLOCK_D):
        unit = start + tl.arange(0, BLOCK_D)
        offsets = token.to(tl.int64)[:, None] * entries.stride_row
        offsets = offsets + unit.to(tl.int64)[None, :] * entries.stride_column
        loaded = inside[:, None] & (unit < width)[None, :]
        x = tl.load(entries_ptr + offsets, mask=loaded, other=0.0).to(tl.float64)
        exponent = x * (2.0 * LOG2E)  # in float64: 2^x magnifies the rounding of x
        places = (unit // 4).to(tl.int64)[None, :] * (4 * prepared.tokens) + (unit % 4)[None, :]
        places = first + places + token[:, None] * 4
        stored = (unit < score.UNITS)[None, :]
        exponents = exponent.to(prepared.exponent_ptr.dtype.element_ty)
        tl.store(prepared.exponent_ptr + places, exponents, mask=stored)
        if score.FACTORED:
            factors = tl.abs(x) <= FAR_REACH  # NaN does not
            growth = tl.exp2(tl.where(factors, exponent, 0.0)).to(tl.float32)
            tl.store(prepared.growth_ptr + places, growth, mask=stored)
            apart = tl.where(factors, tl.where(tl.abs(x) <= NEAR_REACH, NEAR, APART), FAR)
            distance = tl.maximum(distance, tl.max(apart, 1))
    tl.store(prepared.distance_ptr + head * prepared.tokens + token, distance)


@triton.jit
def _prepare_weights(weight_ptr, steps, head, heads, width, score, WEIGHTS: tl.constexpr):
    """One row [units + 1] of score.weight_ptr; head = b * H + h."""
    unit = tl.arange(0, WEIGHTS)
    ptrs = weight_ptr + head // heads * steps[0] + head % heads * steps[1] + unit * steps[2]
    weight = tl.load(ptrs, mask=unit < width, other=0.0).to(score.weight_ptr.dtype.element_ty)
    row_ptr = score.weight_ptr + head * (score.UNITS + 1)
    tl.store(row_ptr + unit, weight, mask=unit < score.UNITS)
    tl.store(row_ptr + score.UNITS, tl.sum(weight, 0))
