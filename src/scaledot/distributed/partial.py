"""A shard's rows over the keys they have met so far; other keys of the same rows are merged in.

With L = ln sum e^z over all keys and L_b over those of a block, the block has the share
w_b = e^(L_b - L) of a row, and

    out     = sum w_b out_b               entropy = sum w_b (entropy_b + L - L_b)
    top_p   = max w_b top_p_b             sum_p2  = sum w_b^2 sum_p2_b

The larger of two L is subtracted before anything is exponentiated: logits of 1e4 lose nothing.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from scaledot.backends.combine import combine
from scaledot.measure import ROW_FIELDS, Rows

MAX_LOGIT, LSE, ENTROPY, TOP_P, SUM_P2 = range(len(ROW_FIELDS))


@dataclass
class Moments:
    """Of each row's logits, [B, H, Q]: float64, count int64."""

    count: Tensor
    mean: Tensor
    m2: Tensor

    def add(self, rows: slice, count: Tensor, mean: Tensor, m2: Tensor) -> None:
        """Chan's rule, for some of the rows."""
        place = (..., rows)
        before, total = self.count[place], self.count[place] + count
        share = count / total.clamp(min=1).double()
        delta = mean - self.mean[place]
        self.m2[place] += m2 + delta * delta * (share * before)
        self.mean[place] += delta * share
        self.count[place] = total


class Partial:
    """out [B, H, Q, V] in the compute type (None: scores only), lse [B, H, Q]; measured rows."""

    def __init__(self, shape: tuple[int, ...], width: int | None, like: Tensor, measures: bool):
        self.lse = like.new_full(shape, -math.inf)
        self.out = None if width is None else like.new_zeros(*shape, width)
        self.measures = measures
        if not measures:
            return
        self.max_logit = self.lse.clone()
        self.first = self.lse.clone()  # the softmax's argument at the sequence's first key
        self.entropy, self.top_p, self.sum_p2 = (torch.zeros_like(self.lse) for _ in range(3))
        self.broken = torch.zeros_like(self.lse, dtype=torch.bool)
        self.off: Tensor | None = None
        zeros = torch.zeros_like(self.lse, dtype=torch.float64)
        self.moments = Moments(zeros.long(), zeros, zeros.clone())

    def add(self, rows: slice, out: Tensor | None, lse: Tensor, measured: Tensor | None) -> None:
        """A block's own output and lse, and its rows' vitals [5, B, H, rows] where they count."""
        place = (..., rows)
        if measured is not None:
            broken = measured[LSE].isnan()
            self.broken[place] |= broken
            # What a broken row says is not counted; its output is, and shows the NaN.
            measured = measured.masked_fill(broken, 0.0)
        before = self.lse[place]
        both = torch.logaddexp(before, lse)
        pivot = torch.where(both == -math.inf, 0.0, both)
        share, block_share = (before - pivot).exp(), (lse - pivot).exp()
        if self.out is not None and out is not None:
            combine(self.out[..., rows, :], share, out, block_share)
        if measured is not None:
            self._add_measured(place, measured, (before, lse, pivot), (share, block_share))
        self.lse[place] = both

    def _add_measured(
        self,
        place: tuple,
        measured: Tensor,
        logs: tuple[Tensor, Tensor, Tensor],
        shares: tuple[Tensor, Tensor],
    ) -> None:
        (before, lse, pivot), (share, block_share) = logs, shares
        self.max_logit[place] = torch.maximum(self.max_logit[place], measured[MAX_LOGIT])
        own = _share_of_entropy(share, self.entropy[place], pivot - before)
        self.entropy[place] = own + _share_of_entropy(block_share, measured[ENTROPY], pivot - lse)
        self.top_p[place] = torch.maximum(self.top_p[place] * share, measured[TOP_P] * block_share)
        squares = self.sum_p2[place] * share.square()
        self.sum_p2[place] = squares + measured[SUM_P2] * block_share.square()

    def add_sink(self, sinks: Tensor) -> None:
        """One more outcome with the logit sinks [1|B, H], for rows that have met a key."""
        keys = self.lse
        sink = sinks.to(keys.dtype).unsqueeze(-1)
        both = torch.where(keys == -math.inf, keys, torch.logaddexp(keys, sink))
        pivot = torch.where(both == -math.inf, 0.0, both)
        share = (keys - pivot).exp()
        if self.out is not None:
            self.out.mul_(share.unsqueeze(-1))
        if self.measures:
            off = (sink - pivot).exp().masked_fill(keys == -math.inf, 0.0)
            entropy = _share_of_entropy(share, self.entropy, pivot - keys)
            self.entropy = entropy + _share_of_entropy(off, torch.zeros_like(off), pivot - sink)
            self.top_p = self.top_p * share
            self.sum_p2 = self.sum_p2 * share.square() + off.square()
            self.off = off
        self.lse = both

    def rows(self) -> Rows:
        """What `measure.summarise` makes vitals of."""
        finite = torch.isfinite(self.lse) & torch.isfinite(self.entropy)
        counted = self.moments.count > 0
        return Rows(
            count=self.moments.count,
            max_logit=self.max_logit,
            lse=self.lse,
            entropy=self.entropy.clamp(min=0.0),
            top_p=self.top_p,
            sum_p2=self.sum_p2,
            first_p=(self.first - torch.where(self.lse == -math.inf, 0.0, self.lse)).exp(),
            off_p=self.off,
            mean=self.moments.mean,
            m2=self.moments.m2,
            broken=counted & (self.broken | ~finite),
        )


def _share_of_entropy(share: Tensor, entropy: Tensor, surprise: Tensor) -> Tensor:
    """share * (entropy - ln share); 0 where the share is 0, however large the surprise."""
    return torch.where(share > 0, share * (entropy + surprise), 0.0)
