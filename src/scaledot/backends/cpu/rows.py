"""The sums of all rows, filled block by block, and what they say once all are there."""

import math

import torch
from torch import Tensor

from scaledot.backends.cpu.logits import Plan
from scaledot.backends.cpu.reach import Reach
from scaledot.backends.cpu.tiles import Block
from scaledot.measure import Rows

ROW_MAX, ROW_SUM, WEIGHTED, SQUARES, FIRST, MAX_LOGIT = range(6)


class RowSums:
    """Tensors [B, G, repeats, Q]; rows that no block visits see no key and keep their start.

    all_written: every row will be written, and needs no start.
    """

    def __init__(
        self,
        plan: Plan,
        reach: Reach,
        wants_vitals: bool,
        apart: bool,
        all_written: bool = False,
    ) -> None:
        self.plan, self.reach, self.wants_vitals = plan, reach, wants_vitals
        self.apart = wants_vitals and apart  # the largest logit is kept apart from the row_max
        fields = (MAX_LOGIT + 1 if self.apart else FIRST + 1) if wants_vitals else ROW_SUM + 1
        shape = (fields, plan.batch, plan.groups, plan.repeats, plan.queries)
        self.sums = torch.empty(shape, dtype=plan.dtype)
        if not all_written:
            self.sums.zero_()
            self.sums[ROW_MAX] = -math.inf
            self.sums[FIRST:] = -math.inf

    def write(self, block: Block, fields: list[Tensor | None]) -> None:
        """The block's sums in the order of the constants above; None: nothing seen, as at first."""
        place = self.sums[:, block.batch, block.groups, :, block.row : block.row_end]
        asked = fields[: place.shape[0]]
        present = [values for values in asked if values is not None]
        if len(present) == len(asked):
            torch.stack(present, out=place)
            return
        for part, values in zip(place, asked, strict=True):
            if values is not None:
                part.copy_(values)

    def _pivot(self) -> Tensor | float:
        if self.reach.pivot_free:
            return 0.0
        return finite_pivot(self.sums[ROW_MAX], self.reach.hidden_as)

    def _sinks(self) -> Tensor | None:
        sinks = self.plan.inputs.sinks
        if sinks is None:
            return None
        return self.plan.by_group(sinks.to(self.plan.dtype).unsqueeze(-1))

    def lse(self) -> Tensor:
        """ln of the sum over keys and sink, [B, H, Q]; -inf for a row without keys."""
        lse = self._pivot() + self.sums[ROW_SUM].log()
        sinks = self._sinks()
        if sinks is not None:
            lse = torch.where(lse == -math.inf, lse, torch.logaddexp(lse, sinks))
        return lse.flatten(1, 2)

    def measured(self, count: Tensor, mean: Tensor, m2: Tensor) -> Rows:
        """With the logits' moments (of each row, any shape with as many entries): all of a row."""
        row_max, row_sum, weighted, squares, first = self.sums[: FIRST + 1]
        blind = row_sum == 0
        seen = row_sum.masked_fill(blind, 1.0)
        pivot, log_seen = self._pivot(), seen.log()
        # Probabilities are counted from the pivot: an lse far from 0 has no digits left for them.
        lse, total = pivot + log_seen, seen
        entropy = log_seen - weighted / seen
        sum_p2 = squares / (seen * seen)
        off = None
        sinks = self._sinks()
        if sinks is not None:
            gap = sinks - pivot - log_seen  # ln(off / share)
            share, off = gap.neg().sigmoid_(), gap.sigmoid()
            lse, total = torch.logaddexp(lse, sinks), seen / share
            entropy = share * entropy + torch.special.entr(share) + torch.special.entr(off)
            sum_p2 = sum_p2 * share * share + off * off
        top_p = (row_max - pivot).exp_().div_(total)
        shape = (self.plan.batch, self.plan.heads, self.plan.queries)
        count, mean = count.reshape(shape), mean.reshape(shape)
        finite = (torch.isfinite(lse) & torch.isfinite(entropy)).view(shape)
        max_logit = row_max
        if self.apart:  # a cap makes infinite logits finite: look before it
            max_logit = self.sums[MAX_LOGIT]
            finite &= torch.isfinite(max_logit.view(shape)) & torch.isfinite(mean)
        return Rows(
            count=count,
            max_logit=max_logit.view(shape),
            lse=lse.masked_fill_(blind, -math.inf).view(shape),
            entropy=entropy.clamp_(min=0.0).view(shape),
            top_p=top_p.view(shape),
            sum_p2=sum_p2.view(shape),
            first_p=(first - pivot).exp_().div_(total).view(shape),
            off_p=None if off is None else off.view(shape),
            mean=mean,
            m2=m2.reshape(shape),
            broken=(count > 0) & ~finite,
        )


def finite_pivot(row_max: Tensor, hidden_as: float) -> Tensor:
    """What can be subtracted from a row: 0 where it has seen nothing yet."""
    return row_max.masked_fill(row_max <= hidden_as, 0.0)


def stack_rows(rows: Rows) -> Tensor:
    """[5, B, H, Q]: max_logit, lse, entropy, top_p, sum_p2; NaN where the row is broken."""
    stacked = torch.stack([rows.max_logit, rows.lse, rows.entropy, rows.top_p, rows.sum_p2])
    empty = rows.count == 0
    stacked[:2].masked_fill_(empty, -math.inf)
    stacked[2:].masked_fill_(empty, 0.0)
    return stacked.masked_fill_(rows.broken, math.nan)
