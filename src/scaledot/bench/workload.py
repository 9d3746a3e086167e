"""What is computed: the tensors of one call, the same for every contender."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from scaledot.measure import Vitals

SEED = 0


class Inputs(NamedTuple):
    """query, key, value [B, H, n, D]; weight [D] only for additive attention."""

    query: Tensor
    key: Tensor
    value: Tensor
    weight: Tensor | None
    causal: bool


class Answer(NamedTuple):
    """What a contender hands back; None for what it was not asked for."""

    out: Tensor | None
    vitals: Vitals | None


@dataclass(frozen=True)
class Workload:
    batch: int
    heads: int
    length: int
    width: int
    causal: bool = False
    additive: bool = False
    dtype: str = "float32"
    device: str = "cpu"

    @property
    def shape(self) -> str:
        return f"{self.batch}x{self.heads}x{self.length}x{self.width}"

    def make(self) -> Inputs:
        """Standard normal tensors, the same ones every time."""
        generator = torch.Generator(self.device).manual_seed(SEED)

        def normal(*shape: int) -> Tensor:
            drawn = torch.randn(shape, generator=generator, device=self.device)
            return drawn.to(getattr(torch, self.dtype))

        shape = (self.batch, self.heads, self.length, self.width)
        query, key, value = normal(*shape), normal(*shape), normal(*shape)
        # Scores weight . tanh(q + k) of a deviation near 1, like those that sqrt(d_k) scales.
        weight = 1.5 * normal(self.width) / self.width**0.5 if self.additive else None
        return Inputs(query, key, value, weight, self.causal)


def read(answer: Answer) -> None:
    """Every field of the vitals as plain numbers: a lazy field would be computed here."""
    if answer.vitals is not None:
        answer.vitals.to_dict()
