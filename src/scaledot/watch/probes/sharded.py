"""Queries and keys that are DTensors: each rank measures what it holds of them."""

import sys
from typing import Any

import torch
from torch import Tensor

from scaledot import functional
from scaledot.measure import Vitals
from scaledot.watch.probes.seen import Seen, why_not

CUT = "the watch does not know its heads: it is cut along"


def is_sharded(query: Any) -> bool:
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and isinstance(query, tensor.DTensor)


def look(
    kind: str,
    query: Any,
    key: Any,
    attn_mask: Any,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Seen | str:
    """What a probe offers, or why it cannot. Every rank's rows are its own, unless replicated."""
    if not is_sharded(key) or key.placements != query.placements:
        return "its queries and keys are placed differently on their mesh"
    found = _facts(query)
    if isinstance(found, str):
        return found
    first, counts, tokens = found
    mask = _local_mask(attn_mask, query)
    if isinstance(mask, str):
        return mask
    with torch.no_grad():
        local, local_key = _local(query), _local(key)
    if reason := why_not(local):
        return reason
    shared: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if tokens is None:

        def measure() -> Vitals:
            return functional.vitals(local, local_key, mask, **shared)

        return Seen(local, measure, kind, first=first, counts=counts)
    if mask is not None:
        return "its tokens are spread over ranks, and it has a mask"

    def measure_over_ranks() -> Vitals:
        from scaledot import distributed

        group, layout = query.device_mesh.get_group(tokens), _layout()
        return distributed.vitals(local, local_key, group, **shared, layout=layout, merge=False)

    return Seen(local, measure_over_ranks, kind, first=first, counts=counts, over_ranks=True)


def _facts(query: Any) -> tuple[int, bool, int | None] | str:
    """The first head, whether its rows count on this rank, the mesh dimension of its tokens."""
    from scaledot.watch.ranks.shares import rows_of

    mesh, counts, tokens = query.device_mesh, True, None
    heads = query.dim() - 3
    for place, placement in enumerate(query.placements):
        if mesh.size(place) == 1:
            continue
        if placement.is_partial():
            return "its queries are sums that are not complete"
        if placement.is_replicate():
            counts = counts and mesh.get_local_rank(place) == 0
            continue
        dim = placement.dim % query.dim()
        if dim == query.dim() - 1:
            return f"{CUT} its width"
        if dim == query.dim() - 2:
            if tokens is not None:
                return "its tokens are spread over two dimensions of its mesh"
            tokens = place
        elif query.dim() < 4:
            return f"{CUT} the first of {query.dim()} dimensions"
    return rows_of(query, heads)[0] if heads >= 0 else 0, counts, tokens


def _local(tensor: Any) -> Tensor:
    local = tensor.to_local()
    return local.wait() if hasattr(local, "wait") else local  # a collective that is on its way


def _local_mask(mask: Any, query: Any) -> Any:
    """The part for this rank's queries; a sentence where that is not clear."""
    if mask is None:
        return None
    if is_sharded(mask):
        if mask.device_mesh == query.device_mesh and mask.placements == query.placements:
            return _local(mask)
        if not all(placement.is_replicate() for placement in mask.placements):
            return "its mask is placed differently from its queries"
        mask = _local(mask)
    # The same for every batch entry and every head: the same for every rank.
    whole = all(size == 1 for size in mask.shape[:-2])
    return mask if whole else "its mask is not placed as its queries are"


def _layout() -> str:
    """How torch's context_parallel has cut the sequence."""
    handlers = sys.modules["torch.distributed.tensor"].DTensor._op_dispatcher._custom_op_handlers
    if torch.ops.aten._scaled_dot_product_flash_attention.default not in handlers:
        return "contiguous"  # nobody is inside it
    from torch.distributed.tensor.experimental._attention import _cp_options

    return "zigzag" if _cp_options.enable_load_balance else "contiguous"
