"""The CPU's engines behind one pair of operators, `scaledot::cpu_forward` and its backward."""

import functools

from torch import Tensor

from scaledot.backends import operators
from scaledot.backends.cpu import flash
from scaledot.backends.cpu.backward import backward as run_backward
from scaledot.backends.cpu.forward import forward as run_forward
from scaledot.backends.inputs import Gradients, Inputs, Wanted
from scaledot.problem import Settings


def _forward(
    inputs: Inputs, settings: Settings, out: Tensor | None, wants_vitals: bool, per_row: bool
) -> operators.Measured:
    place = None if out is None else out.zero_()
    found = run_forward(inputs, settings, place, wants_vitals, per_row)
    return operators.Measured(found.lse, found.floats, found.counts, found.rows)


def _backward(
    inputs: Inputs,
    settings: Settings,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    wanted: Wanted,
    whole: bool = True,
) -> Gradients:
    if not any(wanted) and flash.can_serve_backward(inputs, settings):
        grads = flash.backward(inputs, settings, grad_out, out, lse)
        return Gradients(*grads, *[None] * len(wanted))
    return run_backward(inputs, settings, grad_out, out, lse, wanted, whole)


engine = operators.define(
    "cpu", _forward, _backward, ("CPU",), functools.partial(_backward, whole=False)
)
