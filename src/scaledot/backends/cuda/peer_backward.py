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
- Misaligned pointers and strides that are no multiple of 16 bytes end the CUDA context.
- A grid's y and z end at 65535.
"""

import os

import torch
from torch import Tensor

from scaledot.backends.inputs import Inputs, Wanted
from scaledot.backends.layout import is_aligned, is_regular, new_strides
from scaledot.problem import Settings

CUDNN_TILE = 128  # rows and keys
CUDNN_WIDTHS = range(64, 257, 8)
CUDNN_SINCE = 90501  # dO need not have the strides of out, and widths up to 256
FLASH_WIDTHS = range(8, 257, 8)
MAX_GRID = 65535
ALIGNED_STRIDE = 8  # elements of two bytes


def serves(inputs: Inputs, settings: Settings, lse: Tensor, wanted: Wanted) -> str | None:
    """Which kernel may compute the gradients, "cudnn" or "flash"; None: neither.

    Decided from shapes, layouts and settings alone, so nothing waits for the GPU.
    """
    query, key, value = inputs.query, inputs.key, inputs.value
    if value is None or not query.is_cuda or any(wanted):
        return None
    if torch.are_deterministic_algorithms_enabled():
        return None
    if not _is_plain(inputs, settings) or not _fits(query, key, value, lse):
        return None
    capability = torch.cuda.get_device_capability(query.device)
    if _cudnn_serves(query, key, value, settings, capability):
        return "cudnn"
    if _flash_serves(query, key, settings, capability):
        return "flash"
    return None


def backward(
    which: str, inputs: Inputs, settings: Settings, grad_out: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv by the kernel that `serves` named."""
    query, key, value = inputs.query, inputs.key, inputs.value
    assert value is not None
    out, grad_out = _laid_out_like(query, out), _laid_out_like(query, grad_out)
    lse = lse.contiguous()
    queries, keys, causal = query.shape[2], key.shape[2], settings.right == 0
    if which == "cudnn":
        unused = torch.empty((), dtype=torch.int64, device=query.device)
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            grad_out,
            query,
            key,
            value,
            out,
            lse.unsqueeze(-1),  # [B, H, Q, 1] since torch 2.9
            unused,  # philox_seed
            unused,  # philox_offset
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
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
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


def _is_plain(inputs: Inputs, settings: Settings) -> bool:
    """softmax(scale q.k) v over all keys, or causal: nothing that only we know."""
    return (
        all(tensor is None for tensor in inputs[3:])
        and settings.dropout_p == 0.0
        and not settings.log_n
        and not settings.softcap
        and settings.scale > 0.0
        and settings.left is None
        and settings.right in (None, 0)
    )


def _fits(query: Tensor, key: Tensor, value: Tensor, lse: Tensor) -> bool:
    """What both kernels ask of types, shapes and layouts."""
    batch, heads, _, width = query.shape
    groups = key.shape[1]
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and lse.dtype == torch.float32
        and query.numel() > 0
        and key.numel() > 0
        and value.shape[-1] == width
        and heads % groups == 0
        and batch * heads <= MAX_GRID
        and all(_fits_plan(tensor) for tensor in (query, key, value))
    )


def _fits_plan(tensor: Tensor) -> bool:
    """Also strides of dimensions with one entry reach the plan, which keeps them in 32 bits."""
    *steps, _ = tensor.stride()
    aligned = all(step % ALIGNED_STRIDE == 0 for step in steps)
    return is_regular(tensor) and aligned and max(tensor.stride()) < 2**31


def _is_square(query: Tensor, key: Tensor) -> bool:
    return query.shape[2] == key.shape[2]


def _cudnn_serves(
    query: Tensor, key: Tensor, value: Tensor, settings: Settings, capability: tuple[int, int]
) -> bool:
    top_left = not settings.bottom_right  # as cuDNN's causal mask
    return (
        capability[0] == 9
        and query.shape[-1] in CUDNN_WIDTHS
        and query.shape[2] % CUDNN_TILE == 0
        and key.shape[2] % CUDNN_TILE == 0
        and (settings.right is None or top_left or _is_square(query, key))
        and torch.backends.cuda.cudnn_sdp_enabled()
        and (torch.backends.cudnn.version() or 0) >= CUDNN_SINCE
        # This switch lays lse out another way.
        and os.environ.get("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "0") == "0"
    )


def _flash_serves(
    query: Tensor, key: Tensor, settings: Settings, capability: tuple[int, int]
) -> bool:
    return (
        capability[0] >= 8
        and query.shape[-1] in FLASH_WIDTHS
        and (settings.right is None or _is_square(query, key))  # its causal mask is bottom-right
        and torch.backends.cuda.flash_sdp_enabled()
    )


def _laid_out_like(query: Tensor, tensor: Tensor) -> Tensor:
    """The same numbers with the strides that a new tensor like the query has."""
    assert tensor.shape == query.shape
    alike = tensor.stride() == new_strides(query.shape, query.stride())
    if alike and tensor.dtype == query.dtype and is_aligned(tensor):
        return tensor
    return torch.empty_like(query).copy_(tensor)
