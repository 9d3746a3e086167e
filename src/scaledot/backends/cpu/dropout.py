"""Dropout whose mask is never stored: the backward pass draws the same numbers again."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from scaledot.backends.cpu.logits import Plan
from scaledot.backends.cpu.tiles import Block


class Dropout:
    """The random numbers of one block, drawn tile after tile from the call's seed."""

    def __init__(self, plan: Plan, block: Block) -> None:
        self.rate = plan.settings.dropout_p
        self.generator: torch.Generator | None = None
        if self.rate > 0.0:
            assert plan.inputs.seed is not None
            seed = int(plan.inputs.seed.item())
            self.generator = torch.Generator().manual_seed((seed + block.index) % 2**63)

    def keep(self, tile: Tensor) -> Tensor | None:
        """What multiplies the probabilities of the next tile: 0 or 1 / (1 - rate)."""
        if self.generator is None:
            return None
        if self.rate >= 1.0:
            return torch.zeros_like(tile)
        kept = torch.empty_like(tile)
        with _batching_allows_it():
            kept.bernoulli_(1.0 - self.rate, generator=self.generator)
        return kept.div_(1.0 - self.rate)


@contextlib.contextmanager
def _batching_allows_it() -> Iterator[None]:
    """Draw where torch.autograd.grad(..., is_grads_batched=True) refuses all random numbers.

    It would refuse a new draw, which the gradients of a batch would share or not. The call's own
    numbers, drawn again from its seed, are the same for all of them.
    """
    depth = torch._C._vmapmode_increment_nesting()
    for _ in range(depth):
        torch._C._vmapmode_decrement_nesting()
    try:
        yield
    finally:
        for _ in range(depth - 1):
            torch._C._vmapmode_increment_nesting()
