"""The tiled CPU backend: every argument, every vital sign, memory bounded by a tile."""

import torch

from scaledot.backends.cpu import native, ops
from scaledot.backends.inputs import Inputs
from scaledot.measure import Result
from scaledot.problem import Problem

name = "cpu"


def refuses(problem: Problem) -> str | None:
    """Why this backend cannot serve the problem, None when it can."""
    if problem.query.device.type not in ("cpu", "meta"):
        return f"the tensors are on {problem.query.device}, not on a CPU"
    return None


def how(problem: Problem) -> str:
    """Which of its two engines serves a call of finite numbers."""
    reason = native.refuses(problem, problem.settings)
    if reason is None:
        return "one compiled pass"
    return f"tiles of torch operators: {reason}"


def attend(problem: Problem) -> Result:
    seed = None
    if problem.settings.dropout_p > 0.0 and problem.value is not None:
        seed = torch.randint(2**62, (), dtype=torch.int64, device=problem.query.device)
    inputs = Inputs(
        query=problem.query,
        key=problem.key,
        value=problem.value,
        mask=problem.mask,
        head_scale=problem.head_scale,
        sinks=problem.sinks,
        weight=problem.weight,
        key_lengths=problem.key_lengths,
        cu_seqlens_q=problem.cu_seqlens_q,
        cu_seqlens_k=problem.cu_seqlens_k,
        seed=seed,
    )
    return ops.attend(inputs, problem.settings, problem.wants_vitals, problem.per_row)
