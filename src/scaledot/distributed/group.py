"""The ranks of a call: a process group, whatever it was given as."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from scaledot.errors import ArgumentError, ArgumentTypeError


class Ranks(NamedTuple):
    group: Any  # a ProcessGroup
    rank: int  # of this process in the group
    size: int

    def neighbour(self, distance: int) -> int:
        """The global rank of the process `distance` further in the ring."""
        return dist.get_global_rank(self.group, (self.rank + distance) % self.size)

    def meeting_place(self, device: torch.device) -> torch.device:
        """Where the group can take tensors from: gloo has no way out of a GPU, so by the host."""
        if device.type == "cpu" or dist.get_backend(self.group) != "gloo":
            return device
        return torch.device("cpu")


def ranks_of(mesh: Any) -> Ranks:
    """mesh: a 1-D DeviceMesh or a ProcessGroup."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialised; call torch.distributed.init_process_group() "
            "or init_device_mesh(), and start the script with torchrun"
        )
    if isinstance(mesh, dist.ProcessGroup):
        group = mesh
    elif hasattr(mesh, "get_group") and hasattr(mesh, "ndim"):
        if mesh.ndim != 1:
            names = mesh.mesh_dim_names or ()
            hint = f": mesh[{names[-1]!r}]" if names else ""
            raise ArgumentError(f"mesh has {mesh.ndim} dimensions; give the one to use{hint}")
        group = mesh.get_group()
    else:
        raise ArgumentTypeError(
            f"mesh is a {type(mesh).__name__}; give a 1-D DeviceMesh (init_device_mesh) or a "
            f"process group"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise ArgumentError("this process is not one of the mesh's ranks")
    return Ranks(group, rank, dist.get_world_size(group))


def all_numbers(ranks: Ranks, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
    """The whole numbers of every rank; waits for all of them."""
    own = torch.tensor(numbers, dtype=torch.int64, device=ranks.meeting_place(device))
    if ranks.size == 1:
        return [own.tolist()]
    everybodys = own.new_empty(ranks.size, len(numbers))
    dist.all_gather(list(everybodys), own, group=ranks.group)
    return everybodys.tolist()


def all_bytes(ranks: Ranks, tensor: Tensor) -> Tensor:
    """The tensors of all ranks, equal in shape, [ranks, ...]: one collective.

    As bytes: not every backend knows every type.
    """
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    flat = flat.to(ranks.meeting_place(tensor.device))
    everybodys = flat.new_empty(ranks.size, flat.numel())
    if flat.numel():
        dist.all_gather(list(everybodys), flat, group=ranks.group)
    return everybodys.to(tensor.device).view(tensor.dtype).view(ranks.size, *tensor.shape)
