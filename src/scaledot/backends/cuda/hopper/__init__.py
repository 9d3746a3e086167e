"""The backend for Hopper GPUs (H100, H200): one Gluon kernel, vitals in the same pass."""

import functools
from types import ModuleType

import torch
from torch import Tensor

from scaledot.backends import operators
from scaledot.backends.cuda import backend
from scaledot.backends.inputs import Inputs
from scaledot.measure import Result
from scaledot.problem import Problem, Settings

name = "hopper"

GLUON_VERSIONS = ((3, 6),)  # Gluon is experimental: its names change with each release
WIDTHS = range(8, 257, 8)
MOST_TOKENS = 2**30  # positions are int32 in the kernel

# Moments of the logits come from Gram matrices from so many keys on, by the padded width: with
# values, and for scores alone. The matrices take as long for each token, however many keys it sees;
# sums inside the pass some 10 % of its time. None: at no length.
GRAM_WHOLE = {64: (2048, 1024), 128: (4096, 4096), 256: (16384, 8192)}  # whole_moments.py
GRAM_EDGES = {64: (8192, 8192), 128: (16384, 8192), 256: (None, None)}  # moments.py
GRAM_FROM_QUERIES = 1024  # the matrices cost the same for one query


def refuses(problem: Problem) -> str | None:
    """Why this backend cannot serve the problem, None when it can."""
    query, key, value = problem.query, problem.key, problem.value
    settings, device = problem.settings, problem.query.device
    if device.type != "cuda":
        return f"the tensors are on {device}, not on a GPU"
    if backend.TRITON is None:
        return "triton is not installed: pip install triton"
    if backend.TRITON not in GLUON_VERSIONS:
        return "its kernel is written for the Gluon of triton 3.6"
    if not backend.is_hopper(device.index):
        return "the GPU is not a Hopper GPU (compute capability 9.0)"
    if query.dtype not in (torch.bfloat16, torch.float16):
        return "it computes bfloat16 and float16"
    if problem.mask is not None or problem.weight is not None:
        return "it has no mask tensor and no additive score"
    if settings.dropout_p > 0.0 and value is not None:
        return "it has no dropout"
    if settings.softcap and (settings.log_n or problem.head_scale is not None):
        return "it has a softcap with a plain scale only"
    if settings.softcap and problem.wants_vitals:
        return "it has no vitals of a softcap"
    fits = query.shape[-1] in WIDTHS and (value is None or value.shape[-1] in WIDTHS)
    if not fits:
        return "widths must be multiples of 8 up to 256"
    if not (query.numel() and key.numel()):
        return "an empty tensor"
    if max(query.shape[2], key.shape[2]) > MOST_TOKENS:
        return "its positions end at 2^30"
    return None


def how(problem: Problem) -> str:
    what = "scores only" if problem.value is None else "one pass"
    return f"the Gluon kernel for Hopper, {what}"


def attend(problem: Problem) -> Result:
    inputs = operators.inputs_of(problem)
    return engine.attend(inputs, problem.settings, problem.wants_vitals, problem.per_row)


def _forward(
    inputs: Inputs, settings: Settings, out: Tensor | None, wants_vitals: bool, per_row: bool
) -> operators.Measured:
    summed = _moments_in_the_pass(inputs, settings) if wants_vitals else "none"
    return _kernels().forward(inputs, settings, out, wants_vitals, per_row, summed)


@functools.cache
def _kernels() -> ModuleType:
    """Imported when they are needed: triton may not be installed."""
    from scaledot.backends.cuda.hopper import forward

    return forward


def _moments_in_the_pass(inputs: Inputs, settings: Settings) -> str:
    """Of which keys, see `launch.forward`."""
    queries, (keys, width) = inputs.query.shape[2], inputs.key.shape[2:]
    if settings.left is not None or inputs.cu_seqlens_q is not None or queries < GRAM_FROM_QUERIES:
        return "all"
    whole = settings.right is None and inputs.key_lengths is None
    padded = 64 if width <= 64 else 128 if width <= 128 else 256
    enough = (GRAM_WHOLE if whole else GRAM_EDGES)[padded][inputs.value is None]
    if enough is None or keys < enough:
        return "all"
    return "none" if whole else "edges"


engine = operators.define("hopper", _forward, backend.backward, ("CUDA",), backend.backward_of_part)
