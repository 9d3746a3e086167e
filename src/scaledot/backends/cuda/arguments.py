"""A call as every kernel takes it: one record, the same names in all of them.

Kernels take records whole (Triton passes tuples, and interprets them), with None for what a call
does not have: what hangs on it is not compiled. Names in capitals are constants of the compilation.
They end every record that holds records: Triton 3.6 forgets the None and the 1 of an inner record
in a loop unless the outer one sets a constant of its own after them.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from scaledot.backends.inputs import Inputs
from scaledot.problem import Settings

ROW = 16  # numbers: Triton knows of a stride whether it is a multiple of so many
LITTLE_MEMORY = 160 * 2**10  # bytes of shared memory: a GPU that has less has 99 KiB
FARTHEST = 2**30  # a window side past this is past every tensor; sums of two stay within int32


class Heads(NamedTuple):
    """A tensor [B, heads, rows, columns]; strides of 0 where there is but one entry."""

    ptr: Any
    stride_b: Any
    stride_h: Any
    stride_row: Any
    stride_column: Any


class PerHead(NamedTuple):
    """A tensor [B, heads], or [B, heads, n] whose last dimension has no gaps."""

    ptr: Any
    stride_b: Any
    stride_h: Any


class Window(NamedTuple):
    """Keys before and after the diagonal that a row may see; None: all."""

    left: Any
    right: Any


class Dropout(NamedTuple):
    """What is dropped at which rate (None: nothing), and the factor of what is kept."""

    seed_ptr: Any
    rate: Any
    factor: Any


class Call(NamedTuple):
    query: Heads
    key: Heads
    value: Heads
    mask: Heads  # bool masks come as integers
    head_scale: PerHead
    sinks: PerHead
    counts: PerHead  # [B, H|1, Q]: keys that each row sees, where a mask has a say in it
    key_lengths_ptr: Any
    cu_seqlens_q_ptr: Any
    cu_seqlens_k_ptr: Any
    batch: Any
    heads: Any
    repeats: Any  # query heads of a key head
    queries: Any
    keys: Any
    sequences: Any  # packed ones, else 0
    window: Window
    scale: Any
    softcap: Any
    dropout: Dropout
    LOG_N: Any
    BOTTOM_RIGHT: Any
    FLOAT: Any  # the type that the kernels compute in


NO_HEADS = Heads(None, 0, 0, 0, 0)
NO_NUMBERS = PerHead(None, 0, 0)


def describe_call(inputs: Inputs, settings: Settings) -> Call:
    """All but `counts`, which a kernel of its own finds."""
    query, key, mask = inputs.query, inputs.key, inputs.mask
    if mask is not None and mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)
    left, right, rate = settings.left, settings.right, settings.dropout_p
    dropout = Dropout(None, None, None)
    if rate:
        factor = 1.0 / (1.0 - rate) if rate < 1.0 else 0.0
        dropout = Dropout(inputs.seed, rate, number_for(query, factor))
    return Call(
        query=rows_of(query),
        key=rows_of(key),
        value=rows_of(inputs.value),
        mask=heads_of(mask),
        head_scale=numbers_of(inputs.head_scale),
        sinks=numbers_of(inputs.sinks),
        counts=NO_NUMBERS,
        key_lengths_ptr=inputs.key_lengths,
        cu_seqlens_q_ptr=inputs.cu_seqlens_q,
        cu_seqlens_k_ptr=inputs.cu_seqlens_k,
        batch=query.shape[0],
        heads=query.shape[1],
        repeats=query.shape[1] // max(key.shape[1], 1),
        queries=query.shape[2],
        keys=key.shape[2],
        sequences=0 if inputs.cu_seqlens_q is None else inputs.cu_seqlens_q.shape[0] - 1,
        window=Window(
            left=None if left is None else min(left, FARTHEST),
            right=None if right is None else min(right, FARTHEST),
        ),
        scale=number_for(query, settings.scale),
        softcap=number_for(query, settings.softcap) if settings.softcap else None,
        dropout=dropout,
        LOG_N=constant(settings.log_n),
        BOTTOM_RIGHT=constant(settings.bottom_right),
        FLOAT=constant(tl.float64 if query.dtype == torch.float64 else tl.float32),
    )


def aligned(inputs: Inputs) -> Inputs:
    """The inputs with rows that a program can copy 16 bytes at a time, which it must be able to.

    Triton 3.6 multiplies on Hopper from shared memory. Rows that it cannot copy in pieces of 16
    bytes get there through registers, and then it overwrites keys that a product still reads:
    wrong numbers, or an illegal address. So rows of any other stride are copied here first.
    """
    value = None if inputs.value is None else aligned_rows(inputs.value)
    query, key = aligned_rows(inputs.query), aligned_rows(inputs.key)
    return inputs._replace(query=query, key=key, value=value)


def aligned_rows(tensor: Tensor) -> Tensor:
    """The tensor, or its copy with rows of a multiple of 16 numbers where products need that."""
    if not _must_align(tensor):
        return tensor
    steps = [tensor.stride(i) for i in range(tensor.ndim - 1) if tensor.shape[i] != 1]
    whole = all(step % ROW == 0 for step in steps) and tensor.data_ptr() % 16 == 0
    width = tensor.shape[-1]
    if whole and (tensor.stride(-1) == 1 or width == 1) and filled_width(tensor) == width:
        return tensor
    once = _once(tensor)
    rows = once.new_zeros((*once.shape[:-1], -(-width // ROW) * ROW))[..., :width]
    return rows.copy_(once).expand(tensor.shape)


def filled_width(tensor: Tensor) -> int:
    """What may be read of each row of `aligned_rows`: in whole pieces of 16 bytes, zeros last."""
    width = tensor.shape[-1]
    if _must_align(tensor) and width * tensor.element_size() % 16:
        return -(-width // ROW) * ROW
    return width


def _must_align(tensor: Tensor) -> bool:
    multiplied = tensor.element_size() == 2 or dot_precision(tensor) == "tf32"
    return tensor.is_cuda and multiplied


def _once(tensor: Tensor) -> Tensor:
    """Without what only repeats in memory."""
    return tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())]


def heads_of(tensor: Tensor | None) -> Heads:
    return NO_HEADS if tensor is None else Heads(tensor, *steps_of(tensor))


def rows_of(tensor: Tensor | None) -> Heads:
    """Of `aligned_rows`: zeros follow a width of 1, and are read (`filled_width`)."""
    rows = heads_of(tensor)
    if tensor is not None and filled_width(tensor) > tensor.shape[-1]:
        rows = rows._replace(stride_column=tensor.stride(-1))
    return rows


def numbers_of(tensor: Tensor | None) -> PerHead:
    return NO_NUMBERS if tensor is None else PerHead(tensor, *steps_of(tensor)[:2])


def steps_of(tensor: Tensor) -> list[int]:
    """The strides; 0 where there is but one entry."""
    return [
        0 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    ]


@functools.lru_cache(maxsize=None, typed=True)  # True is not 1
def constant(value: Any) -> tl.constexpr:
    return tl.constexpr(value)


def constants(**values: Any) -> dict[str, tl.constexpr]:
    """Fields of a record that are compiled into a kernel."""
    return {name: constant(value) for name, value in values.items()}


def strides(name: str, tensor: Tensor | None, letters: str) -> dict[str, int]:
    """stride_{name}{letter} of each dimension; 0 where there is but one entry."""
    steps = [0] * len(letters) if tensor is None else steps_of(tensor)
    return {f"stride_{name}{letter}": step for letter, step in zip(letters, steps, strict=True)}


def number_for(query: Tensor, value: float) -> float | Tensor:
    """A number as kernels take it: Triton passes floats as float32, too short for float64."""
    if query.dtype != torch.float64:
        return float(value)
    return torch.full((), value, dtype=torch.float64, device=query.device)


def compute_type(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def dot_precision(query: Tensor) -> str:
    """How tl.dot multiplies float32; other types have one way only."""
    if query.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    return "ieee"


def padded(width: int) -> int:
    """A tile's width: a power of two, and at least what a matrix product takes."""
    return max(1 << max(width - 1, 0).bit_length(), 16)


def has_little_memory(tensor: Tensor) -> bool:
    """Whether its GPU is none of those for data centres, for which tiles were chosen."""
    return tensor.is_cuda and _shared_memory(tensor.device.index) < LITTLE_MEMORY


@functools.cache
def _shared_memory(device: int) -> int:
    """Bytes that one program can have; where torch does not tell, as many as tiles need."""
    facts = torch.cuda.get_device_properties(device)
    return getattr(facts, "shared_memory_per_block_optin", LITTLE_MEMORY)
