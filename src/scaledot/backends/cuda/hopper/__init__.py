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

# From so many keys on, moments of whole blocks of keys come from Gram matrices (moments.py). Those
# take as long for each token, however many keys it sees; sums inside the pass a tenth of its time.
GRAM_FROM_KEYS = 8192  # twice as many where a row sees half of them
GRAM_FROM_QUERIES = 1024  # the matrices cost the same for one query
GRAM_WIDEST = 128


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
    from scaledot.backends.cuda import moments
    from scaledot.backends.cuda.hopper import launch

    summed = _moments_in_the_pass(inputs, settings)
    block = moments.block_for(inputs.key.shape[2], summed)
    lse, rows, squares, tile_rows = launch.forward(
        inputs, settings, out, wants_vitals, summed, block
    )
    if wants_vitals and summed != "all":
        # After the long kernel: while it runs, the short ones are queued.
        moments.add_blocks(rows, inputs, settings, block, tile_rows)
    return backend.measured(lse, rows, inputs, squares, wants_vitals, per_row)


def _moments_in_the_pass(inputs: Inputs, settings: Settings) -> str:
    """Of which keys, see `launch.forward`."""
    queries, (keys, width) = inputs.query.shape[2], inputs.key.shape[2:]
    from_the_first_key = settings.left is None and inputs.cu_seqlens_q is None
    to_the_last = settings.right is None and inputs.key_lengths is None
    enough = GRAM_FROM_KEYS if to_the_last else 2 * GRAM_FROM_KEYS
    many = keys >= enough and queries >= GRAM_FROM_QUERIES
    if not from_the_first_key or not many or width > GRAM_WIDEST:
        return "all"
    return "none" if to_the_last else "edges"


engine = operators.define("hopper", _forward, backend.backward, ("CUDA",))
