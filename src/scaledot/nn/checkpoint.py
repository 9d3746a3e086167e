"""The names of torch.nn.MultiheadAttention's parameters, in ours."""

from collections.abc import MutableMapping
from typing import Any

from torch import Tensor, nn

PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def translate_torch_names(
    module: nn.Module, state: MutableMapping[str, Tensor], prefix: str, *_: Any
) -> None:
    """Before loading: rename in place what nn.MultiheadAttention saved; ours stays as it is.

    in_proj_weight [3 d_model, d_model]   -> q_proj.weight, k_proj.weight, v_proj.weight
    q_proj_weight and so on (kdim, vdim)  -> q_proj.weight and so on
    in_proj_bias [3 d_model]              -> q_proj.bias, k_proj.bias, v_proj.bias
    """
    for kind in ("weight", "bias"):
        packed = state.pop(f"{prefix}in_proj_{kind}", None)
        if packed is not None:
            for name, part in zip(PROJECTIONS, packed.chunk(3), strict=True):
                state[f"{prefix}{name}.{kind}"] = part
    for name in PROJECTIONS:
        weight = state.pop(f"{prefix}{name}_weight", None)
        if weight is not None:
            state[f"{prefix}{name}.weight"] = weight
