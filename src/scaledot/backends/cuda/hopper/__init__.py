"""The backend for Hopper GPUs (H100, H200): one Gluon kernel, vitals in the same pass."""

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

# Gram matrices give the logits' moments where every row sees every key. They take as long for each
# token, however many keys it sees; sums inside the pass a tenth of its time (docs/kernels.md).
GRAM_FROM_KEYS = 8192
GRAM_WIDTHS = range(8, 129, 8)


def refuses(problem: Problem) -> str | None:
    """Why this backend cannot serve the problem, None when it can."""
    query, key, value = problem.query, problem.key, problem.value
    settings = problem.settings
    if query.device.type != "cuda":
        return f"the tensors are on {query.device}, not on a GPU"
    if backend.TRITON is None:
        return "triton is not installed: pip install triton"
    if backend.TRITON not in GLUON_VERSIONS:
        return "its kernel is written for the Gluon of triton 3.6"
    if not backend.is_hopper(query.device.index):
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
    widths = {query.shape[-1], query.shape[-1] if value is None else value.shape[-1]}
    if not all(width in WIDTHS for width in widths):
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
    from scaledot.backends.cuda.gram import head_moments
    from scaledot.backends.cuda.hopper import launch

    by_gram = wants_vitals and _by_gram(inputs, settings)
    lse, rows, squares = launch.forward(inputs, settings, out, wants_vitals, not by_gram)
    moments = None
    if by_gram:  # after the long kernel: while it runs, the short ones are queued
        moments = head_moments(inputs.query, inputs.key, settings.scale, inputs.head_scale)
    return backend.measured(lse, rows, inputs, settings, moments, squares, wants_vitals, per_row)


def _by_gram(inputs: Inputs, settings: Settings) -> bool:
    everything_is_seen = (
        settings.left is None
        and settings.right is None
        and inputs.key_lengths is None
        and inputs.cu_seqlens_q is None
    )
    keys, width = inputs.key.shape[2:]
    long = keys >= GRAM_FROM_KEYS and width in GRAM_WIDTHS
    return everything_is_seen and long and not settings.log_n


engine = operators.define("hopper", _forward, backend.backward, ("CUDA",))
