"""What a probe hands over: one attention call, and how to measure it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scaledot.measure import Vitals
from scaledot.watch.probes.place import Near
from scaledot.watch.probes.scores import Source, nothing


class Seen(NamedTuple):
    """`measure` is called where a reading is due, and never otherwise."""

    query: Tensor
    measure: Callable[[], Vitals]  # of the query's leading shape
    kind: str  # the function that was called, in the words of its library
    module: nn.Module | None = None  # the attention's own module, where the probe knows it
    training: bool | None = None  # None: the gradient mode decides, and the module
    compiled: bool = False
    site: object = ()  # inside a compiled graph: which of the module's calls
    first: int | None = None  # of the layer's heads, where the call says which this rank holds
    counts: bool = True  # False: the rows are another rank's as well, who counts them
    over_ranks: bool = False  # measuring it talks to other ranks: all of them must do it
    scale: float | None = None  # of the call, where its query is [..., tokens, d_k]
    measured: bool = False  # the call itself has made the vitals: there is no work left to time
    # Gives that of which a part of the batch can be measured; called as `measure` is.
    source: Callable[[], Source | None] = nothing
    near: Near | None = None  # where the probe has looked for it


def scale_of(query: Tensor, scale: float | None) -> float | None:
    """Return the scale of a call; None where there are no entries whose products it scales."""
    width = query.shape[-1]
    if not width:
        return None
    return width**-0.5 if scale is None else scale


def why_not(query: Any) -> str:
    """Why this call cannot be measured; empty where it can."""
    if not isinstance(query, Tensor):
        return f"its query is a {type(query).__name__}, not a tensor"
    if torch._C._are_functorch_transforms_active():
        return "it runs inside a transform of torch.func"
    if type(query) not in (Tensor, nn.Parameter):
        return f"its query is a {type(query).__name__}, not a plain tensor"
    if query.is_meta:
        return "its tensors are on the meta device"
    if query.is_nested:
        return "its tensors are nested"
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        return "it is being recorded into a CUDA graph"
    return ""
