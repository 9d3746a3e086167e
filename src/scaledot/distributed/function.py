"""Attention over ranks as a function of autograd: block by block, forward and backward."""

import math
from typing import Any

import torch
from torch import Tensor

from scaledot.backends.cpu.logits import Plan
from scaledot.backends.cpu.moments import gram_moments
from scaledot.backends.inputs import Inputs, Wanted
from scaledot.distributed.blocks import Block, Sight, blocks
from scaledot.distributed.call import Call
from scaledot.distributed.partial import Partial
from scaledot.distributed.transport import Round


def compute_type(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def positions(call: Call, device: torch.device) -> Tensor:
    """Of the shard's rows in the sequence."""
    parts = [torch.arange(s.start, s.start + s.length, device=device) for s in call.queries]
    return torch.cat(parts)


def visible_keys(call: Call, device: torch.device) -> Tensor:
    """How many keys of the sequence each row of the shard may see."""
    sight, keys = call.sight, call.key_count
    diagonal = positions(call, device) + sight.offset
    low, high = torch.zeros_like(diagonal), torch.full_like(diagonal, keys)
    if sight.left is not None:
        low = (diagonal - sight.left).clamp(0, keys)
    if sight.right is not None:
        high = (diagonal + sight.right + 1).clamp(0, keys)
    return (high - low).clamp(min=0)


def run(call: Call, inputs: Inputs) -> Partial:
    """The shard's rows over the keys of all ranks; no graph."""
    query, value = inputs.query, inputs.value
    like = query.new_empty(0, dtype=compute_type(query))
    width = None if value is None else value.shape[-1]
    partial = Partial(tuple(query.shape[:3]), width, like, call.measures)
    transport = call.transport(call.ranks, call.keys, inputs.key, value)
    for here in transport.rounds():
        for block in blocks(call.queries, here.shard, call.sight):
            _add_block(partial, call, inputs, here, block)
        if call.measures:
            _look_at_first(partial, call, inputs, here)
    if inputs.sinks is not None:
        partial.add_sink(inputs.sinks)
    return partial


def _part(inputs: Inputs, here: Round, block: Block) -> Inputs:
    """What the block's kernel gets. The sink is no key: it is merged in once, at the end."""
    rows, keys = slice(*block.rows), slice(*block.keys)
    return inputs._replace(
        query=inputs.query[:, :, rows],
        key=here.key[:, :, keys],
        value=None if here.value is None else here.value[:, :, keys],
        sinks=None,
    )


def _add_block(partial: Partial, call: Call, inputs: Inputs, here: Round, block: Block) -> None:
    part, rows = _part(inputs, here, block), slice(*block.rows)
    settings = block.sight.settings(call.settings)
    out, found = call.engine.forward(part, settings, call.measures, call.measures)
    partial.add(rows, None if part.value is None else out, found.lse, found.rows)
    if call.measures:
        clean = part._replace(key=part.key.nan_to_num(0.0, 0.0, 0.0))  # rows that see it are broken
        moments = gram_moments(Plan(clean, settings))
        partial.moments.add(rows, *(tensor.flatten(1, 2) for tensor in moments))


def _look_at_first(partial: Partial, call: Call, inputs: Inputs, here: Round) -> None:
    """The softmax's argument at the sequence's first key, where these keys hold it."""
    place = 0
    for segment in here.shard:
        if segment.start == 0 and segment.length:
            break
        place += segment.length
    else:
        return
    query, key = inputs.query, here.key[:, :, place]
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1).unsqueeze(2)
    dtype = partial.lse.dtype
    argument = (query.to(dtype) * key.to(dtype)).sum(-1) * call.settings.scale
    if inputs.head_scale is not None:
        argument = argument * inputs.head_scale.to(dtype).unsqueeze(-1)
    if call.settings.softcap:
        argument = call.settings.softcap * (argument / call.settings.softcap).tanh()
    hidden = ~_sees_first(call.sight, positions(call, query.device))
    partial.first = argument.masked_fill(hidden, -math.inf)


def _sees_first(sight: Sight, rows: Tensor) -> Tensor:
    diagonal = rows + sight.offset
    seen = torch.ones_like(diagonal, dtype=torch.bool)
    if sight.left is not None:
        seen &= diagonal - sight.left <= 0
    if sight.right is not None:
        seen &= diagonal + sight.right >= 0
    return seen


class Attend(torch.autograd.Function):
    """(call, partials: a list that takes the Partial, query, key, value, head_scale, sinks)."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        partials: list[Partial],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        head_scale: Tensor | None,
        sinks: Tensor | None,
    ) -> Tensor:
        partial = run(call, as_inputs(query, key, value, head_scale, sinks))
        partials.append(partial)
        assert partial.out is not None
        out = partial.out.to(query.dtype)
        ctx.call = call
        ctx.save_for_backward(query, key, value, head_scale, sinks, out, partial.lse)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads_out: Any) -> Any:  # type: ignore[bad-override]
        (grad_out,) = grads_out
        *tensors, out, lse = ctx.saved_tensors
        inputs = as_inputs(*tensors)
        wants_scale, wants_sinks = ctx.needs_input_grad[5:]
        grads = _differentiate(ctx.call, inputs, grad_out, out, lse, wants_scale)
        grad_sinks = None
        if wants_sinks:
            assert inputs.sinks is not None
            grad_sinks = _of_sinks(inputs.sinks, grad_out, out, lse)
        return None, None, *grads, grad_sinks


def as_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    head_scale: Tensor | None,
    sinks: Tensor | None,
) -> Inputs:
    return Inputs(query, key, value, None, head_scale, sinks, None, None, None, None, None)


def _differentiate(
    call: Call, inputs: Inputs, grad_out: Tensor, out: Tensor, lse: Tensor, wants_scale: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Of query, key, value and head_scale. With the lse of all keys, a block's share is its own."""
    dtype = lse.dtype
    grad_query = torch.zeros_like(inputs.query, dtype=dtype)
    grad_scale = None
    if wants_scale:
        assert inputs.head_scale is not None
        grad_scale = torch.zeros_like(inputs.head_scale, dtype=dtype)
    wanted = Wanted(mask=False, head_scale=wants_scale, sinks=False, weight=False)

    def differentiate(here: Round) -> tuple[Tensor, Tensor]:
        assert here.value is not None
        grad_key = torch.zeros_like(here.key, dtype=dtype)
        grad_value = torch.zeros_like(here.value, dtype=dtype)
        for block in blocks(call.queries, here.shard, call.sight):
            rows, keys = slice(*block.rows), slice(*block.keys)
            grads = call.engine.backward(
                _part(inputs, here, block),
                block.sight.settings(call.settings),
                grad_out[:, :, rows],
                out[:, :, rows],
                lse[:, :, rows].contiguous(),
                wanted,
            )
            grad_query[:, :, rows] += grads.query
            grad_key[:, :, keys] += grads.key
            grad_value[:, :, keys] += grads.value
            if grad_scale is not None:
                assert grads.head_scale is not None
                grad_scale.add_(grads.head_scale)
        return grad_key, grad_value

    transport = call.transport(call.ranks, call.keys, inputs.key, inputs.value)
    grad_key, grad_value = transport.gradients(differentiate)
    if grad_scale is not None and inputs.head_scale is not None:
        grad_scale = grad_scale.to(inputs.head_scale.dtype)
    own = inputs.query.dtype
    return grad_query.to(own), grad_key.to(own), grad_value.to(own), grad_scale


def _of_sinks(sinks: Tensor, grad_out: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """The sink gives nothing and takes p_sink: its gradient is -p_sink (dL/dout . out)."""
    delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    pivot = torch.where(lse == -math.inf, math.inf, lse)
    share = (sinks.to(lse.dtype).unsqueeze(-1) - pivot).exp()
    return -(share * delta).sum(-1).sum_to_size(sinks.shape).to(sinks.dtype)
