"""transformers' attention functions inside torch.compile: an operator that looks, beside theirs.

It takes the parts of a call as they are and puts them together where a step is due: a mask and a
bias of positions are added up there, not in every step of the graph.
"""

from typing import Any

import torch
from torch import Tensor

from scaledot.watch.probes import compiled, in_graph
from scaledot.watch.probes.hugging_face_call import Call


def look(kind: str, call: Call) -> None:
    """Leaves the operator in the graph that is being traced."""
    if not in_graph.plain(call.query):
        compiled.cannot_see(kind, "its query is not a plain tensor")
        return
    tensors = (
        call.query,
        call.key,
        call.mask,
        call.position_bias,
        call.sinks,
        call.cu_seqlens_q,
        call.cu_seqlens_k,
    )
    _observe(
        *(None if tensor is None else tensor.detach() for tensor in tensors),
        compiled.BUFFER,
        compiled.site_of_call(torch.is_grad_enabled()),
        kind,
        call.scale,
        call.softcap,
        call.sliding_window,
        call.is_causal,
        call.flash,
    )


@torch.library.custom_op(
    "scaledot::watch_transformers", mutates_args=("buffer",), tags=compiled.TAGS
)
def _observe(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    position_bias: Tensor | None,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    buffer: Tensor,
    site: int,
    kind: str,
    scale: float,
    softcap: float | None,
    sliding_window: int | None,
    is_causal: bool,
    flash: bool,
) -> None:
    call = Call(
        query,
        key,
        mask,
        position_bias,
        sinks,
        cu_seqlens_q,
        cu_seqlens_k,
        scale,
        softcap,
        sliding_window,
        is_causal,
        flash,
    )
    compiled.offer(site, query, call.computed, kind, call.scores)


@_observe.register_fake
def _(*arguments: Any) -> None:
    return None
