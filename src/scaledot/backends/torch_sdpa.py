"""Serve a call by torch's own scaled_dot_product_attention, wherever that is right.

Where it errs on a CPU (torch 2.13), this backend refuses: a NaN query over fewer than 16 keys, and
one of -inf, comes out as zeros; hidden keys and values that are not finite leak into the rows that
cannot see them; causal with a scale of zero or below is NaN; gradients lose their digits far from
logits of 0.

On a GPU it serves short sequences on Hopper, where cuDNN is done before our kernel, and only
shapes that leave cuDNN no padding: its padded tiles, odd strides and misaligned addresses are where
its errors were found (pytorch#196678 and others). It serves nothing there that will be
differentiated: torch keeps cuDNN's plans by the strides of q, k and v alone, and a second gradient
of another layout would be read by the first one's (cuda/peer_backward.py keeps plans of its own).

While a program is exported there is no data to look at, and its file should run where scaledot is
not installed. So every call that torch's function can express then leaves torch's operator behind.
"""

import math

import torch
from torch import _C, Tensor

from scaledot.backends import derivatives, torch_flash
from scaledot.backends.layout import is_regular
from scaledot.backends.logit_bound import TORCH_IS_RIGHT_TO, within
from scaledot.measure import Result
from scaledot.problem import FLOAT_TYPES, Problem

name = "torch"

PLAIN_TENSORS = (Tensor, torch.nn.Parameter)  # not fake, not a subclass that traces

CUDNN_WIDTHS = (64, 128, 256)
CUDNN_TILE = 128  # rows and keys
MAX_GRID = 65535
# Keys from which our kernel is faster: measured with so many rows, which keep all of the GPU busy.
OURS_FROM, MANY_ROWS = 1024, 131072


def refuses(problem: Problem) -> str | None:
    """Why this backend cannot serve the problem, None when it can."""
    query, key, value, mask, head_scale, sinks, weight, key_lengths, cu_seqlens, *_ = problem
    settings = problem.settings
    if problem.wants_vitals or value is None:
        return "it returns no vitals"
    written_down = _is_written_down()
    if not written_down and not _has_data(query, key, value):
        # Nor may a length be asked for, which is a symbol here: the answer would fix the graph.
        return "NaN and inf cannot be ruled out before the call runs"
    if settings.softcap or settings.log_n:
        return "it has no softcap and no log_n scale"
    if sinks is not None or head_scale is not None:
        return "it has no learned sinks and no scale per head"
    if weight is not None or cu_seqlens is not None:
        return "it has no additive score and no packed sequences"
    if key_lengths is not None or settings.left is not None:
        return "it has no window and no key lengths"
    if settings.right is not None and not _is_plain_causal(problem):
        return "its causal mask is top-left only, and wrong for a scale of zero or below"
    if written_down:
        return _mask_reason(problem)
    if settings.dropout_p:
        return "it draws dropout over a full matrix"
    if mask is not None:
        return "it makes a full copy of a mask, and NaN in masked keys leaks"
    if query.shape[1] != key.shape[1] or query.shape[-1] != value.shape[-1]:
        return "grouped heads and a value width of its own take its slow path"
    if not (query.numel() and key.numel()):
        return "an empty tensor"
    if query.stride(-1) != 1 or key.stride(-1) != 1 or value.stride(-1) != 1:
        return "a last dimension with a stride takes its slow path"
    if _C._are_functorch_transforms_active():
        return "its kernel has no batching rule"
    if derivatives.in_forward_mode():
        return "its kernel cannot push tangents forward"
    if query.is_cuda:
        return _gpu_reason(query, key, value, settings.scale)
    if not query.is_cpu:
        return f"its kernels for {query.device.type} are not vetted"
    return _data_reason(query, key, value, settings.scale, settings.right is not None)


def how(problem: Problem) -> str:
    return "torch.nn.functional.scaled_dot_product_attention"


def exporting() -> bool:
    """Tell whether torch.export traces this line. Dynamo runs the function instead of reading it:

    to torch 2.11's, `is_exporting` itself is true whatever it traces for.
    """
    return torch.compiler.is_exporting()


# What torch.compiler.assume_constant_result does, without importing the compiler for it.
exporting._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_written_down() -> bool:
    """Tell whether the call goes into a file: by torch.export, torch.onnx or torch.jit.trace."""
    if torch.compiler.is_compiling():
        return exporting()
    return _C._get_tracing_state() is not None


def _has_data(*tensors: Tensor) -> bool:
    """Tell whether the numbers in these tensors can be looked at: nobody traces what is done."""
    return (
        not torch.compiler.is_compiling()
        and not _C._len_torch_dispatch_stack()
        and all([type(tensor) in PLAIN_TENSORS for tensor in tensors])
    )


def _mask_reason(problem: Problem) -> str | None:
    mask = problem.mask
    if mask is None:
        return None
    if problem.settings.right is not None:
        return "it takes a mask or is_causal, not both"
    if mask.dtype not in (torch.bool, torch.float32, problem.query.dtype):
        return f"it takes no {mask.dtype} mask for a query of {problem.query.dtype}"
    return None


def straight(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor | None:
    """The call that most calls are, without a record of it; None: go the long way.

    A record, its checks and the choice of a backend cost more than torch's kernel on tiny tensors.
    """
    if (
        torch.compiler.is_compiling()
        or type(query) is not Tensor
        or type(key) is not Tensor
        or type(value) is not Tensor
        or not (query.layout is key.layout is value.layout is torch.strided)
        or query.is_nested
        or key.is_nested
        or value.is_nested
        or _C._len_torch_dispatch_stack()
        or _C._are_functorch_transforms_active()
        or _C._get_tracing_state() is not None
    ):
        return None
    shape, key_shape = query.shape, key.shape
    if len(shape) != 4 or len(key_shape) != 4 or key_shape != value.shape:
        return None
    batch, heads, queries, width = shape
    if (
        key_shape[0] != batch
        or key_shape[1] != heads
        or key_shape[3] != width
        or not (batch and heads and queries and width and key_shape[2])
        or not (query.dtype is key.dtype is value.dtype and query.dtype in FLOAT_TYPES)
        or not (query.is_cpu and key.is_cpu and value.is_cpu)
        or not (query.stride(3) == key.stride(3) == value.stride(3) == 1)
        or torch.is_autocast_enabled("cpu")
        or derivatives.in_forward_mode()
        or _data_reason(query, key, value, width**-0.5, causal) is not None
    ):
        return None
    if torch_flash.is_needed(query, key, value):
        return torch_flash.attend(query, key, value, causal, width**-0.5)
    return _C._nn.scaled_dot_product_attention(query, key, value, is_causal=causal)


def attend(problem: Problem) -> Result:
    """Call torch's function itself: under its public name may stand ours, or a stranger's."""
    query, key, value, settings = problem.query, problem.key, problem.value, problem.settings
    assert value is not None
    causal = settings.right is not None
    if not _is_written_down() and torch_flash.is_needed(query, key, value):
        return Result(torch_flash.attend(query, key, value, causal, settings.scale))
    out = _C._nn.scaled_dot_product_attention(
        query,
        key,
        value,
        problem.mask,
        settings.dropout_p,
        causal,
        scale=settings.scale,
        enable_gqa=bool(query.shape[1] != key.shape[1]),  # torch.jit traces sizes as tensors
    )
    return Result(out)


def _is_plain_causal(problem: Problem) -> bool:
    settings = problem.settings
    square = problem.query.shape[-2] == problem.key.shape[-2]
    return settings.right == 0 and settings.scale > 0.0 and (square or not settings.bottom_right)


def _data_reason(
    query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool
) -> str | None:
    """Some errors depend on the data: look at no more of it than the error needs.

    Rows with an infinite logit, and with NaN over few keys, would come out as zeros; a causal call
    would spread what is broken in hidden keys and values.
    """
    differentiated = torch.is_grad_enabled() and _needs_gradient(query, key, value)
    if not causal:
        total = (query.sum() + key.sum()).item()
    elif query.shape == key.shape == value.shape:  # one look at all three
        total = torch.addcmul(value, query, key).sum().item()
    else:
        total = (query.sum() + key.sum() + value.sum()).item()
    if not -math.inf < total < math.inf:
        return "NaN or inf in the inputs: its kernel would hide or spread it"
    if differentiated and not within(query, key, scale, TORCH_IS_RIGHT_TO):
        return "logits may lie far from 0, where its gradients lose their digits"
    return None


def _gpu_reason(query: Tensor, key: Tensor, value: Tensor, scale: float) -> str | None:
    """Measured on an H200: benchmarks/results/gpu.csv."""
    if torch.version.hip or torch.cuda.get_device_capability(query.device) != (9, 0):
        return "its kernels for this GPU are not vetted"
    if scale <= 0.0:
        return "its kernels look for the largest score before they scale it"
    if query.dtype not in (torch.bfloat16, torch.float16) or query.shape[-1] not in CUDNN_WIDTHS:
        return "on a GPU it serves 16-bit types and widths of 64, 128 and 256"
    if query.shape[-2] % CUDNN_TILE or key.shape[-2] % CUDNN_TILE:
        return "cuDNN errs in padded tiles"
    if max(query.shape[0], query.shape[1]) > MAX_GRID or not all(
        map(is_regular, (query, key, value))
    ):
        return "cuDNN takes no such batch, address or stride"
    if torch.is_grad_enabled() and _needs_gradient(query, key, value):
        return "torch may read the output's gradient by the strides of an earlier one"
    rows = query.shape[0] * query.shape[1] * query.shape[2]
    if key.shape[-2] >= (OURS_FROM if rows >= MANY_ROWS else 2 * OURS_FROM):
        return "our kernel is faster from this length on"
    return None


def _needs_gradient(*tensors: Tensor) -> bool:
    return any(tensor.requires_grad for tensor in tensors)
