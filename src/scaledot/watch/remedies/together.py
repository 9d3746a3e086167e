"""Ranks that run one layer together, as tensor parallelism does: its decisions are everybody's.

A trial that one rank gives up and another goes on with would leave them in different collectives,
waiting for each other.
"""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from scaledot.watch.remedies import shards


class Together:
    """The ranks over which these parameters are spread while they are used; often only this one."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._meshes = shards.meshes(parameters)

    def all(self, mine: bool) -> bool:
        """Whether it is so on every rank."""
        return bool(self._least([int(mine)])[0])

    def same(self, mine: str) -> bool:
        """Whether every rank says the same."""
        number = int.from_bytes(hashlib.sha256(mine.encode()).digest()[:7], "big")
        least, most = self._least([number, -number])
        return least == -most

    def _least(self, numbers: list[int]) -> list[int]:
        for mesh in self._meshes:
            packed = torch.tensor(numbers, device=mesh.device_type)
            for dim in range(mesh.ndim):
                torch.distributed.all_reduce(
                    packed, torch.distributed.ReduceOp.MIN, group=mesh.get_group(dim)
                )
            numbers = packed.tolist()
        return numbers
