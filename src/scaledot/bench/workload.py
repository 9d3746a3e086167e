"""What is computed: the tensors of one call, the same for every contender."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from scaledot.measure import COUNT_FIELDS, FLOAT_FIELDS, Vitals

SEED = 0


class Inputs(NamedTuple):
    """query, key, value [B, H, n, D]; weight [D] only for additive attention.

    grad: what flows into the output, where the backward pass is measured too.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    weight: Tensor | None
    causal: bool
    grad: Tensor | None = None


class Answer(NamedTuple):
    """What a contender hands back; None for what it was not asked for."""

    out: Tensor | None
    vitals: Vitals | None
    gradients: tuple[Tensor, ...] | None = None  # of query, key, value


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
    backward: bool = False

    @property
    def rows(self) -> int:
        return self.batch * self.heads * self.length

    @property
    def flops(self) -> float:
        """Of the two products of a forward pass, by the convention of the literature."""
        return 4.0 * self.rows * self.length * self.width / (2 if self.causal else 1)

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
        if not self.backward:
            return Inputs(query, key, value, weight, self.causal)
        for tensor in (query, key, value):
            tensor.requires_grad_()
        return Inputs(query, key, value, weight, self.causal, normal(*shape))


def read(answer: Answer) -> None:
    """Every field of the vitals as plain numbers: a lazy field would be computed here."""
    if answer.vitals is not None:
        answer.vitals.to_dict()


def touch(answer: Answer) -> None:
    """Every field of the vitals as a tensor: as `read`, but nobody waits for a GPU."""
    if answer.vitals is not None:
        for name in (*FLOAT_FIELDS, *COUNT_FIELDS, "passes"):
            getattr(answer.vitals, name)
