"""What both GPU backends share: when they can run at all, the vitals after the pass, gradients."""

import functools
import importlib.metadata
import importlib.util
import os

import torch
from torch import Tensor

from scaledot.backends.cuda import peer_backward
from scaledot.backends.inputs import Gradients, Inputs, Wanted
from scaledot.backends.operators import LaidOut, Measured
from scaledot.measure import ROW_FIELDS
from scaledot.problem import Problem, Settings


def _triton_version() -> tuple[int, int] | None:
    """None where triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    major, minor = importlib.metadata.version("triton").split(".")[:2]
    return int(major), int(minor)


TRITON = _triton_version()


def interprets() -> bool:
    """Whether Triton runs its kernels on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def refuses_device(problem: Problem) -> str | None:
    """Why no kernel of ours can run on the device of the problem, None when one can."""
    kind = problem.query.device.type
    if kind != "cuda" and not (kind in ("cpu", "meta") and interprets()):
        return f"the tensors are on {problem.query.device}, not on a GPU"
    if TRITON is None:
        return "triton is not installed: pip install triton"
    return None


def measured(
    lse: Tensor,
    statistics: Tensor,
    inputs: Inputs,
    wants_vitals: bool,
    per_row: bool,
    squares: Tensor | None = None,
    key_squares: Tensor | None = None,
    soon: bool = False,
) -> Measured:
    """The vitals from the rows' planes, all on the GPU. squares and others: see `summarise`."""
    if not wants_vitals:
        return Measured(lse)
    from scaledot.backends.cuda.summary import summarise

    floats, counts = summarise(statistics, inputs, squares, key_squares, soon)
    rows = statistics[: len(ROW_FIELDS)].clone() if per_row else None
    return Measured(lse, floats, counts, rows)


def backward(
    inputs: Inputs,
    settings: Settings,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    wanted: Wanted,
    whole: bool = True,
) -> Gradients:
    """Compute the gradients by torch's kernels where they are right and fast, else by our own.

    whole=False: lse and out are of more keys than these.
    """
    if inputs.weight is not None:
        from scaledot.backends.cuda.additive import backward as additive

        return additive.backward(inputs, settings, grad_out, out, lse, wanted)
    which = peer_backward.serves(inputs, settings, lse, wanted)
    if which is not None:
        grads = peer_backward.backward(which, inputs, settings, grad_out, out, lse)
        kind = LaidOut if which == "cudnn" else Gradients
        return kind(*grads, None, None, None, None)
    from scaledot.backends.cuda import backward as dot

    return dot.backward(inputs, settings, grad_out, out, lse, wanted, whole=whole)


backward_of_part = functools.partial(backward, whole=False)


def overlaps(device: torch.device) -> bool:
    """Whether a launch may begin there before the one before it ends (launching.enter)."""
    return device.type == "cuda" and _capability(device.index) >= (9, 0)


def is_hopper(device: int) -> bool:
    return _capability(device) == (9, 0)


@functools.cache
def _capability(device: int) -> tuple[int, int]:
    """(0, 0) of AMD's, which count otherwise: an MI200 calls itself 9.0, as a Hopper does."""
    return (0, 0) if torch.version.hip else torch.cuda.get_device_capability(device)


# What torch.compiler.assume_constant_result does, without importing the compiler for it.
is_hopper._dynamo_marked_constant = True  # type: ignore[attr-defined]
