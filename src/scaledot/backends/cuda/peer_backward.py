"""torch's own GPU backward kernels, fed with our (out, lse), where they are right.

Both take what every flash backward takes: dO, q, k, v, out and lse = ln sum e^(scale q.k). cuDNN's
kernel is the faster one on Hopper; torch's flash kernel (FlashAttention 2) serves more shapes.
Neither is deterministic. Their operators have the same schemas in torch 2.11 and 2.13.

What is known to go wrong, and is refused or avoided here:

- cuDNN scores the padding of its last key tile 0 instead of -inf, so e^(0 - lse) overflows where
  lse is below -88: NaN in dQ, for Q = 1 in dK and dV (pytorch#196678). Lengths that are multiples
  of its tile of 128 have no padding.
- torch keeps cuDNN's plans by the strides of q, k and v, but a plan also holds those of out, dO and
  lse: a second call with another dO would be read by the first one's strides. All of our calls give
  out and dO the layout that torch gives out, and their plans are kept apart from those of torch's
  own calls by a dropout rate of -0.0: equal to 0.0 for the kernel, another key for the cache.
- Both take P = e^(s - lse) and delta = dO . O, which lose digits far from logits of 0, and multiply
  hidden NaN by 0. Where that happens is known to the GPU alone, and nothing here waits for it.
- Misaligned pointers and strides that are no multiple of 16 bytes end the CUDA context.
- A grid's y and z end at 65535.
"""

import functools
import os
from typing import NamedTuple

import torch
from torch import Tensor

from scaledot.backends.inputs import Inputs, Wanted
from scaledot.backends.layout import are_aligned, new_strides, steps_are_regular
from scaledot.problem import Settings

CUDNN_TILE = 128  # rows and keys
CUDNN_WIDTHS = (*range(64, 129, 8), 256)  # newer ones refuse those in between
CUDNN_SINCE = 90501  # dO need not have the strides of out, and widths up to 256
FLASH_WIDTHS = range(8, 257, 8)
MAX_GRID = 65535
ALIGNED_STRIDE = 8  # elements of two bytes

_cudnn_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default


def serves(inputs: Inputs, settings: Settings, lse: Tensor, wanted: Wanted) -> str | None:
    """Which kernel may compute the gradients, "cudnn" or "flash"; None: neither.

    Decided from shapes, layouts and settings alone, so nothing waits for the GPU.
    """
    query, key, value, mask, scale, sinks, weight, lengths, ends_q, ends_k, seed = inputs
    if value is None or not query.is_cuda or any(wanted):
        return None
    if not (mask is scale is sinks is weight is lengths is ends_q is ends_k is seed is None):
        return None
    if torch.are_deterministic_algorithms_enabled() or not are_aligned(query, key, value):
        return None
    shapes = query.shape, key.shape, value.shape
    strides = query.stride(), key.stride(), value.stride()
    found = _serve(shapes, strides, query.dtype, lse.dtype, settings, query.device)
    if found.cudnn and torch.backends.cuda.cudnn_sdp_enabled():
        return "cudnn"
    if found.flash and torch.backends.cuda.flash_sdp_enabled():
        return "flash"
    return None


def backward(
    which: str, inputs: Inputs, settings: Settings, grad_out: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv by the kernel that `serves` named; cuDNN's are made by torch.empty_like."""
    query, key, value = inputs.query, inputs.key, inputs.value
    assert value is not None
    strides = new_strides(query.shape, query.stride())
    out, grad_out = _laid_out(out, query, strides), _laid_out(grad_out, query, strides)
    lse = lse if lse.is_contiguous() else lse.contiguous()
    queries, keys, causal = query.shape[2], key.shape[2], settings.right == 0
    if which == "cudnn":
        return _cudnn_backward(
            grad_out,
            query,
            key,
            value,
            out,
            lse.unsqueeze(-1),  # [B, H, Q, 1] since torch 2.9
            lse,  # philox_seed: not looked at without dropout
            lse,  # philox_offset
            None,  # attn_bias
            None,  # cum_seq_q
            None,  # cum_seq_k
            queries,
            keys,
            -0.0,  # no dropout, and plans of our own: see above
            causal,
            scale=settings.scale,
        )
    assert which == "flash"
    seed = torch.empty(2, dtype=torch.uint64, device=query.device)  # never read without dropout
    return _flash_backward(
        grad_out,
        query,
        key,
        value,
        out,
        lse,
        None,  # cum_seq_q
        None,  # cum_seq_k
        queries,
        keys,
        0.0,
        causal,
        seed,
        seed[0],
        scale=settings.scale,
    )


class Serve(NamedTuple):
    """Which kernels can compute the gradients of calls of one kind."""

    cudnn: bool
    flash: bool


Shapes = tuple[torch.Size, torch.Size, torch.Size]  # of query, key, value
Strides = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@functools.lru_cache(4096)
def _serve(
    shapes: Shapes,
    strides: Strides,
    dtype: torch.dtype,
    lse_dtype: torch.dtype,
    settings: Settings,
    device: torch.device,
) -> Serve:
    """All that is the same for every call alike, of tensors that are aligned."""
    plain = _is_plain(settings) and lse_dtype == torch.float32
    if not plain or not _fits(shapes, strides, dtype):
        return Serve(False, False)
    query, key, _ = shapes
    if torch.version.hip:  # counts its GPUs otherwise, and has neither kernel
        return Serve(False, False)
    capability = torch.cuda.get_device_capability(device)
    return Serve(
        capability[0] == 9 and _cudnn_serves(query, key, settings),
        capability[0] >= 8 and _flash_serves(query, key, settings, capability),
    )


def _is_plain(settings: Settings) -> bool:
    """softmax(scale q.k) v over all keys, or causal: nothing that only we know."""
    return (
        settings.dropout_p == 0.0
        and not settings.log_n
        and not settings.softcap
        and settings.scale > 0.0
        and settings.left is None
        and settings.right in (None, 0)
    )


def _fits(shapes: Shapes, strides: Strides, dtype: torch.dtype) -> bool:
    """What both kernels ask of types, shapes and layouts."""
    query, key, value = shapes
    batch, heads, _, width = query
    return (
        dtype in (torch.bfloat16, torch.float16)
        and query.numel() > 0
        and key.numel() > 0
        and value[-1] == width
        and heads % key[1] == 0
        and batch * heads <= MAX_GRID
        and all(map(_fits_plan, shapes, strides))
    )


def _fits_plan(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    """Also strides of dimensions with one entry reach the plan, which keeps them in 32 bits."""
    aligned = all(step % ALIGNED_STRIDE == 0 for step in strides[:-1])
    return steps_are_regular(shape, strides, 2) and aligned and max(strides) < 2**31


def _is_square(query: torch.Size, key: torch.Size) -> bool:
    return query[2] == key[2]


def _cudnn_serves(query: torch.Size, key: torch.Size, settings: Settings) -> bool:
    top_left = not settings.bottom_right  # as cuDNN's causal mask
    return (
        (torch.backends.cudnn.version() or 0) >= CUDNN_SINCE
        and query[-1] in CUDNN_WIDTHS
        and query[2] % CUDNN_TILE == 0
        and key[2] % CUDNN_TILE == 0
        and (settings.right is None or top_left or _is_square(query, key))
        # This switch, which torch reads once, lays lse out another way.
        and os.environ.get("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "0") == "0"
    )


def _flash_serves(
    query: torch.Size, key: torch.Size, settings: Settings, capability: tuple[int, int]
) -> bool:
    plain = settings.right is None or _is_square(query, key)  # its causal mask is bottom-right
    # Its backward of these widths takes more shared memory than the smaller GPUs have.
    large = 192 < query[-1] <= 224
    roomy = capability in ((8, 0), (9, 0)) or capability[0] == 10
    return query[-1] in FLASH_WIDTHS and plain and (roomy or not large)


def _laid_out(tensor: Tensor, query: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The same numbers with the strides that a new tensor like the query has."""
    if tensor.stride() == strides and tensor.dtype == query.dtype and are_aligned(tensor):
        return tensor
    return torch.empty_like(query).copy_(tensor)
