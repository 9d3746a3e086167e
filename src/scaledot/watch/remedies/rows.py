"""Which rows of a layer's weights make which head, and scaling them, sharded or not.

A head's logits are products of its query and its key. Weight rows that make a key of this head
alone share the factor with the query rows they meet, the root each: QK-Clip's rule for plain
attention. Where keys serve several heads (grouped heads, the rotated part of latent attention),
only the query rows move, by the whole factor: other heads keep their logits.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from scaledot.watch.remedies import shards

HALF, WHOLE = 0.5, 1.0  # powers of the factor


@dataclass(frozen=True)
class Part:
    """One parameter of a layer: index i along `axis` is multiplied by factor[head[i]] ** power[i].

    head is -1 where the index makes no query and no key.
    """

    owner: nn.Module  # looked up by name at every use: a wrapper may have put another tensor there
    name: str
    path: str  # in the model
    axis: int
    head: Tensor  # [n] int64, CPU; n of the whole parameter, wherever its rows lie
    power: Tensor  # [n] float32, CPU
    _there: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    @property
    def parameter(self) -> Tensor:
        return getattr(self.owner, self.name)

    def scale_(self, gamma: Tensor) -> None:
        """In place, by the heads' gamma [heads]; of a sharded parameter the rows that lie here.

        On the device: nothing is read by the host.
        """
        parameter = self.parameter
        local = shards.here(parameter)
        padded = _padded(gamma.to(local.device))
        head, power = self._rows_here(parameter, local)
        with torch.no_grad():
            local.mul_(_along(padded[head] ** power, self.axis, local))

    def _rows_here(self, parameter: Tensor, local: Tensor) -> tuple[Tensor, Tensor]:
        """Copied once: a copy from the host makes it wait."""
        key = (local.device, getattr(parameter, "placements", None), local.shape[self.axis])
        if key not in self._there:
            rows = shards.rows_here(parameter, self.axis)
            self._there[key] = self.head[rows].to(local.device), self.power[rows].to(local.device)
        return self._there[key]

    def rows_of(self, head: int) -> list[int]:
        return (self.head == head).nonzero().flatten().tolist()


@dataclass(frozen=True)
class Layer:
    """How a layer's heads can be scaled by their weights, or why not."""

    name: str
    heads: int
    module: nn.Module | None
    kind: str  # the attention function it calls
    parts: tuple[Part, ...] = ()
    refused: str = ""  # why its weights cannot be scaled
    normalised: bool = False  # because a norm follows them
    max_logit: Tensor | None = None  # [heads], of the captured call
    identity: str = ""  # of the weights around the call: ranks with the same hold the same heads
    share: tuple[int, int] = (0, 1)  # which part of how many of the layer's heads is computed here
    alone: bool = True  # False: its module calls attention more than once
    values: tuple[str, ...] = ()  # of each part, its path and the fingerprint of what lies here

    def scale_(self, gamma: Tensor) -> None:
        for part in self.parts:
            part.scale_(gamma)

    def recipe(self) -> str:
        """Short, and equal for parts that do the same; "" without parts."""
        found = hashlib.sha256()
        for part in self.parts:
            found.update(f"{part.path} {part.axis}".encode())
            found.update(part.head.numpy().tobytes() + part.power.numpy().tobytes())
        return found.hexdigest()[:16] if self.parts else ""

    def rule(self) -> str:
        """In words."""
        query = "query rows of the head by gamma (its keys serve other heads too)"
        powers = {float(p) for part in self.parts for p in part.power[part.head >= 0]}
        if powers == {HALF}:
            return "query and key rows of the head by sqrt(gamma) each"
        if powers == {HALF, WHOLE}:
            return (
                "query and key rows of the head by sqrt(gamma) each, query rows that meet shared "
                "keys by gamma (the rule for latent attention)"
            )
        return query


def gamma_of(max_logit: Tensor, limit: float) -> Tensor:
    """limit / max where the max is above, else 1, [heads]; a maximum that is no number is left."""
    above = (max_logit > limit) & max_logit.isfinite()
    return torch.where(above, limit / max_logit, 1.0)


def only(gamma: Tensor, heads: Sequence[int] | None) -> Tensor:
    """1 for all heads but these; None: as it is."""
    if heads is None:
        return gamma
    kept = torch.zeros(gamma.shape, dtype=torch.bool, device=gamma.device)
    kept[list(heads)] = True
    return torch.where(kept, gamma, 1.0)


def scaled(local: Tensor, axis: int, head: Tensor, power: Tensor, gamma: Tensor) -> Tensor:
    """A copy of what lies here of a parameter; head and power of its rows."""
    factors = _padded(gamma)[head.to(gamma.device)] ** power.to(gamma.device)
    return (local * _along(factors, axis, local)).to(local.dtype)


def local_copy(parameter: Tensor) -> Tensor:
    return shards.here(parameter).detach().clone()


def restore_(parameter: Tensor, copy: Tensor) -> None:
    with torch.no_grad():
        shards.here(parameter).copy_(copy)


def _padded(gamma: Tensor) -> Tensor:
    """Index -1 is 1, and 1 ** p is 1 to the bit: other rows keep theirs."""
    return torch.cat([gamma, gamma.new_ones(1)])


def _along(factors: Tensor, axis: int, like: Tensor) -> Tensor:
    """In their own type: in bfloat16 a factor of 0.999 would be 1."""
    shape = [1] * like.dim()
    shape[axis] = -1
    return factors.reshape(shape)
