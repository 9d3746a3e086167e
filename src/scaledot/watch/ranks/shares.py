"""Which heads of a layer a rank holds, read from the layer's weights while they are at work.

parallelize_module leaves the projections' weights as DTensors, cut along their rows, and hands
plain tensors with a part of the heads to attention. FSDP2 shows whole weights during a module's
forward pass; together with tensor parallelism it shows DTensors of that part.
"""

import re
import sys
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

from torch import distributed as dist
from torch import nn

# The projection of the queries, alone or fused with others, under the names that models use.
QUERY = re.compile(
    r"(?:^|[._])(?:w?q|query|q_?proj|q_lin|w?qkv|c_attn|in_proj|query_key_value)"
    r"(?:_?(?:proj|weight|lin|linear|b_proj))*(?:[._]|$)",
    re.IGNORECASE,
)
FURTHEST = 3  # modules from the call outwards in which the projection is looked for
MOST = 64  # parameters of each that are looked at


class Share(NamedTuple):
    first: int = 0  # heads of the layer before those of this rank
    counts: bool = True  # False: another rank holds the same heads and the same rows


WHOLE = Share()


def share_of(running: Sequence[nn.Module], heads: int) -> Share:
    """running: the modules around the call, the innermost first; heads: of the call."""
    if not may_be_shared():
        return WHOLE
    tensor = sys.modules["torch.distributed.tensor"]
    for module in running[:FURTHEST]:
        for name, weight in _query_weights(module):
            if not isinstance(weight, tensor.DTensor):
                return WHOLE
            return _of_resting(weight, heads) if _rests(module, name) else _share(weight, heads)
    return WHOLE


def may_be_shared() -> bool:
    """Whether anybody can have made a DTensor."""
    return "torch.distributed.tensor" in sys.modules and dist.is_initialized()


def rows_of(tensor: Any, dim: int = 0) -> tuple[int, int]:
    """Of a DTensor: how many entries along `dim` lie before this rank's, and how many it holds."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return offset[dim], shape[dim]


def _query_weights(module: nn.Module) -> Iterable[tuple[str, Any]]:
    for name, parameter in islice(module.named_parameters(), MOST):
        if parameter.dim() > 1 and QUERY.search(name):
            yield name, parameter


def _share(weight: Any, heads: int) -> Share:
    """By the rows: the part that lies before this rank's, in heads of this rank's size."""
    mesh, counts = weight.device_mesh, True
    names = mesh.mesh_dim_names or ()
    for dim, placement in enumerate(weight.placements):
        if not placement.is_shard() and "tp" in names[dim : dim + 1] and mesh.size(dim) > 1:
            counts = counts and mesh.get_local_rank(dim) == 0
    before, rows = rows_of(weight)
    return Share(before * heads // rows if rows else 0, counts)


def _rests(module: nn.Module, name: str) -> bool:
    """Whether FSDP2 has cut the weight again: its own module's forward is over."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for part in name.split(".")[:-1]:
        module = getattr(module, part)
        if fsdp is not None and isinstance(module, fsdp.FSDPModule):
            return True
    return False


def _of_resting(weight: Any, heads: int) -> Share:
    """The first dimension of its mesh is FSDP2's; a second is the tensor-parallel one."""
    last = weight.device_mesh.ndim - 1
    if not last or not weight.placements[last].is_shard(0):
        return WHOLE
    return Share(weight.device_mesh.get_local_rank(last) * heads)
