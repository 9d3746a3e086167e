"""How a tensor lies in memory, as the kernels of a GPU that read 16 bytes at a time ask for it."""

import functools

import torch
from torch import Tensor

ALIGNED_BYTES = 16


def is_regular(tensor: Tensor) -> bool:
    """Rows without gaps that start at multiples of 16 bytes, no dimension that repeats."""
    *steps, last = tensor.stride()
    if last != 1 or not is_aligned(tensor):
        return False
    size = tensor.element_size()
    for entries, step in zip(tensor.shape, steps, strict=False):
        if entries != 1 and (step <= 0 or step * size % ALIGNED_BYTES):
            return False
    return True


def is_aligned(tensor: Tensor) -> bool:
    """By the first entry's address; of tensors without data, its distance from the start."""
    if type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_meta:
        return tensor.data_ptr() % ALIGNED_BYTES == 0
    return int(tensor.storage_offset()) * tensor.element_size() % ALIGNED_BYTES == 0


@functools.lru_cache(4096)
def new_strides(shape: torch.Size, strides: tuple[int, ...]) -> tuple[int, ...]:
    """Those that `torch.empty_like` gives to a new tensor like one with these; none is made."""
    return torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()
