"""One number a row of each statistic, filled block by block."""

import math

import torch
from torch import Tensor

from scaledot.backends.cpu.logits import Plan
from scaledot.backends.cpu.tiles import Block
from scaledot.measure import Rows


class RowStore:
    """Tensors [B, G, repeats, Q]; rows that no block visits see no key and keep their start."""

    def __init__(self, plan: Plan, wants_vitals: bool) -> None:
        self.plan, self.wants_vitals = plan, wants_vitals
        shape = (plan.batch, plan.groups, plan.repeats, plan.queries)
        start = {"lse": -math.inf}
        if wants_vitals:
            start |= {"max_logit": -math.inf, "entropy": 0.0, "top_p": 0.0, "sum_p2": 0.0}
            start |= {"first_p": 0.0}
            if plan.inputs.sinks is not None:
                start |= {"off_p": 0.0}
        self.stores = {
            name: torch.full(shape, value, dtype=plan.dtype) for name, value in start.items()
        }

    @property
    def lse(self) -> Tensor:
        return self.stores["lse"]

    def write(self, name: str, block: Block, values: Tensor) -> None:
        place = self.stores[name][block.batch, block.groups, :, block.row : block.row_end]
        place.copy_(values)

    def measured(self, count: Tensor, mean: Tensor, m2: Tensor) -> Rows:
        """With the logits' moments (of each row, any shape with as many entries): all of a row."""
        flat = {name: store.flatten(1, 2) for name, store in self.stores.items()}
        shape = flat["lse"].shape
        finite = torch.isfinite(flat["lse"]) & torch.isfinite(flat["entropy"])
        count = count.reshape(shape)
        return Rows(
            count=count,
            max_logit=flat["max_logit"],
            lse=flat["lse"],
            entropy=flat["entropy"],
            top_p=flat["top_p"],
            sum_p2=flat["sum_p2"],
            first_p=flat["first_p"],
            off_p=flat.get("off_p"),
            mean=mean.reshape(shape),
            m2=m2.reshape(shape),
            broken=(count > 0) & ~finite,
        )

    @staticmethod
    def stacked(rows: Rows) -> Tensor:
        """[5, B, H, Q]: max_logit, lse, entropy, top_p, sum_p2; NaN where the row is broken."""
        stacked = torch.stack([rows.max_logit, rows.lse, rows.entropy, rows.top_p, rows.sum_p2])
        empty = rows.count == 0
        stacked[:2].masked_fill_(empty, -math.inf)
        stacked[2:].masked_fill_(empty, 0.0)
        return stacked.masked_fill_(rows.broken, math.nan)
