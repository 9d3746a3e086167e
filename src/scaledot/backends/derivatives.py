"""Differentiate a call by its composed formula: second derivatives, and forward mode.

A kernel's backward pass is a node of the graph. What reaches this node when a gradient is
differentiated again is the formula's second derivative, computed here from the same tensors and
the same dropout; a call whose gradients are used once pays nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from scaledot.backends import composed, composed_vitals
from scaledot.backends.inputs import Gradients, Inputs
from scaledot.measure import Result
from scaledot.problem import Settings

DIFFERENTIABLE = len(Gradients._fields)  # the first tensors of a call, in the order of Gradients
assert Inputs._fields[:DIFFERENTIABLE] == Gradients._fields

# A forward operator, or a function with a rule for vmap; None where nothing is dropped out.
Run = Callable[..., Sequence[Tensor]] | None


def in_forward_mode() -> bool:
    """Tell whether tensors may carry tangents, which the kernels cannot push forward."""
    return forward_ad._current_level >= 0


def vjp(function: Callable[..., Any], *tensors: Any) -> tuple[Any, Callable[..., Any]]:
    """Return the function's value, and what pulls a gradient of it back to the tensors."""
    found: Any = torch.func.vjp(function, *tensors)
    return found


def is_last() -> bool:
    """Tell whether a backward pass needs no graph: nobody will differentiate its gradients."""
    return not torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()


def by_formula(run: Run, inputs: Inputs, settings: Settings, wants_vitals: bool) -> Result:
    """Serve a call by the formula: output and vitals differentiate, in forward mode too.

    The drops are those that `run` would make.
    """
    if inputs.value is None:
        out = inputs.query.new_empty(0)
    else:
        out = composed.attend(inputs, settings, kept(run, inputs, settings))
    return Result(out, *composed_vitals.measure(inputs, settings)) if wants_vitals else Result(out)


def gradients(
    run: Run, inputs: Inputs, settings: Settings, grad_out: Tensor
) -> list[Tensor | None]:
    """Compute the gradients by the formula, in the order of Gradients; they differentiate."""
    formula, places = _formula(run, inputs, settings)
    _, pull = vjp(formula, *[inputs[at] for at in places])
    return in_order(places, pull(grad_out))


def second_derivatives(
    run: Run,
    inputs: Inputs,
    settings: Settings,
    grad_out: Tensor,
    cotangents: Sequence[Tensor | None],
) -> tuple[list[Tensor | None], Tensor]:
    """Differentiate the gradients: return what each input gets, and what grad_out gets.

    cotangents: of the gradients, in the order of Gradients; None or empty where there is none.
    """
    formula, places = _formula(run, inputs, settings)
    asked = [n for n, at in enumerate(places) if _is_given(cotangents[at], inputs[at])]

    def first(grad_out: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        _, pull = vjp(formula, *tensors)
        grads = pull(grad_out)
        return tuple(grads[n] for n in asked)

    _, pull = vjp(first, grad_out, *[inputs[at] for at in places])
    of_grad_out, *of_tensors = pull(tuple(cotangents[places[n]] for n in asked))
    return in_order(places, of_tensors), of_grad_out


def _is_given(cotangent: Tensor | None, tensor: Any) -> bool:
    return cotangent is not None and cotangent.shape == tensor.shape


def _formula(
    run: Run, inputs: Inputs, settings: Settings
) -> tuple[Callable[..., Tensor], list[int]]:
    """Return the output as a function of the tensors that have a gradient, and their places."""
    places = places_of(inputs)
    keep = kept(run, inputs, settings)

    def formula(*tensors: Tensor) -> Tensor:
        return composed.attend(with_tensors(inputs, places, tensors), settings, keep)

    return formula, places


def places_of(inputs: Inputs) -> list[int]:
    """Find the tensors that have a gradient."""
    tensors = enumerate(inputs[:DIFFERENTIABLE])
    return [at for at, t in tensors if t is not None and t.is_floating_point()]


def with_tensors(inputs: Inputs, places: Sequence[int], tensors: Sequence[Tensor]) -> Inputs:
    changed: list[Any] = list(inputs)
    for at, tensor in zip(places, tensors, strict=True):
        changed[at] = tensor
    return Inputs._make(changed)


def in_order(places: Sequence[int], grads: Sequence[Tensor]) -> list[Tensor | None]:
    """Return one gradient for each tensor that can have one, None where there is none."""
    found: list[Tensor | None] = [None] * DIFFERENTIABLE
    for at, grad in zip(places, grads, strict=True):
        found[at] = grad
    return found


def kept(run: Run, inputs: Inputs, settings: Settings) -> Tensor | None:
    """Find what dropout multiplies each probability of a call by, [B, H, Q, K]; None: no dropout.

    An engine draws its numbers tile by tile, each in its own way, and stores none. So the engine
    itself is asked: where all scores are 0 and the values are columns of the identity, its output
    shows which pairs it kept. Hidden pairs come out as dropped.
    """
    value = inputs.value
    if run is None or settings.dropout_p == 0.0 or value is None or inputs.seed is None:
        return None
    keys, width = value.shape[-2:]
    neutral = inputs._replace(
        query=torch.zeros_like(inputs.query),
        key=torch.zeros_like(inputs.key),
        mask=None,
        head_scale=None,
        sinks=None,
        weight=None if inputs.weight is None else torch.zeros_like(inputs.weight),
    )
    plain = settings._replace(scale=1.0, log_n=False, softcap=0.0)
    rows = torch.arange(keys, device=value.device).unsqueeze(-1)
    parts = []
    for first in range(0, keys if width else 0, max(width, 1)):
        columns = torch.arange(first, first + width, device=value.device)
        ones = torch.zeros_like(value) + (rows == columns).to(value.dtype)
        found = run(*neutral._replace(value=ones), *plain, False, False)[0]
        parts.append(found[..., : keys - first] > 0)
    dtype = composed.compute_type(inputs.query)
    if not parts:
        return inputs.query.new_zeros((), dtype=dtype)
    share = 1.0 - settings.dropout_p
    return torch.cat(parts, -1).to(dtype) * (1.0 / share if share else 0.0)


def add(one: Sequence[Tensor | None], two: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Add two lists of gradients; None is nothing."""
    pairs = zip(one, two, strict=True)
    return [a if b is None else b if a is None else a + b for a, b in pairs]
