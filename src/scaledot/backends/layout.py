"""How a tensor lies in memory, as the kernels of a GPU that read 16 bytes at a time ask for it."""

import functools

import torch
from torch import Tensor

ALIGNED_BYTES = 16


def is_regular(tensor: Tensor) -> bool:
    """Rows without gaps that start at multiples of 16 bytes, no dimension that repeats."""
    regular = steps_are_regular(tensor.shape, tensor.stride(), tensor.element_size())
    return regular and are_aligned(tensor)


def steps_are_regular(shape: torch.Size, strides: tuple[int, ...], size: int) -> bool:
    """The same of a tensor whose first entry is aligned; size: bytes of an entry."""
    *steps, last = strides
    if last != 1:
        return False
    for entries, step in zip(shape, steps, strict=False):
        if entries != 1 and (step <= 0 or step * size % ALIGNED_BYTES):
            return False
    return True


def are_aligned(*tensors: Tensor) -> bool:
    """By the first entry's address; of tensors without data, its distance from the start."""
    for tensor in tensors:
        if type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_meta:
            start = tensor.data_ptr()
        else:
            start = int(tensor.storage_offset()) * tensor.element_size()
        if start % ALIGNED_BYTES:
            return False
    return True


@functools.lru_cache(4096)
def new_strides(shape: torch.Size, strides: tuple[int, ...]) -> tuple[int, ...]:
    """Those that `torch.empty_like` gives to a new tensor like one with these; none is made."""
    return torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()
