"""The portable GPU backend: Triton kernels for every argument, type and GPU.

Under TRITON_INTERPRET=1 they run on CPU tensors too, where `backend="triton"` asks for them.
"""

import torch
from torch import Tensor

from scaledot.backends import operators
from scaledot.backends.cuda import backend
from scaledot.backends.inputs import Inputs
from scaledot.measure import Result
from scaledot.problem import Problem, Settings

name = "triton"

# Where every row sees every key, moments of the logits come from Gram matrices (whole_moments.py)
# from so many keys on, by the padded width: with values, and for scores alone. The matrices take as
# long for each token, however many keys there are, and for one query as for a thousand.
GRAM_FROM_KEYS = {64: (2048, 4096), 128: (4096, 8192), 256: (16384, 32768)}
GRAM_FROM_QUERIES = 1024


def refuses(problem: Problem) -> str | None:
    """Why this backend cannot serve the problem, None when it can."""
    return backend.refuses_device(problem)


def how(problem: Problem) -> str:
    score = "additive" if problem.weight is not None else "dot"
    return f"one Triton kernel, {score} scores"


def attend(problem: Problem) -> Result:
    inputs = operators.inputs_of(problem)
    return engine.attend(inputs, problem.settings, problem.wants_vitals, problem.per_row)


def _forward(
    inputs: Inputs, settings: Settings, out: Tensor | None, wants_vitals: bool, per_row: bool
) -> operators.Measured:
    from scaledot.backends.cuda import forward, whole_moments
    from scaledot.backends.cuda.additive import forward as additive

    if inputs.weight is not None:
        lse, rows = additive.forward(inputs, settings, out, wants_vitals)
        return backend.measured(lse, rows, inputs, wants_vitals, per_row)
    soon = wants_vitals and backend.overlaps(inputs.query.device)
    matrices = wants_vitals and _moments_from_matrices(inputs, settings)
    # What was read is kept to the end: a launch beside the pass must not get its memory.
    lse, (rows, squares, key_squares, read) = forward.forward(
        inputs, settings, out, wants_vitals, not matrices, let_next=soon
    )
    if matrices:
        key_squares = whole_moments.add_all(rows, read, settings, beside=soon)
    return backend.measured(lse, rows, read, wants_vitals, per_row, squares, key_squares, soon)


def _moments_from_matrices(inputs: Inputs, settings: Settings) -> bool:
    """Whether they can, and are faster than sums in the pass."""
    hiding = inputs.mask, inputs.key_lengths, inputs.cu_seqlens_q, settings.left, settings.right
    if any(each is not None for each in hiding) or settings.softcap:
        return False
    query, (keys, width) = inputs.query, inputs.key.shape[2:]
    sixteen_bits = query.dtype in (torch.bfloat16, torch.float16)
    if not (sixteen_bits and query.numel()) or width % 8 or width > 256:
        return False
    padded = 64 if width <= 64 else 128 if width <= 128 else 256
    enough = GRAM_FROM_KEYS[padded][inputs.value is None]
    return keys >= enough and query.shape[2] >= GRAM_FROM_QUERIES


engine = operators.define(
    "triton", _forward, backend.backward, ("CUDA", "CPU"), backend.backward_of_part
)
