"""Gradients by the same tiles, the probabilities computed anew from the saved lse.

With P = e^(a - lse), delta_i = dO_i . O_i and dA = P (dO V^T - delta):

    dV = P^T dO      dS = dA (1 - (c / cap)^2) where there is a cap
    dQ = scale dS K      dK = dS^T (scale Q)      dscale_h = sum_i q_i . (dS K)_i
    dbias = dA, summed over what was broadcast      dsink_h = -sum_i p_sink,i delta_i

Where logits lie far from 0 their lse has too few digits for P: there the row sums are taken anew.
"""

import math

import torch
from torch import Tensor

from scaledot.backends.cpu import additive
from scaledot.backends.cpu.dropout import Dropout
from scaledot.backends.cpu.flash import FAR
from scaledot.backends.cpu.logits import Plan, Tile
from scaledot.backends.cpu.tiles import Block
from scaledot.backends.inputs import Gradients, Inputs, Wanted
from scaledot.problem import Settings


def backward(
    inputs: Inputs,
    settings: Settings,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    wanted: Wanted,
    whole: bool = True,
) -> Gradients:
    """whole: lse is of these keys, not of more of them elsewhere."""
    plan = Plan(inputs, settings)
    work = _Work(plan, grad_out, out, lse, wanted, whole)
    for block in plan.blocks():
        work.add_block(block)
    return work.result()


class _Work:
    def __init__(
        self,
        plan: Plan,
        grad_out: Tensor,
        out: Tensor,
        lse: Tensor,
        wanted: Wanted,
        whole: bool,
    ) -> None:
        inputs, dtype = plan.inputs, plan.dtype
        assert inputs.value is not None
        self.plan, self.wanted = plan, wanted
        lse = plan.by_group(lse.unsqueeze(-1))  # [B, G, repeats, Q, 1]
        blind = lse == -math.inf  # rows that see no key pass nothing on, whatever comes in
        self.blind, self.lse = blind, lse.masked_fill(blind, 0.0)
        self.rest: Tensor | None = None  # what ln of the row's sum is beyond lse
        if whole and bool((self.lse.abs() > FAR).any()):
            self.rest = torch.zeros_like(self.lse)
        self.grad_out = plan.by_group(grad_out).to(dtype).masked_fill(blind, 0.0)
        self.delta = (self.grad_out * plan.by_group(out).to(dtype)).sum(-1, keepdim=True)
        self.delta.masked_fill_(blind, 0.0)
        # A row may be broken by its logits, by a value or by its gradient.
        self.fragile = plan.hides_pairs and not math.isfinite(self.lse.sum() + self.delta.sum())
        # In the products of gradients a hidden entry meets a 0, and 0 * NaN is NaN. Rows that do
        # see it are NaN by their lse already.
        self.clean_key, self.clean_value = inputs.key, inputs.value
        self.clean_query = plan.query
        if plan.hides_pairs:
            self.clean_value = _finite(inputs.value)
            if inputs.weight is None:
                self.clean_key, self.clean_query = _finite(inputs.key), _finite(plan.query)
        self.grad_query = torch.zeros(plan.query.shape, dtype=dtype)  # before the scale
        self.grad_key = torch.zeros(inputs.key.shape, dtype=dtype)
        self.grad_value = torch.zeros(inputs.value.shape, dtype=dtype)
        self.wants_raw = wanted.head_scale and inputs.weight is not None
        if self.wants_raw:
            self.grad_scale = torch.zeros(plan.query.shape[:-1], dtype=dtype)
        if wanted.weight:
            self.grad_weight = torch.zeros(*plan.query.shape[:3], plan.width, dtype=dtype)
        self.grad_mask = None
        if wanted.mask:
            assert inputs.mask is not None
            assert plan.mask is not None
            self.grad_mask = torch.zeros(inputs.mask.shape, dtype=dtype)
            self.grad_mask_view = plan.by_group(self.grad_mask)

    def add_block(self, block: Block) -> None:
        plan = self.plan
        query = plan.query_rows(block)
        rows = (block.batch, block.groups, slice(None), slice(block.row, block.row_end))
        grad_out = self.grad_out[rows].reshape(query.shape[0], query.shape[1], -1)
        lse, delta, rest = self.lse[rows], self.delta[rows], None
        if self.rest is not None:
            rest = self.rest[rows]
            rest.copy_(self._rest_of(query, block, lse))
        dropout = Dropout(plan, block)
        for tile in plan.tiles(block):
            scores = plan.scores_of(query, tile)
            raw = None
            if self.wants_raw:
                raw = plan.unscaled_scores(query, tile)
                tile.hide(raw, 0.0)
            probability, slope = self._probabilities(scores, tile, lse, rest)
            values = plan.take_keys(self.clean_value, block, tile.key, tile.key_end)
            grad_p = torch.bmm(grad_out, values.transpose(1, 2))
            flat, grad_p = grad_p.shape, grad_p.view(scores.shape)
            keep = dropout.keep(probability)
            used = probability
            if keep is not None:
                used = probability * keep
                grad_p.mul_(keep)
            keys = (block.batch, block.groups, slice(tile.key, tile.key_end))
            _add(self.grad_value[keys], torch.bmm(used.reshape(flat).mT, grad_out))
            grad_scores = grad_p.sub_(delta).mul_(probability)
            if self.fragile:  # a broken row's NaN stays with the keys that the row sees
                tile.hide(grad_scores, 0.0)
            if self.grad_mask is not None:
                self._add_mask(grad_scores, tile)
            if slope is not None:
                grad_scores.mul_(slope)
            if raw is not None:
                self.grad_scale[rows] += raw.mul_(grad_scores).sum(-1)
            pass_on = self._add_dot if plan.inputs.weight is None else self._add_additive
            pass_on(grad_scores, flat, tile, rows, keys)

    def _add_dot(
        self, grad: Tensor, flat: torch.Size, tile: Tile, rows: tuple, keys: tuple
    ) -> None:
        """Through s = scale q.k; the query's gradient is kept without the scale."""
        plan, block = self.plan, tile.block
        clean_query = self.clean_query[rows].to(plan.dtype) * plan.take_factor(block)
        clean_keys = plan.take_keys(self.clean_key, block, tile.key, tile.key_end)
        _add(self.grad_query[rows], torch.bmm(grad.view(flat), clean_keys))
        clean_query = clean_query.reshape(flat[0], flat[1], -1)
        _add(self.grad_key[keys], torch.bmm(grad.view(flat).mT, clean_query))

    def _add_additive(
        self, grad: Tensor, flat: torch.Size, tile: Tile, rows: tuple, keys: tuple
    ) -> None:
        """Through s = scale weight . tanh(q + k)."""
        plan, block = self.plan, tile.block
        query = plan.query_rows(block)
        keys_here = plan.take_keys(plan.inputs.key, block, tile.key, tile.key_end)
        scaled = grad.mul_(plan.take_factor(block)).view(flat)
        found = additive.gradients(scaled, query, keys_here, plan.take_weight(block))
        _add(self.grad_query[rows], found.query)
        _add(self.grad_key[keys], found.keys)
        if self.wanted.weight:
            each = found.weight.view(*self.grad_query[rows].shape[:3], -1, plan.width).sum(3)
            self.grad_weight[rows[:3]] += each

    def _probabilities(
        self, scores: Tensor, tile: Tile, lse: Tensor, rest: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """p of the tile (before dropout), and the cap's derivative where there is a cap."""
        plan, cap, slope = self.plan, self.plan.settings.softcap, None
        if cap:
            slope = 1.0 - (scores / cap).tanh_().square_()
            if plan.hides_pairs:
                tile.hide(slope, 0.0)
        plan.make_arguments(scores, tile)
        scores.sub_(lse)
        if rest is not None:
            scores.sub_(rest)
        probability = plan.exponentials_of(scores)
        if self.fragile:
            tile.hide(probability, 0.0)
        return probability, slope

    def _rest_of(self, query: Tensor, block: Block, lse: Tensor) -> Tensor:
        """ln of sum e^(a - lse) over keys and sink; 0 for rows that see nothing or are broken."""
        plan, rest = self.plan, torch.full_like(lse, -math.inf)
        if plan.inputs.sinks is not None:
            rest = plan.take_sinks(block).unsqueeze(-1) - lse
        for tile in plan.tiles(block):
            scores = plan.scores_of(query, tile)
            plan.make_arguments(scores, tile)
            rest = torch.logaddexp(rest, scores.sub_(lse).logsumexp(-1, keepdim=True))
        return rest.masked_fill(~torch.isfinite(rest), 0.0)

    def _add_mask(self, grad_scores: Tensor, tile: Tile) -> None:
        part = self.plan.take(self.grad_mask_view, tile.block)
        if self.grad_mask_view.shape[-1] != 1:
            part = part[..., tile.key : tile.key_end]
        part += grad_scores.sum_to_size(part.shape)

    def result(self) -> Gradients:
        plan, inputs = self.plan, self.plan.inputs
        additive_score = inputs.weight is not None
        grad_scale = grad_sinks = grad_weight = None
        if self.wanted.head_scale:
            assert inputs.head_scale is not None
            if additive_score:
                each = self.grad_scale.sum(-1)
            else:
                each = (self.clean_query.to(plan.dtype) * self.grad_query).sum((-1, -2))
            grad_scale = (each.flatten(1) * plan.settings.scale).sum_to_size(
                inputs.head_scale.shape
            )
        if self.wanted.sinks:
            assert inputs.sinks is not None
            sinks = plan.by_group(inputs.sinks.to(plan.dtype).unsqueeze(-1).unsqueeze(-1))
            off = sinks - self.lse
            off = (off if self.rest is None else off - self.rest).exp().masked_fill(self.blind, 0.0)
            each = -(off * self.delta).sum((-1, -2)).flatten(1)
            grad_sinks = each.sum_to_size(inputs.sinks.shape)
        if self.wanted.weight:
            assert inputs.weight is not None
            grad_weight = self.grad_weight.flatten(1, 2).sum_to_size(inputs.weight.shape)
        if not additive_score:
            self.grad_query.mul_(plan.factor)
        assert inputs.value is not None
        return Gradients(
            query=self.grad_query.flatten(1, 2).to(inputs.query.dtype),
            key=self.grad_key.to(inputs.key.dtype),
            value=self.grad_value.to(inputs.value.dtype),
            mask=_like(self.grad_mask, inputs.mask),
            head_scale=_like(grad_scale, inputs.head_scale),
            sinks=_like(grad_sinks, inputs.sinks),
            weight=_like(grad_weight, inputs.weight),
        )


def _like(grad: Tensor | None, tensor: Tensor | None) -> Tensor | None:
    return None if grad is None or tensor is None else grad.to(tensor.dtype)


def _add(place: Tensor, values: Tensor) -> None:
    place += values.view(place.shape)


def _finite(tensor: Tensor) -> Tensor:
    if math.isfinite(tensor.sum().item()):
        return tensor
    return tensor.nan_to_num(0.0, 0.0, 0.0)
