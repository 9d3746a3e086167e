"""How large the logits of a call can get, from the norms of its rows: |q.k| <= |q| |k|."""

import math

import torch
from torch import Tensor

from scaledot.backends.cpu.logits import Plan
from scaledot.backends.logit_bound import Norms, bound_of_scores, row_norms
from scaledot.measure import root_mean_square

# e^(2 * 30) times 2^40 keys, and e^(-2 * 30), are far inside float32: up to here the exponentials
# need no pivot.
SAFE_LOGIT = 30.0
LOWEST = -1e30
MODERATE_LOGIT = 1e15  # the square fits float32, with room for a sum


class Reach:
    """Decides which shortcuts are right for a call."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        query = row_norms(plan.inputs.query.to(plan.dtype))
        key = row_norms(plan.inputs.key.to(plan.dtype))
        self.query_norms, self.key_norms = query.of_rows, key.of_rows  # [B, H, Q], [B, G, K]
        # NaN or inf where q or k is not finite or overflows
        self.bound = bound = self._bound(query, key)
        self.pivot_free = bound <= SAFE_LOGIT and not plan.biased  # a cap only shrinks
        # What hides a pair from the softmax: finite where no logit comes near it, because then
        # e^a * a is 0 for a hidden pair, not NaN.
        self.hidden_as = LOWEST if bound < -LOWEST / 10 and not plan.biased else -math.inf
        self.moderate = bound <= MODERATE_LOGIT
        dot = plan.inputs.weight is None
        # In float64 differences of sums would lose half of the digits: there the tiles serve.
        single = plan.dtype == torch.float32
        self.gram = dot and single and plan.mask is None and math.isfinite(bound)

    def _bound(self, query: Norms, key: Norms) -> float:
        plan, weight = self.plan, self.plan.inputs.weight
        if weight is None:
            return bound_of_scores(query, key, plan.factor)
        if not (self.query_norms.numel() and self.key_norms.numel()):
            return 0.0
        if not math.isfinite(bound_of_scores(query, key, 1.0)):
            return math.inf
        factor = plan.factor.abs().amax().item() if isinstance(plan.factor, Tensor) else plan.factor
        largest = weight.to(plan.dtype).abs().sum(-1).amax().item()  # no |w . tanh| exceeds |w|_1
        return largest * abs(factor)

    def key_rms(self) -> tuple[Tensor, Tensor]:
        """Root mean square of the keys within their lengths, and how many entries: [B, H], of a
        packed batch [sequences, H]."""
        plan = self.plan
        entries_of = len(plan.slabs) if plan.packed else plan.batch
        rms = torch.zeros(entries_of, plan.groups, dtype=plan.dtype)
        entries = torch.zeros(entries_of, plan.groups, dtype=torch.int64)
        for index, part in enumerate(plan.slabs):
            batch, keys = (
                slice(part.start, part.stop),
                slice(part.diagonal.first, part.diagonal.last),
            )
            place = slice(index, index + 1) if plan.packed else batch
            rms[place], entries[place] = root_mean_square(
                plan.inputs.key[batch, :, keys], self.key_norms[batch, :, keys]
            )
        return rms.repeat_interleave(plan.repeats, 1), entries.repeat_interleave(plan.repeats, 1)
