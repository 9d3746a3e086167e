"""scaledot's own functions and modules.

Those that return vitals have measured already: the reading is free. Beside the others the vitals
are computed, since the twin that returns both agrees with them only within rounding.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scaledot import functional
from scaledot.measure import Vitals
from scaledot.problem import Problem
from scaledot.watch.probes import compiled, hub
from scaledot.watch.probes.patch import Attribute, Swap
from scaledot.watch.probes.seen import Seen, why_not

MEASURING = "scaledot's attention with vitals"


def probes() -> tuple[Any, ...]:
    beside = (
        (functional.attention, functional.vitals),
        (functional.attention_varlen, functional.vitals_varlen),
        (functional.additive_attention, functional.additive_attention_with_vitals),
    )
    return (
        Attribute(functional, "_with_vitals", _measured(functional._with_vitals)),
        Swap(*((attend, _beside(attend, measure)) for attend, measure in beside)),
    )


def _measured(original: Callable[..., Any]) -> Callable[..., Any]:
    def with_vitals(problem: Problem, backend: str | None) -> tuple[Tensor, Vitals]:
        if torch.compiler.is_compiling():
            if compiled.tracing():
                compiled.cannot_see(MEASURING, "it is inside torch.compile")
            return original(problem, backend)
        if not hub.wants():
            return original(problem, backend)
        with hub.quiet():
            out, vitals = original(problem, backend)
        if problem.value is not None:  # without values it is somebody's own measurement
            _offer(problem.query, lambda: vitals, MEASURING)
        return out, vitals

    return with_vitals


def _beside(attend: Callable[..., Tensor], measure: Callable[..., Any]) -> Callable[..., Tensor]:
    signature = inspect.signature(attend)
    known = inspect.signature(measure).parameters
    kind = f"scaledot.{attend.__name__}"

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling():
            if compiled.tracing():
                compiled.cannot_see(kind, "it is inside torch.compile")
            return attend(*args, **kwargs)
        if not hub.wants():
            return attend(*args, **kwargs)
        with hub.quiet():
            out = attend(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        given = {name: given[name] for name in given if name in known and name != "dropout_p"}

        def vitals() -> Vitals:
            measured = measure(**given)
            return measured if isinstance(measured, Vitals) else measured[1]

        _offer(given["query"], vitals, kind)
        return out

    attention.__doc__ = attend.__doc__
    attention.__name__ = attend.__name__
    attention.__wrapped__ = attend  # type: ignore[attr-defined]
    return attention


def _offer(query: Tensor, measure: Callable[[], Vitals], kind: str) -> None:
    if reason := why_not(query):
        hub.cannot_see(kind, reason)
    else:
        hub.offer(Seen(query, measure, kind))
