"""A parameter that may be sharded (a DTensor): what of it lies here, and who has the rest.

Nothing of torch.distributed.tensor is imported: a DTensor is known by its placements.
"""

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

SAMPLED = 1024  # entries of a parameter that tell it from another


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "placements")


def here(tensor: Tensor) -> Tensor:
    """The entries that lie on this rank; of a plain tensor all."""
    sharded: Any = tensor
    return sharded._local_tensor if is_sharded(tensor) else tensor


def like(parameter: Tensor, local: Tensor) -> Tensor:
    """`local`, placed as the parameter is."""
    if not is_sharded(parameter):
        return local
    sharded: Any = parameter
    return type(sharded).from_local(
        local,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )


def laid_as(tensor: Tensor, parameter: Tensor) -> Tensor:
    """What lies here of a tensor of the parameter's shape, cut as the parameter is."""
    if here(tensor).shape != here(parameter).shape:
        placed: Any = tensor
        sharded: Any = parameter
        tensor = placed.redistribute(sharded.device_mesh, sharded.placements)
    return here(tensor)


def rows_here(parameter: Tensor, axis: int) -> Tensor:
    """Which indices along `axis` lie here, [n] int64 on the CPU.

    A dimension that is sharded twice is cut by the plain shards first, then by the strided: FSDP2
    cuts what tensor parallelism has left here, though its mesh dimension comes first.
    """
    rows = torch.arange(parameter.shape[axis], device="cpu")
    if not is_sharded(parameter):
        return rows
    sharded: Any = parameter
    coordinate = sharded.device_mesh.get_coordinate()
    cuts = [dim for dim, place in enumerate(sharded.placements) if _cuts(place, axis)]
    strided = [dim for dim in cuts if _strided(sharded.placements[dim])]
    for dim in [dim for dim in cuts if dim not in strided] + strided[::-1]:
        pieces = rows.chunk(sharded.device_mesh.size(dim)) if len(rows) else ()
        mine = coordinate[dim]
        rows = pieces[mine] if mine < len(pieces) else rows[:0]
    return rows


def spread(parameter: Tensor, axis: int) -> frozenset[Any]:
    """The mesh dimensions over whose ranks the rows along `axis` are spread."""
    if not is_sharded(parameter):
        return frozenset()
    sharded: Any = parameter
    return frozenset(
        (sharded.device_mesh, dim)
        for dim, place in enumerate(sharded.placements)
        if _cuts(place, axis)
    )


def why_not(parameter: Tensor, axis: int) -> str:
    """A parameter of which it is not known here which rows lie on this rank."""
    if not is_sharded(parameter):
        return ""
    sharded: Any = parameter
    if sharded.device_mesh.get_coordinate() is None:
        return "its weights lie on other ranks"
    if any(place.is_partial() for place in sharded.placements):
        return "its weights are sums over ranks"
    if len(rows_here(parameter, axis)) != here(parameter).shape[axis]:
        return f"its weights are sharded as {sharded.placements}, which scaledot does not know"
    return ""


def meshes(parameters: Iterable[Tensor]) -> list[Any]:
    """Of the parameters that are sharded, each once, in their order."""
    found: list[Any] = [p.device_mesh for p in parameters if is_sharded(p)]  # type: ignore[missing-attribute]
    return list(dict.fromkeys(found))


def coupled(roots: Iterable[nn.Module]) -> list[int]:
    """The ranks without which a forward pass of these models does not end."""
    found = meshes(parameter for root in roots for parameter in root.parameters())
    return sorted({int(rank) for mesh in found for rank in mesh.mesh.flatten()})


def share(parameters: Iterable[Tensor]) -> tuple[int, int]:
    """Which part of how many, by the first weight whose rows are spread; (0, 1): all of it."""
    for parameter in parameters:
        if spread(parameter, 0):
            rows = rows_here(parameter, 0)
            if len(rows):
                return int(rows[0]) // len(rows), parameter.shape[0] // len(rows)
    return 0, 1


def fingerprint(parameter: Tensor) -> str:
    """Which rows lie here, a colon, and a digest of their values where these tell anything.

    Replicas have the same, to the bit; shards and other layers do not. Columns that are spread over
    ranks make no difference: such a weight makes every row on every rank.
    """
    if not parameter.dim() or any(spread(parameter, axis) for axis in range(1, parameter.dim())):
        return ":"
    rows = rows_here(parameter, 0)
    place = f"{int(rows[0]) if len(rows) else 0}+{len(rows)}/{parameter.shape[0]}:"
    local = here(parameter).detach().flatten()
    # A copy: memory that numpy has seen cannot be given back, and FSDP2 gives its own back.
    sample = local[:: max(1, len(local) // SAMPLED)].clone().cpu()
    if not len(sample) or bool((sample == sample[0]).all()):
        return place  # zeros and ones of a fresh model are everywhere
    held = sample.view(torch.uint8).numpy().tobytes()
    return place + hashlib.sha256(held).hexdigest()[:16]


def _cuts(place: Any, axis: int) -> bool:
    return getattr(place, "dim", None) == axis


def _strided(place: Any) -> bool:
    return "Strided" in type(place).__name__
