"""Which rows of a layer's weights make which head, and scaling them, sharded or not.

A head's logits are products of its query and its key. Weight rows that make a key of this head
alone share the factor with the query rows they meet, the root each: QK-Clip's rule for plain
attention. Where keys serve several heads (grouped heads, the rotated part of latent attention),
only the query rows move, by the whole factor: other heads keep their logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

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
    head: Tensor  # [n] int64, CPU
    power: Tensor  # [n] float32, CPU
    _there: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    @property
    def parameter(self) -> Tensor:
        return getattr(self.owner, self.name)

    def factors(self, gamma: Tensor) -> Tensor:
        """[n] from the heads' gamma [heads], on gamma's device: nothing is read by the host."""
        padded = torch.cat([gamma, gamma.new_ones(1)])
        if gamma.device not in self._there:  # copied once: a copy from the host makes it wait
            self._there[gamma.device] = self.head.to(gamma.device), self.power.to(gamma.device)
        head, power = self._there[gamma.device]
        return padded[head] ** power  # 1 ** p is 1 to the bit: other rows keep theirs

    def scaled(self, tensor: Tensor, gamma: Tensor) -> Tensor:
        """A copy of `tensor`, which stands for the parameter."""
        return (tensor * _along(self.factors(gamma), self.axis, tensor)).to(tensor.dtype)

    def scale_(self, gamma: Tensor) -> None:
        """In place; of a sharded parameter the rows that lie here."""
        parameter = self.parameter
        factors = self.factors(gamma.to(parameter.device))
        local, first = _local(parameter, self.axis)
        factors = factors[first : first + local.shape[self.axis]]
        with torch.no_grad():
            local.mul_(_along(factors, self.axis, local))

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

    def scale_(self, gamma: Tensor) -> None:
        for part in self.parts:
            part.scale_(gamma)

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


def local_copy(parameter: Tensor) -> Tensor:
    return _local(parameter, 0)[0].detach().clone()


def restore_(parameter: Tensor, copy: Tensor) -> None:
    with torch.no_grad():
        _local(parameter, 0)[0].copy_(copy)


def why_not_here(parameter: Tensor) -> str:
    """A parameter whose shard cannot be told apart by plain rows."""
    if not hasattr(parameter, "placements"):
        return ""
    sharded: Any = parameter
    if any("Strided" in type(place).__name__ for place in sharded.placements):
        return "its weights are sharded twice along one dimension"
    if "tp" in (sharded.device_mesh.mesh_dim_names or ()):
        return "its heads are spread over ranks (tensor parallel)"
    return ""


def _local(parameter: Tensor, axis: int) -> tuple[Tensor, int]:
    """The rows that lie here, and the number of the first along `axis`."""
    if not hasattr(parameter, "placements"):
        return parameter, 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sharded: Any = parameter
    _shape, offset = compute_local_shape_and_global_offset(
        sharded.shape, sharded.device_mesh, sharded.placements
    )
    return sharded._local_tensor, offset[axis] if offset else 0


def _along(factors: Tensor, axis: int, like: Tensor) -> Tensor:
    """In their own type: in bfloat16 a factor of 0.999 would be 1."""
    shape = [1] * like.dim()
    shape[axis] = -1
    return factors.reshape(shape)
