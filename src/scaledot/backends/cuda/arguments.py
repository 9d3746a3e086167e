"""What every kernel of the backend takes from a call: the same names in all of them."""

from typing import Any

import torch
import triton
from torch import Tensor

from scaledot.backends.inputs import Inputs
from scaledot.problem import Settings

FARTHEST = 2**30  # a window side past this is past every tensor; sums of two stay within int32


def shared_arguments(inputs: Inputs, settings: Settings) -> dict[str, Any]:
    """Tensors, sizes, strides and numbers; None for what the call does not use."""
    query, key, value = inputs.query, inputs.key, inputs.value
    mask = inputs.mask
    if mask is not None and mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)
    rate = settings.dropout_p
    return {
        "query_ptr": query,
        "key_ptr": key,
        "value_ptr": value,
        "mask_ptr": mask,
        "head_scale_ptr": inputs.head_scale,
        "sinks_ptr": inputs.sinks,
        "key_lengths_ptr": inputs.key_lengths,
        "cu_seqlens_q_ptr": inputs.cu_seqlens_q,
        "cu_seqlens_k_ptr": inputs.cu_seqlens_k,
        "seed_ptr": inputs.seed if rate > 0.0 else None,
        "batch": query.shape[0],
        "heads": query.shape[1],
        "repeats": query.shape[1] // max(key.shape[1], 1),
        "queries": query.shape[2],
        "keys": key.shape[2],
        "sequences": 0 if inputs.cu_seqlens_q is None else inputs.cu_seqlens_q.shape[0] - 1,
        "left": None if settings.left is None else min(settings.left, FARTHEST),
        "right": None if settings.right is None else min(settings.right, FARTHEST),
        "scale": number_for(query, settings.scale),
        "softcap": number_for(query, settings.softcap) if settings.softcap else None,
        "rate": rate if rate > 0.0 else None,
        "kept": number_for(query, 1.0 / (1.0 - rate) if rate < 1.0 else 0.0) if rate else None,
        **strides("q", query, "bhmd"),
        **strides("k", key, "bhnd"),
        **strides("v", value, "bhnd"),
        **strides("mask_", mask, "bhmn"),
        **strides("scale_", inputs.head_scale, "bh"),
        **strides("sink_", inputs.sinks, "bh"),
    }


def strides(name: str, tensor: Tensor | None, letters: str) -> dict[str, int]:
    """stride_{name}{letter} of each dimension; 0 where there is but one entry."""
    if tensor is None:
        return {f"stride_{name}{letter}": 0 for letter in letters}
    return {
        f"stride_{name}{letter}": tensor.stride(i) if tensor.shape[i] != 1 else 0
        for i, letter in enumerate(letters)
    }


def number_for(query: Tensor, value: float) -> float | Tensor:
    """A number as kernels take it: Triton passes floats as float32, too short for float64."""
    if query.dtype != torch.float64:
        return float(value)
    return torch.full((), value, dtype=torch.float64, device=query.device)


def compute_type(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def dot_precision(query: Tensor) -> str:
    """How tl.dot multiplies float32; other types have one way only."""
    if query.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    return "ieee"


def padded(width: int) -> int:
    """A tile's width: a power of two, and at least what a matrix product takes."""
    return max(int(triton.next_power_of_2(width)), 16)
