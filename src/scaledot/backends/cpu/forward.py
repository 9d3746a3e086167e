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

from scaledot.backends.cpu import native
from scaledot.backends.cpu.dropout import Dropout
from scaledot.backends.cpu.logits import Plan, Tile
from scaledot.backends.cpu.masks import with_bool_mask
from scaledot.backends.cpu.moments import TileMoments, gram_moments
from scaledot.backends.cpu.reach import Reach
from scaledot.backends.cpu.rows import RowSums, finite_pivot, stack_rows
from scaledot.backends.cpu.tiles import Block
from scaledot.backends.inputs import Inputs
from scaledot.measure import COUNT_FIELDS, FLOAT_FIELDS, Rows, summarise
from scaledot.problem import Settings


class Forward(NamedTuple):
    lse: Tensor  # [B, H, Q]; empty where only scores are measured, and not row by row
    floats: Tensor | None = None  # [F, B, H]
    counts: Tensor | None = None  # [C, B, H]
    rows: Tensor | None = None  # [5, B, H, Q]


def forward(
    inputs: Inputs, settings: Settings, out: Tensor | None, wants_vitals: bool, per_row: bool
) -> Forward:
    """Fills `out` (None: scores only) and measures what is asked for."""
    inputs = with_bool_mask(inputs, settings)
    plan = Plan(inputs, settings)
    reach = Reach(plan)
    output = None if out is None else Output(plan, out)
    clean = reach.moderate and (output is None or output.broken is None)
    if clean and native.refuses(inputs, settings) is None:
        return _compiled(plan, reach, out, wants_vitals, per_row)
    # Whether the largest logit is another thing than the largest argument of the softmax.
    apart = plan.mask is not None or inputs.weight is not None or bool(settings.softcap)
    rows = RowSums(plan, reach, wants_vitals, apart)
    moments = None
    if wants_vitals and not reach.gram:
        moments = TileMoments(plan, wide=not reach.moderate)
    for block in plan.blocks():
        _run_block(plan, reach, block, rows, output, moments)
    if not wants_vitals:
        return Forward(rows.lse())
    measured = rows.measured(*(gram_moments(plan) if moments is None else moments.result()))
    floats, counts = _summary(plan, reach, measured)
    return Forward(measured.lse, floats, counts, stack_rows(measured) if per_row else None)


def _compiled(
    plan: Plan, reach: Reach, out: Tensor | None, wants_vitals: bool, per_row: bool
) -> Forward:
    """The same in one compiled pass, which keeps its own pivot."""
    reach.pivot_free = False
    rows = RowSums(plan, reach, wants_vitals, apart=False, all_written=True)
    sums = rows.sums.flatten(2, 3)
    found = native.run(plan, out, sums, reach.query_norms, reach.key_norms)
    if not wants_vitals:
        return Forward(rows.lse())
    stacked = None
    if out is None and not per_row:
        return Forward(sums.new_empty(0), found.floats, found.counts)
    if per_row:
        seen = plan.all_counts() if plan.mask is None else found.seen
        stacked = stack_rows(rows.measured(seen, *found.moments))
    return Forward(rows.lse(), found.floats, found.counts, stacked)


def _summary(plan: Plan, reach: Reach, rows: Rows) -> tuple[Tensor, Tensor]:
    """Per batch entry; of a packed batch, per sequence."""
    query, norms = plan.inputs.query, reach.query_norms
    rms, entries = reach.key_rms()
    if not plan.packed:
        return summarise(rows, query, norms, rms, entries)
    parts = []
    for index, part in enumerate(plan.slabs):
        span = slice(part.row, part.row_end)
        own = Rows._make(None if t is None else t[:, :, span] for t in rows)
        keys = slice(index, index + 1)
        parts.append(summarise(own, query[:, :, span], norms[:, :, span], rms[keys], entries[keys]))
    if not parts:  # no sequence at all
        heads = query.shape[1]
        return (
            query.new_empty(len(FLOAT_FIELDS), 0, heads, dtype=plan.dtype),
            query.new_empty(len(COUNT_FIELDS), 0, heads, dtype=torch.int64),
        )
    floats, counts = zip(*parts, strict=True)
    return torch.cat(floats, 1), torch.cat(counts, 1)


def _run_block(
    plan: Plan,
    reach: Reach,
    block: Block,
    rows: RowSums,
    output: "Output | None",
    moments: TileMoments | None,
) -> None:
    sums = Sums(plan, reach, rows.wants_vitals)
    acc = None if output is None else Accumulator(plan, block, output)
    query = plan.query_rows(block)
    for tile in plan.tiles(block):
        scores = plan.scores_of(query, tile)
        if rows.apart or moments is not None:
            sums.measure_logits(scores, tile, moments)
        plan.make_arguments(scores, tile, reach.hidden_as)
        sums.add(scores, tile, acc)
    rows.write(block, sums.fields())
    if acc is not None:
        acc.finish(sums)


class Sums:
    """The running sums of a block's rows, each [batch, groups, repeats, rows]."""

    def __init__(self, plan: Plan, reach: Reach, wants_vitals: bool) -> None:
        self.plan, self.wants_vitals = plan, wants_vitals
        self.pivot_free, self.hidden_as = reach.pivot_free, reach.hidden_as
        self.pivot: Tensor | float = 0.0
        self.row_max: Tensor | None = None
        self.max_logit: Tensor | None = None  # apart from row_max where a cap or a bias hides it
        self.first: Tensor | None = None  # the softmax's argument at the sequence's first key
        self.row_sum: Tensor | None = None
        self.weighted: Tensor | None = None
        self.squares: Tensor | None = None

    def measure_logits(self, scores: Tensor, tile: Tile, moments: TileMoments | None) -> None:
        """What is asked of z = s + bias, before the cap changes it."""
        plan, unread = self.plan, None
        logits = scores
        if plan.biased and tile.mask is not None:
            logits = scores + tile.mask
            unread = tile.mask <= plan.unread_below
            logits.masked_fill_(unread, -math.inf)
        tile.hide(logits, -math.inf)
        self.max_logit = _larger(self.max_logit, logits.amax(-1))
        if moments is not None:
            moments.add(logits, tile, unread)

    def fields(self) -> list[Tensor | None]:
        """In the order in which RowSums keeps them."""
        row_max = self.row_sum if self.row_max is None else self.row_max
        return [row_max, self.row_sum, self.weighted, self.squares, self.first, self.max_logit]

    def add(self, arguments: Tensor, tile: Tile, acc: "Accumulator | None") -> None:
        """Take in a tile of the softmax's arguments; the buffer is used up."""
        if self.wants_vitals or not self.pivot_free:
            tile_max = arguments.amax(-1)
            if self.pivot_free:
                self.row_max = _larger(self.row_max, tile_max)
            else:
                arguments.sub_(self._raise_pivot(tile_max, acc))
        weights = self.plan.exponentials_of(arguments)
        self.row_sum = _sum(self.row_sum, weights.sum(-1))
        if acc is not None:
            acc.add(weights, tile)
        if not self.wants_vitals:
            return
        if tile.key == tile.block.diagonal.first:
            self.first = arguments[..., 0] + self.pivot
        if self.hidden_as == -math.inf:
            tile.hide(arguments, 0.0)  # -inf * 0 would be NaN
        self.weighted = _sum(self.weighted, arguments.mul_(weights).sum(-1))
        self.squares = _sum(self.squares, torch.linalg.vector_norm(weights, dim=-1).square_())

    def _raise_pivot(self, tile_max: Tensor, acc: "Accumulator | None") -> Tensor:
        """Count everything from the largest argument so far; returns it, [..., 1]."""
        row_max = _larger(self.row_max, tile_max)
        pivot = finite_pivot(row_max, self.hidden_as)
        if self.row_max is not None:
            assert self.row_sum is not None
            shrink = (self.row_max - pivot).exp_()  # 0 for a row that has seen nothing
            if self.weighted is not None and self.squares is not None:
                shift = self.pivot - pivot
                self.weighted = (self.weighted + self.row_sum * shift) * shrink
                self.squares = self.squares * shrink * shrink
            self.row_sum = self.row_sum * shrink
            if acc is not None:
                acc.shrink(shrink)
        self.row_max, self.pivot = row_max, pivot
        return pivot.unsqueeze(-1)


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
        flat = weights if keep is None else weights * keep
        flat = flat.view(values.shape[0], -1, values.shape[1])
        if self.acc is None:
            self.acc = torch.bmm(flat, values)
        else:
            torch.baddbmm(self.acc, flat, values, out=self.acc)
        if output.broken is not None:
            visible = torch.ones_like(weights)
            tile.hide(visible, 0.0)
            broken = self.plan.take_keys(output.broken, self.block, *span)
            self.poison = _sum(self.poison, visible.view(flat.shape) @ broken)

    def shrink(self, factor: Tensor) -> None:
        if self.acc is not None:
            self.acc.mul_(factor.reshape(self.acc.shape[0], -1, 1))

    def finish(self, sums: Sums) -> None:
        """Write acc / row_sum; a row that sees a non-finite value shows it."""
        plan, block, row_sum = self.plan, self.block, sums.row_sum
        assert self.acc is not None
        assert row_sum is not None
        divisor = row_sum
        if plan.inputs.sinks is not None:
            divisor = divisor + (plan.take_sinks(block) - sums.pivot).exp()
        if plan.mask is not None or block.may_be_blind:
            divisor = divisor.masked_fill(row_sum == 0, 1.0)
        place = self.output.out[block.batch, block.groups, :, block.row : block.row_end]
        acc, divisor = self.acc.view(place.shape), divisor.unsqueeze(-1)
        if self.poison is None:
            torch.div(acc, divisor, out=place)
            return
        nan, above, below = (
            part > 0 for part in self.poison.view(*place.shape[:-1], -1).chunk(3, -1)
        )
        result = (acc / divisor).masked_fill(above, math.inf).masked_fill(below, -math.inf)
        place.copy_(result.masked_fill(nan | (above & below), math.nan))
