"""The correctness gate: no time is taken of a function that computes something else.

Output and vitals are held against the plain formula in float64. Allowed is twice the sum of the
error that this formula makes in the type of the case and of rounding, for gradients three times.
Every call runs in full; of a batch and of many heads the first and the last are compared.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from scaledot.bench import peers
from scaledot.bench.cases import Case, Contender
from scaledot.bench.workload import Answer, Inputs, Workload
from scaledot.measure import COUNT_FIELDS, FLOAT_FIELDS, Vitals

BLOCK_ELEMENTS = 2**23  # of the dense float64 computation: 64 MiB a matrix
OUTPUT_SLACK, GRADIENT_SLACK = 2, 3
FLOATS = (*FLOAT_FIELDS, "passes")
COUNTS = ("rows", "pairs", "nonfinite")
GRADIENTS = ("query_grad", "key_grad", "value_grad")
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
    some, exact, eager = _truth(workload)
    answer = _corners(contender.attend(contender.prepare(workload.make())), workload)
    eps = torch.finfo(some.query.dtype).eps

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
    if answer.gradients is not None:
        assert exact.gradients is not None
        assert eager.gradients is not None
        trios = zip(answer.gradients, exact.gradients, eager.gradients, strict=True)
        for name, (got, want, plain) in zip(GRADIENTS, trios, strict=True):
            rounding = eps * _largest(want)
            errors.append((name, *_compare(got, want, plain, rounding, GRADIENT_SLACK)))
    return [Check(contender.name, workload.shape, workload.causal, *error) for error in errors]


class Truth(NamedTuple):
    """The corners of a workload: its inputs, the formula in float64 and in the case's type."""

    inputs: Inputs
    exact: Answer
    eager: Answer


@functools.lru_cache(maxsize=1)  # contenders of one workload are examined one after the other
def _truth(workload: Workload) -> Truth:
    inputs = workload.make()
    corner = _corner(workload)
    query, key, value = (tensor.detach()[corner] for tensor in inputs[:3])
    grad = None if inputs.grad is None else inputs.grad[corner]
    some = inputs._replace(query=query, key=key, value=value, grad=grad)
    formula = peers.plain_additive if workload.additive else peers.plain
    double = _double(some)
    exact, eager = _by_blocks(formula, double), _by_blocks(formula, some)
    if workload.backward:
        exact = exact._replace(gradients=_gradients(formula, double))
        eager = eager._replace(gradients=_gradients(formula, some))
    return Truth(some, exact, eager)


def _corner(workload: Workload) -> tuple[Tensor, Tensor]:
    """Indices of the first and last batch entry and head."""
    batch, heads = (sorted({0, count - 1}) for count in (workload.batch, workload.heads))
    return torch.tensor(batch)[:, None], torch.tensor(heads)[None, :]


def _compare(
    got: Tensor, exact: Tensor, eager: Tensor, rounding: float, slack: float = OUTPUT_SLACK
) -> tuple[float, float]:
    """The error, and a multiple of the sum of the plain formula's own and rounding."""
    return _error(got, exact), slack * (_error(eager, exact) + rounding)


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
    answers = [formula(block, first) for first, block in _blocks(inputs)]
    out = torch.cat([answer.out for answer in answers if answer.out is not None], dim=-2)
    vitals = [_single(answer.vitals) for answer in answers if answer.vitals is not None]
    return Answer(out, functools.reduce(Vitals.merge, vitals) if vitals else None)


def _single(vitals: Vitals) -> Vitals:
    """In float32 or better: a running mean in bfloat16 would err with the number of blocks."""
    dtype = torch.promote_types(vitals.entropy.dtype, torch.float32)
    wide = {name: getattr(vitals, name).to(dtype) for name in FLOAT_FIELDS}
    return dataclasses.replace(vitals, **wide)


def _gradients(formula: Formula, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """By autograd through the dense formula; what blocks add to a key is summed in float64."""
    query_grads = []
    key_grad = torch.zeros_like(inputs.key, dtype=torch.float64)
    value_grad = torch.zeros_like(inputs.value, dtype=torch.float64)
    for first, block in _blocks(inputs):
        leaves = [tensor.detach().requires_grad_() for tensor in block[:3]]
        query, key, value = leaves
        out = formula(block._replace(query=query, key=key, value=value), first).out
        assert out is not None
        of_query, of_key, of_value = torch.autograd.grad(out, leaves, block.grad)
        query_grads.append(of_query.double())
        key_grad += of_key
        value_grad += of_value
    return torch.cat(query_grads, dim=-2), key_grad, value_grad


def _blocks(inputs: Inputs) -> Iterator[tuple[int, Inputs]]:
    """Blocks of rows and the number of their first row."""
    batch, heads, queries, width = inputs.query.shape
    row_elements = batch * heads * inputs.key.shape[-2] * (1 if inputs.weight is None else width)
    rows = max(1, BLOCK_ELEMENTS // row_elements)
    for first in range(0, queries, rows):
        block = slice(first, first + rows)
        grad = None if inputs.grad is None else inputs.grad[:, :, block]
        yield first, inputs._replace(query=inputs.query[:, :, block], grad=grad)


def _double(inputs: Inputs) -> Inputs:
    query, key, value = (tensor.double() for tensor in inputs[:3])
    weight = None if inputs.weight is None else inputs.weight.double()
    grad = None if inputs.grad is None else inputs.grad.double()
    return Inputs(query, key, value, weight, inputs.causal, grad)


def _corners(answer: Answer, workload: Workload) -> Answer:
    corner = _corner(workload)
    out = None if answer.out is None else answer.out.detach()[corner]
    vitals = gradients = None
    if answer.vitals is not None:
        fields = (*FLOAT_FIELDS, *COUNT_FIELDS)
        vitals = Vitals(**{name: getattr(answer.vitals, name)[corner] for name in fields})
    if answer.gradients is not None:
        gradients = tuple(tensor[corner] for tensor in answer.gradients)
    return Answer(out, vitals, gradients)


def _error(got: Tensor, exact: Tensor) -> float:
    """The largest difference; infinite where the shapes differ."""
    if got.shape != exact.shape:
        return math.inf
    return _largest(got.double() - exact.double())


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item()
