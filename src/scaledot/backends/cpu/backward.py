"""Compute the gradients by the same tiles as the forward pass, probabilities computed anew.

With P the softmax, dP = dO V^T, delta_i = sum_j P_ij dP_ij and dA = P (dP - delta):

    dV = P^T dO      dS = dA (1 - (c / cap)^2) where there is a cap
    dQ = scale dS K      dK = dS^T (scale Q)      dscale_h = sum_i q_i . (dS K)_i
    dbias = dA, summed over what was broadcast      dsink_h = -sum_i p_sink,i delta_i

The rows of P must sum to 1 and those of dA to 0, or what keys have in common does not cancel in dQ
and dscale. So P and delta come from the logits of this pass: those of the forward pass were rounded
in another order, and P = e^(a - lse), delta = dO . O would keep the difference. Where a block of
rows fits one tile of keys this costs nothing. Where it takes several, the row sums need a pass of
their own, which is made only where logits may lie far enough from 0 for the difference to count.
There the logits of float32 are products in float64, too: of 2e4 float32 knows two digits behind the
point, and what is wrong with P is wrong with every gradient. But a bias of -1e9 on a whole row, as
models mask, swallows its scores in the forward pass: then they are swallowed here as well.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from scaledot.backends.cpu import additive
from scaledot.backends.cpu.dropout import Dropout
from scaledot.backends.cpu.logits import Plan, Tile
from scaledot.backends.cpu.reach import Reach
from scaledot.backends.cpu.rows import finite_pivot
from scaledot.backends.cpu.tiles import Block
from scaledot.backends.inputs import Gradients, Inputs, Wanted
from scaledot.problem import Settings

# e^(a - lse) of float32 is right to FAR * 2^-24, about 2e-6, up to logits of this size.
FAR = 32.0
SWALLOWING = 2.0**16  # a bias that leaves a score in float32 less than two digits behind the point


class RowSoftmax(NamedTuple):
    """The softmax of a block's rows: p = e^(a - pivot) / total.

    Each is [batch, groups, repeats, rows, 1]; a pivot of -inf: no key was seen yet. delta is the
    mean of dP under p, so that the rows of p (dP - delta) sum to 0.
    """

    pivot: Tensor
    total: Tensor
    delta: Tensor

    @property
    def finite_pivot(self) -> Tensor:
        return finite_pivot(self.pivot, -math.inf)

    def with_tile(
        self, plan: Plan, arguments: Tensor, grad_p: Tensor
    ) -> tuple["RowSoftmax", Tensor]:
        """Take in one more tile of the rows; return its e^(a - pivot) too."""
        pivot = torch.maximum(self.pivot, arguments.amax(-1, keepdim=True))
        finite = finite_pivot(pivot, -math.inf)
        weights = plan.exponentials_of(arguments.sub_(finite).to(plan.dtype))
        before = (self.pivot - finite).exp_().to(plan.dtype) * self.total  # 0: no key was seen
        total = before + weights.sum(-1, keepdim=True)
        total.masked_fill_(total == 0.0, 1.0)
        delta = (before * self.delta + (weights * grad_p).sum(-1, keepdim=True)) / total
        return RowSoftmax(pivot, total, delta), weights


def backward(
    inputs: Inputs,
    settings: Settings,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    wanted: Wanted,
    whole: bool = True,
) -> Gradients:
    """Return the gradients; whole=False: lse and out are of more keys than these."""
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
        self.plan, self.wanted, self.whole = plan, wanted, whole
        lse = plan.by_group(lse.unsqueeze(-1))  # [B, G, repeats, Q, 1]
        blind = lse == -math.inf  # rows that see no key pass nothing on, whatever comes in
        self.blind, self.lse = blind, lse.masked_fill(blind, 0.0)
        self.grad_out = plan.by_group(grad_out).to(dtype).masked_fill(blind, 0.0)
        self.delta = (self.grad_out * plan.by_group(out).to(dtype)).sum(-1, keepdim=True)
        self.delta.masked_fill_(blind, 0.0)
        self.far = whole and self._may_be_far()
        self.logits = _in_float64(plan) if self.far and not _swallows(plan) else plan
        self.grad_sinks = torch.zeros_like(self.lse) if wanted.sinks else None
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

    def _may_be_far(self) -> bool:
        """Tell whether e^(a - lse) may be off: a logit is rounded as the products it sums."""
        if not self.lse.numel():
            return False
        near = Reach(self.plan).bound <= FAR and self.lse.abs().amax().item() <= FAR
        return not near  # NaN is far

    def add_block(self, block: Block) -> None:
        plan = self.plan
        query = self.logits.query_rows(block)
        rows = (block.batch, block.groups, slice(None), slice(block.row, block.row_end))
        grad_out = self.grad_out[rows].reshape(query.shape[0], query.shape[1], -1)
        tiles = list(plan.tiles(block))
        softmax = self._known_softmax(query, block, tiles, grad_out)
        dropout = Dropout(plan, block)
        for tile in tiles:
            scores = self.logits.scores_of(query, tile)
            raw = None
            if self.wants_raw:
                raw = self.logits.unscaled_scores(query, tile).to(plan.dtype)
                tile.hide(raw, 0.0)
            slope = self._slope(scores, tile)
            self.logits.make_arguments(scores, tile)
            grad_p = self._grad_p(grad_out, tile).view(scores.shape)
            keep = dropout.keep(grad_p)
            if keep is not None:
                grad_p.mul_(keep)
            if softmax is None:
                softmax, weights = self._only_sinks(block).with_tile(plan, scores, grad_p)
            else:
                weights = plan.exponentials_of(scores.sub_(softmax.finite_pivot).to(plan.dtype))
            probability = weights.div_(softmax.total)
            if self.fragile:
                tile.hide(probability, 0.0)
            used = probability if keep is None else probability * keep
            keys = (block.batch, block.groups, slice(tile.key, tile.key_end))
            flat = (query.shape[0], query.shape[1], tile.key_end - tile.key)
            _add(self.grad_value[keys], torch.bmm(used.reshape(flat).mT, grad_out))
            grad_scores = grad_p.sub_(softmax.delta).mul_(probability)
            if self.fragile:  # a broken row's NaN stays with the keys that the row sees
                tile.hide(grad_scores, 0.0)
            if self.grad_mask is not None:
                self._add_mask(grad_scores, tile)
            if slope is not None:
                grad_scores.mul_(slope)
            if raw is not None:
                self.grad_scale[rows] += raw.mul_(grad_scores).sum(-1)
            pass_on = self._add_dot if plan.inputs.weight is None else self._add_additive
            pass_on(grad_scores.view(flat), tile, rows, keys)
        if self.grad_sinks is not None and softmax is not None:
            off = (self._sinks(block) - softmax.finite_pivot).exp_() / softmax.total
            self.grad_sinks[rows] = -off * softmax.delta

    def _known_softmax(
        self, query: Tensor, block: Block, tiles: list[Tile], grad_out: Tensor
    ) -> RowSoftmax | None:
        """Return what is known of the rows in advance; None where their only tile tells it."""
        rows = (block.batch, block.groups, slice(None), slice(block.row, block.row_end))
        if not self.whole or (len(tiles) > 1 and not self.far):
            lse = self.lse[rows]
            return RowSoftmax(lse, torch.ones_like(lse), self.delta[rows])
        if len(tiles) == 1:
            return None
        plan, softmax, dropout = self.plan, self._only_sinks(block), Dropout(self.plan, block)
        for tile in tiles:
            scores = self.logits.scores_of(query, tile)
            self.logits.make_arguments(scores, tile)
            grad_p = self._grad_p(grad_out, tile).view(scores.shape)
            keep = dropout.keep(grad_p)
            softmax, _ = softmax.with_tile(plan, scores, grad_p if keep is None else grad_p * keep)
        return softmax

    def _only_sinks(self, block: Block) -> RowSoftmax:
        """Return the rows' softmax before any key: over their learned sinks, which have no value.

        delta starts at 0; at NaN for rows whose output or gradient is not finite, since the values
        that tell so were taken out of the products.
        """
        sinks = self._sinks(block)
        rows = (block.batch, block.groups, slice(None), slice(block.row, block.row_end))
        delta = self.delta[rows] * 0.0
        return RowSoftmax(sinks, torch.ones_like(delta), delta)

    def _sinks(self, block: Block) -> Tensor:
        """Return the logit of each row's learned sink, -inf where there is none."""
        rows = (block.batch, block.groups, slice(None), slice(block.row, block.row_end))
        like = self.lse[rows]
        if self.plan.inputs.sinks is None:
            return torch.full_like(like, -math.inf)
        return self.logits.take_sinks(block).unsqueeze(-1).expand_as(like)

    def _grad_p(self, grad_out: Tensor, tile: Tile) -> Tensor:
        """Compute dP = dO V^T of a tile, [heads, rows, keys]."""
        values = self.plan.take_keys(self.clean_value, tile.block, tile.key, tile.key_end)
        return torch.bmm(grad_out, values.transpose(1, 2))

    def _slope(self, scores: Tensor, tile: Tile) -> Tensor | None:
        """Return the cap's derivative where there is a cap."""
        cap = self.plan.settings.softcap
        if not cap:
            return None
        slope = 1.0 - (scores / cap).tanh_().square_()
        if self.plan.hides_pairs:
            tile.hide(slope, 0.0)
        return slope.to(self.plan.dtype)

    def _add_dot(self, grad: Tensor, tile: Tile, rows: tuple, keys: tuple) -> None:
        """Through s = scale q.k; the query's gradient is kept without the scale."""
        plan, block = self.plan, tile.block
        clean_query = self.clean_query[rows].to(plan.dtype) * plan.take_factor(block)
        clean_keys = plan.take_keys(self.clean_key, block, tile.key, tile.key_end)
        _add(self.grad_query[rows], torch.bmm(grad, clean_keys))
        clean_query = clean_query.reshape(grad.shape[0], grad.shape[1], -1)
        _add(self.grad_key[keys], torch.bmm(grad.mT, clean_query))

    def _add_additive(self, grad: Tensor, tile: Tile, rows: tuple, keys: tuple) -> None:
        """Through s = scale weight . tanh(q + k)."""
        plan, block = self.plan, tile.block
        query = plan.query_rows(block)
        keys_here = plan.take_keys(plan.inputs.key, block, tile.key, tile.key_end)
        scaled = grad.view(*self.grad_query[rows].shape[:-1], -1).mul_(plan.take_factor(block))
        scaled = scaled.view(grad.shape)
        found = additive.gradients(scaled, query, keys_here, plan.take_weight(block))
        _add(self.grad_query[rows], found.query)
        _add(self.grad_key[keys], found.keys)
        if self.wanted.weight:
            each = found.weight.view(*self.grad_query[rows].shape[:3], -1, plan.width).sum(3)
            self.grad_weight[rows[:3]] += each

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
            assert self.grad_sinks is not None
            each = self.grad_sinks.masked_fill(self.blind, 0.0).sum((-1, -2)).flatten(1)
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


def _swallows(plan: Plan) -> bool:
    """Tell whether a float bias is so large that float32 forgets the scores beside it."""
    if not plan.biased:
        return False
    assert plan.mask is not None
    finite = plan.mask.masked_fill(plan.mask.isinf(), 0.0)
    return bool(finite.abs().amax() > SWALLOWING) if finite.numel() else False


def _in_float64(plan: Plan) -> Plan:
    """Return the call's plan with logits in float64."""
    if plan.dtype == torch.float64:
        return plan
    inputs = plan.inputs
    return Plan(
        inputs._replace(query=inputs.query.double(), key=inputs.key.double()), plan.settings
    )


def _like(grad: Tensor | None, tensor: Tensor | None) -> Tensor | None:
    return None if grad is None or tensor is None else grad.to(tensor.dtype)


def _add(place: Tensor, values: Tensor) -> None:
    place += values.view(place.shape)


def _finite(tensor: Tensor) -> Tensor:
    if math.isfinite(tensor.sum().item()):
        return tensor
    return tensor.nan_to_num(0.0, 0.0, 0.0)
