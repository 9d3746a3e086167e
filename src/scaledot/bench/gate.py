"""The correctness gate: no time is taken of a function that computes something else.

Output and vitals are held against the plain formula in float64. Allowed is twice the sum of the
error that this formula makes in the type of the case and of rounding. Every call runs in full; of
many heads the first and the last are compared.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from scaledot.bench import peers
from scaledot.bench.cases import Case, Contender
from scaledot.bench.workload import Answer, Inputs, Workload
from scaledot.measure import COUNT_FIELDS, FLOAT_FIELDS, Vitals

BLOCK_ELEMENTS = 2**23  # of the dense float64 computation: 64 MiB a matrix
FLOATS = (*FLOAT_FIELDS, "passes")
COUNTS = ("rows", "pairs", "nonfinite")
LIKE_A_LOGIT = {"max_logit", "logit_mean", "logit_std", "row_std", "entropy_ratio", "passes"}

Formula = Callable[[Inputs, int], Answer]


class Subject(NamedTuple):
    """What is examined; several cases may share it."""

    contender: Contender
    workload: Workload


class Check(NamedTuple):
    """One compared field: the largest error over heads and entries, and what is allowed."""

    contender: str
    shape: str
    causal: bool
    field: str
    error: float
    bound: float

    @property
    def holds(self) -> bool:
        return self.error <= self.bound  # False for NaN

    @property
    def used(self) -> float:
        """How much of the bound the error uses up; counts allow none."""
        return self.error / self.bound if self.bound else math.inf if self.error else 0.0


def subjects(cases: Iterable[Case]) -> list[Subject]:
    return list(dict.fromkeys(Subject(case.ours, case.workload) for case in cases))


def examine(subject: Subject) -> list[Check]:
    """Every field that the contender hands back."""
    contender, workload = subject
    inputs = workload.make()
    heads = sorted({0, workload.heads - 1})
    answer = _of_heads(contender.attend(inputs), heads)
    query, key, value = (tensor[:, heads] for tensor in inputs[:3])
    some = inputs._replace(query=query, key=key, value=value)
    formula = peers.plain_additive if workload.additive else peers.plain
    exact, eager = _by_blocks(formula, _double(some)), _by_blocks(formula, some)
    eps = torch.finfo(inputs.query.dtype).eps

    errors: list[tuple[str, float, float]] = []
    if answer.out is not None:
        assert exact.out is not None
        assert eager.out is not None
        rounding = eps * _largest(some.value)
        errors.append(("out", *_compare(answer.out, exact.out, eager.out, rounding)))
    if answer.vitals is not None:
        assert exact.vitals is not None
        assert eager.vitals is not None
        reach = _reach(some)
        for name in FLOATS:
            got, want, plain = (
                getattr(v, name) for v in (answer.vitals, exact.vitals, eager.vitals)
            )
            errors.append((name, *_compare(got, want, plain, eps * _scale(name, want, reach))))
        for name in COUNTS:
            got, want = getattr(answer.vitals, name), getattr(exact.vitals, name)
            errors.append((name, _error(got, want), 0.0))
    return [Check(contender.name, workload.shape, workload.causal, *error) for error in errors]


def _compare(got: Tensor, exact: Tensor, eager: Tensor, rounding: float) -> tuple[float, float]:
    """The error, and twice the sum of the plain formula's own and rounding."""
    return _error(got, exact), 2 * (_error(eager, exact) + rounding)


def _scale(name: str, exact: Tensor, reach: float) -> float:
    """By how many eps a field may move when every logit rounds: reach is the size of a logit."""
    if name in LIKE_A_LOGIT:
        return reach
    if name == "entropy":
        return reach + _largest(exact)
    return reach * _largest(exact)  # probabilities and sizes round relative to themselves


def _reach(inputs: Inputs) -> float:
    """The largest sum of absolute terms that a logit can be made of, by Cauchy and Schwarz."""
    longest = [tensor.norm(dim=-1).max().item() for tensor in (inputs.query, inputs.key)]
    return max(1.0, longest[0] * longest[1] * inputs.query.shape[-1] ** -0.5)


def _by_blocks(formula: Formula, inputs: Inputs) -> Answer:
    """The dense formula, some rows at a time: n = 16384 would need gigabytes at once."""
    queries, keys, width = inputs.query.shape[-2], *inputs.key.shape[-2:]
    row_elements = inputs.query.shape[1] * keys * (1 if inputs.weight is None else width)
    rows = max(1, BLOCK_ELEMENTS // row_elements)
    answers = [
        formula(inputs._replace(query=inputs.query[:, :, first : first + rows]), first)
        for first in range(0, queries, rows)
    ]
    out = torch.cat([answer.out for answer in answers if answer.out is not None], dim=-2)
    vitals = [answer.vitals for answer in answers if answer.vitals is not None]
    return Answer(out, functools.reduce(Vitals.merge, vitals) if vitals else None)


def _double(inputs: Inputs) -> Inputs:
    query, key, value = (tensor.double() for tensor in inputs[:3])
    weight = None if inputs.weight is None else inputs.weight.double()
    return Inputs(query, key, value, weight, inputs.causal)


def _of_heads(answer: Answer, heads: list[int]) -> Answer:
    out = None if answer.out is None else answer.out[:, heads]
    if answer.vitals is None:
        return Answer(out, None)
    fields = (*FLOAT_FIELDS, *COUNT_FIELDS)
    return Answer(out, Vitals(**{name: getattr(answer.vitals, name)[:, heads] for name in fields}))


def _error(got: Tensor, exact: Tensor) -> float:
    """The largest difference; infinite where the shapes differ."""
    if got.shape != exact.shape:
        return math.inf
    return _largest(got.double() - exact.double())


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item()
