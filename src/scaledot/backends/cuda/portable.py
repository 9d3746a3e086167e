"""The portable GPU backend: Triton kernels for every argument, type and GPU.

Under TRITON_INTERPRET=1 they run on CPU tensors too, where `backend="triton"` asks for them.
"""

from torch import Tensor

from scaledot.backends import operators
from scaledot.backends.cuda import backend
from scaledot.backends.inputs import Inputs
from scaledot.measure import Result
from scaledot.problem import Problem, Settings

name = "triton"


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
    from scaledot.backends.cuda import forward
    from scaledot.backends.cuda.additive import forward as additive

    if inputs.weight is not None:
        lse, rows = additive.forward(inputs, settings, out, wants_vitals)
    else:
        lse, rows = forward.forward(inputs, settings, out, wants_vitals)
    return backend.measured(lse, rows, inputs, None, wants_vitals, per_row)


engine = operators.define("triton", _forward, backend.backward, ("CUDA", "CPU"))
