"""Attention by tiles, and the vital signs from the same tiles.

For each row, over the keys of one tile after another (a = the softmax's argument, m = a pivot):

    row_max  = max a                        row_sum = sum e^(a-m)
    weighted = sum e^(a-m) (a-m)            squares = sum e^(2(a-m))
    acc      = sum e^(a-m) v

and at the end lse = m + ln row_sum, out = acc / row_sum, entropy = ln row_sum - weighted / row_sum,
sum_p2 = squares / row_sum^2. Where no logit can be large (|q| |k| is bounded) the pivot is 0: a
tile is exponentiated as it comes from the matrix product.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from scaledot.backends.cpu.dropout import Dropout
from scaledot.backends.cpu.logits import Inputs, Plan, Tile
from scaledot.backends.cpu.moments import TileMoments, gram_moments
from scaledot.backends.cpu.reach import Reach
from scaledot.backends.cpu.rows import RowStore
from scaledot.backends.cpu.tiles import Block
from scaledot.measure import Rows, summarise
from scaledot.problem import Settings


class Forward(NamedTuple):
    lse: Tensor  # [B, H, Q]
    floats: Tensor | None = None  # [F, B, H]
    counts: Tensor | None = None  # [C, B, H]
    rows: Tensor | None = None  # [5, B, H, Q]


def forward(
    inputs: Inputs, settings: Settings, out: Tensor | None, wants_vitals: bool, per_row: bool
) -> Forward:
    """Fills `out` (None: scores only) and measures what is asked for."""
    plan = Plan(inputs, settings)
    reach = Reach(plan)
    rows = RowStore(plan, wants_vitals)
    output = None if out is None else Output(plan, out)
    moments = None
    if wants_vitals and not reach.gram:
        moments = TileMoments(plan, wide=not reach.moderate)
    for block in plan.blocks():
        sums = Sums(plan, block, reach.pivot_free, rows.wants_vitals, output)
        query = plan.query_rows(block)
        for tile in plan.tiles(block):
            scores = plan.scores_of(query, tile)
            if wants_vitals and (moments is not None or settings.softcap):
                sums.measure_logits(scores, tile, moments)
            plan.make_arguments(scores, tile)
            sums.add(scores, tile)
        sums.finish(rows)
    if not wants_vitals:
        return Forward(rows.lse.flatten(1, 2))
    measured = rows.measured(*(gram_moments(plan) if moments is None else moments.result()))
    floats, counts = _summary(plan, reach, measured)
    return Forward(measured.lse, floats, counts, rows.stacked(measured) if per_row else None)


def _summary(plan: Plan, reach: Reach, rows: Rows) -> tuple[Tensor, Tensor]:
    """Per batch entry; of a packed batch, per sequence."""
    query, squares = plan.inputs.query, reach.query_squares
    rms, entries = reach.key_rms()
    if not plan.packed:
        return summarise(rows, query, squares, rms, entries)
    parts = []
    for index, part in enumerate(plan.slabs):
        span = slice(part.row, part.row_end)
        own = Rows(*(None if t is None else t[:, :, span] for t in rows))
        keys = slice(index, index + 1)
        parts.append(
            summarise(own, query[:, :, span], squares[:, :, span], rms[keys], entries[keys])
        )
    floats, counts = zip(*parts, strict=True)
    return torch.cat(floats, 1), torch.cat(counts, 1)


class Sums:
    """The running sums of a block's rows, each [batch, groups, repeats, rows]."""

    def __init__(
        self,
        plan: Plan,
        block: Block,
        pivot_free: bool,
        wants_vitals: bool,
        output: "Output | None",
    ) -> None:
        self.plan, self.block = plan, block
        self.pivot_free, self.wants_vitals = pivot_free, wants_vitals
        self.acc = None if output is None else Accumulator(plan, block, output)
        self.pivot: Tensor | float = 0.0
        self.row_max: Tensor | None = None
        self.max_logit: Tensor | None = None  # apart from row_max where a cap or a bias hides it
        self.first: Tensor | None = None  # the softmax's argument at the sequence's first key
        self.row_sum: Tensor | None = None
        self.weighted: Tensor | None = None
        self.squares: Tensor | None = None

    def measure_logits(self, scores: Tensor, tile: Tile, moments: TileMoments | None) -> None:
        """What is asked of z = s + bias, before the cap changes it."""
        plan = self.plan
        logits = scores + tile.mask if plan.biased and tile.mask is not None else scores
        tile.hide(logits, -math.inf)
        unread = None
        if plan.biased and tile.mask is not None:
            unread = tile.mask <= plan.unread_below
            logits.masked_fill_(unread, -math.inf)
        self.max_logit = _larger(self.max_logit, logits.amax(-1))
        if moments is not None:
            moments.add(logits, tile, unread)

    def add(self, arguments: Tensor, tile: Tile) -> None:
        """Take in a tile of the softmax's arguments; the buffer is used up."""
        if self.wants_vitals or not self.pivot_free:
            tile_max = arguments.amax(-1)
            if self.pivot_free:
                self.row_max = _larger(self.row_max, tile_max)
            else:
                arguments.sub_(self._raise_pivot(tile_max))
        weights = self.plan.exponentials_of(arguments)
        self.row_sum = _sum(self.row_sum, weights.sum(-1))
        if self.wants_vitals:
            if tile.key == self.block.diagonal.first:
                self.first = arguments[..., 0] + self.pivot
            tile.hide(arguments, 0.0)  # -inf * 0 would be NaN
            self.weighted = _sum(self.weighted, arguments.mul_(weights).sum(-1))
        if self.acc is not None:
            self.acc.add(weights, tile)
        if self.wants_vitals:
            self.squares = _sum(self.squares, weights.mul_(weights).sum(-1))

    def _raise_pivot(self, tile_max: Tensor) -> Tensor:
        """Count everything from the largest argument so far; returns it, [..., 1]."""
        row_max = _larger(self.row_max, tile_max)
        pivot = torch.where(row_max == -math.inf, 0.0, row_max)
        if self.row_max is not None:
            assert self.row_sum is not None
            shrink = (self.row_max - pivot).exp_()  # 0 for a row that has seen nothing
            if self.weighted is not None and self.squares is not None:
                shift = self.pivot - pivot
                self.weighted = (self.weighted + self.row_sum * shift) * shrink
                self.squares = self.squares * shrink * shrink
            self.row_sum = self.row_sum * shrink
            if self.acc is not None:
                self.acc.shrink(shrink)
        self.row_max, self.pivot = row_max, pivot
        return pivot.unsqueeze(-1)

    def finish(self, rows: RowStore) -> None:
        """From sums to the output and one number a row of each statistic."""
        plan, block, row_sum = self.plan, self.block, self.row_sum
        assert row_sum is not None
        seen = torch.where(row_sum == 0, 1.0, row_sum)  # a row that sees nothing: 0 / 1
        lse = self.pivot + row_sum.log()
        sink = share = None
        lse_of_keys, divisor = lse, seen
        if plan.inputs.sinks is not None:
            sink = plan.take_sinks(block)
            lse = torch.where(lse == -math.inf, lse, torch.logaddexp(lse, sink))
            share = (lse_of_keys - torch.where(lse == -math.inf, 0.0, lse)).exp()
            divisor = seen / share  # inf where the sink took it all
        if self.acc is not None:
            self.acc.finish(divisor)
        rows.write("lse", block, lse)
        if not self.wants_vitals:
            return
        assert self.weighted is not None and self.squares is not None and self.row_max is not None
        finite_lse = torch.where(lse == -math.inf, 0.0, lse)
        entropy = seen.log() - self.weighted / seen
        sum_p2 = self.squares / (seen * seen)
        if sink is not None and share is not None:
            gap = torch.where(share == 0, 0.0, lse_of_keys - finite_lse)
            off = torch.where(row_sum == 0, 0.0, (sink - finite_lse).exp())
            off_log = torch.where(off == 0, 0.0, sink - finite_lse)
            entropy = share * (entropy - gap) - off * off_log
            sum_p2 = sum_p2 * share * share + off * off
            rows.write("off_p", block, off)
        rows.write("entropy", block, entropy.clamp_(min=0.0))
        rows.write("sum_p2", block, sum_p2)
        rows.write("top_p", block, (self.row_max - finite_lse).exp())
        if self.first is not None:
            rows.write("first_p", block, (self.first - finite_lse).exp())
        rows.write("max_logit", block, self.row_max if self.max_logit is None else self.max_logit)


def _larger(one: Tensor | None, two: Tensor) -> Tensor:
    return two if one is None else torch.maximum(one, two)


def _sum(one: Tensor | None, two: Tensor) -> Tensor:
    return two if one is None else one.add_(two)


class Output:
    """Where the output goes, and values that cannot poison rows which do not see them.

    0 * NaN is NaN: a value that is hidden from a row must not enter the row's matrix product.
    Non-finite values are taken out of the product and counted beside it instead.
    """

    def __init__(self, plan: Plan, out: Tensor) -> None:
        value = plan.inputs.value
        assert value is not None
        self.out = plan.by_group(out)
        self.value, self.broken = value, None
        if plan.hides_pairs and not math.isfinite(value.sum().item()):
            self.broken = torch.cat([value.isnan(), value == math.inf, value == -math.inf], dim=-1)
            self.value = value.nan_to_num(0.0, 0.0, 0.0)


class Accumulator:
    """acc = sum e^(a-m) v of a block, [heads, repeats * rows, V]."""

    def __init__(self, plan: Plan, block: Block, output: Output) -> None:
        self.plan, self.block, self.output = plan, block, output
        self.dropout = Dropout(plan, block)
        self.acc: Tensor | None = None
        self.poison: Tensor | None = None

    def add(self, weights: Tensor, tile: Tile) -> None:
        output, span = self.output, (tile.key, tile.key_end)
        keep = self.dropout.keep(weights)
        values = self.plan.take_keys(output.value, self.block, *span)
        flat = (weights if keep is None else weights * keep).reshape(
            values.shape[0], -1, values.shape[1]
        )
        if self.acc is None:
            self.acc = torch.bmm(flat, values)
        else:
            torch.baddbmm(self.acc, flat, values, out=self.acc)
        if output.broken is not None:
            visible = torch.ones_like(weights)
            tile.hide(visible, 0.0)
            broken = self.plan.take_keys(output.broken, self.block, *span)
            seen = visible.reshape(flat.shape) @ broken
            self.poison = _sum(self.poison, seen)

    def shrink(self, factor: Tensor) -> None:
        if self.acc is not None:
            self.acc.mul_(factor.reshape(self.acc.shape[0], -1, 1))

    def finish(self, divisor: Tensor) -> None:
        """Write acc / divisor; a row that sees a non-finite value shows it."""
        assert self.acc is not None
        result = self.acc.div_(divisor.reshape(self.acc.shape[0], -1, 1))
        if self.poison is not None:
            nan, above, below = (part > 0 for part in self.poison.chunk(3, dim=-1))
            result = result.masked_fill(above, math.inf).masked_fill(below, -math.inf)
            result = result.masked_fill(nan | (above & below), math.nan)
        block = self.block
        place = self.output.out[block.batch, block.groups, :, block.row : block.row_end]
        place.copy_(result.view(place.shape))
