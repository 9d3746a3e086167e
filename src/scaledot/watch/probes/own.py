"""scaledot's own functions and modules.

Those that return vitals have measured already: the reading is free, and so it is inside a compiled
graph. Beside the others the vitals are computed, since the twin that returns both agrees with them
only within rounding; where the watch may replace, the twin is called.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scaledot import functional
from scaledot.measure import Vitals
from scaledot.problem import Problem
from scaledot.watch.probes import compiled, hub, in_graph
from scaledot.watch.probes.patch import Attribute, Swap, stands_for
from scaledot.watch.probes.replacing import KEPT, replaced
from scaledot.watch.probes.scores import Scores
from scaledot.watch.probes.seen import Seen, why_not

MEASURING = "scaledot's attention with vitals"
Attend = Callable[..., Tensor]


def probes() -> tuple[Any, ...]:
    # The function, what measures beside it, what does both, and what looks at it in a graph.
    families = (
        (
            functional.attention,
            functional.vitals,
            functional.attention_with_vitals,
            _look,
        ),
        (
            functional.attention_varlen,
            functional.vitals_varlen,
            functional.attention_varlen_with_vitals,
            _look_varlen,
        ),
        (
            functional.additive_attention,
            functional.additive_attention_with_vitals,
            functional.additive_attention_with_vitals,
            _look_additive,
        ),
    )
    return (
        Attribute(functional, "_with_vitals", _measured(functional._with_vitals)),
        Swap(*((family[0], _beside(*family)) for family in families)),
    )


def _measured(original: Callable[..., Any]) -> Callable[..., Any]:
    def with_vitals(problem: Problem, backend: str | None) -> tuple[Tensor, Vitals]:
        if torch.compiler.is_compiling():
            out, vitals = original(problem, backend)
            if problem.value is not None and compiled.tracing():
                in_graph.took(MEASURING, vitals)
            return out, vitals
        if not hub.wants():
            return original(problem, backend)
        with hub.quiet():
            out, vitals = original(problem, backend)
        if problem.value is not None:  # without values it is somebody's own measurement
            _offer(problem.query, lambda: vitals, MEASURING, measured=True)
        return out, vitals

    return with_vitals


def _beside(
    attend: Attend, measure: Callable[..., Any], twin: Callable[..., Any], look: Callable[..., None]
) -> Attend:
    signature = inspect.signature(attend)
    known = inspect.signature(measure).parameters
    kind = f"scaledot.{attend.__name__}"

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling():
            if compiled.tracing():
                if hub.replacing_in_graphs:
                    return twin(*args, **kwargs)[0]
                look(kind, *args, **kwargs)
            return attend(*args, **kwargs)
        if hub.replacing():
            query = kwargs["query"] if "query" in kwargs else args[0]
            out = replaced(query, lambda: twin(*args, **kwargs), kind)
            if out is not KEPT:
                return out
        if not hub.wants():
            return attend(*args, **kwargs)
        with hub.quiet():
            out = attend(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        given = {name: given[name] for name in given if name in known and name != "dropout_p"}

        def vitals() -> Vitals:
            measured = measure(**given)
            return measured if isinstance(measured, Vitals) else measured[1]

        def scores() -> Scores | None:
            return Scores(**given) if measure is functional.vitals else None

        _offer(given["query"], vitals, kind, source=scores)
        return out

    return stands_for(attend, attention)


def _offer(query: Tensor, measure: Callable[[], Vitals], kind: str, **more: Any) -> None:
    if reason := why_not(query):
        hub.cannot_see(kind, reason)
    else:
        hub.offer(Seen(query, measure, kind, **more))


# The functions' own arguments, traced; Dynamo knows no inspect.signature. ------------------------


def _look(
    kind: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *args: Any,
    backend: str | None = None,
    **kwargs: Any,
) -> None:
    in_graph.look(kind, query, key, attn_mask, *args, **kwargs)


def _look_varlen(
    kind: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    dropout_p: float = 0.0,
    backend: str | None = None,
    **kwargs: Any,
) -> None:
    packed = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    in_graph.look(kind, query, key, **packed, **kwargs)


def _look_additive(
    kind: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *args: Any,
    backend: str | None = None,
    **kwargs: Any,
) -> None:
    in_graph.look(kind, query, key, attn_mask, *args, weight=weight, **kwargs)
