"""The tiled CPU backend: every argument, every vital sign, memory bounded by a tile."""

from scaledot.backends import operators
from scaledot.backends.cpu import native, ops
from scaledot.backends.cpu.masks import with_bool_mask
from scaledot.measure import Result
from scaledot.problem import Problem

name = "cpu"
engine = ops.engine


def refuses(problem: Problem) -> str | None:
    """Why this backend cannot serve the problem, None when it can."""
    if problem.query.device.type not in ("cpu", "meta"):
        return f"the tensors are on {problem.query.device}, not on a CPU"
    return None


def how(problem: Problem) -> str:
    """Which of its two engines serves a call of finite numbers."""
    problem = with_bool_mask(problem, problem.settings)
    reason = native.refuses(problem, problem.settings)
    if reason is None:
        return "one compiled pass"
    return f"tiles of torch operators: {reason}"


def attend(problem: Problem) -> Result:
    inputs = operators.inputs_of(problem)
    return engine.attend(inputs, problem.settings, problem.wants_vitals, problem.per_row)
