"""Context-parallel attention: the public functions.

The ranks of `mesh` (a 1-D DeviceMesh or a process group) hold shards of the same sequences, cut
along the tokens; every rank calls with its own shard and gets its own rows back. Arguments mean
what they mean in `scaledot.attention` on the whole sequences; in addition

layout: "contiguous" (shards of any length, rank by rank) or "zigzag" (see layout.py: equal work
under a causal mask); cut with `scaledot.distributed.shard`.
method: "ring" (keys travel while the ranks compute) or "all_gather" (all keys to all ranks first).
lengths: tokens of every rank, where each rank knows them: saves the ranks from asking each other,
one small collective a call.

Forward and backward talk to the other ranks: all of them must make the same calls. A gradient of
`scale` or `sinks` is that of the rank's own rows: sum it over the mesh like any weight's.
"""

from typing import Any

import torch
from torch import Tensor

from scaledot import functional
from scaledot.distributed.call import Call, Lengths, call_of
from scaledot.distributed.function import Attend, as_inputs, compute_type, run, visible_keys
from scaledot.distributed.merging import merge_vitals
from scaledot.distributed.partial import Partial
from scaledot.functional import Scale, Window
from scaledot.measure import (
    Result,
    Vitals,
    are_differentiable,
    root_mean_square,
    summarise,
    vitals_from,
)
from scaledot.problem import Problem, describe


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mesh: Any,
    *,
    is_causal: bool = False,
    scale: Scale = None,
    enable_gqa: bool = False,
    window: Window = None,
    causal_align: str = "top_left",
    softcap: float | None = None,
    sinks: Tensor | None = None,
    num_heads: int | None = None,
    layout: str = "contiguous",
    method: str = "ring",
    lengths: Lengths = None,
    backend: str | None = None,
) -> Tensor:
    """The rank's rows [..., heads, Q, V] of attention over the whole sequence."""
    query, key, value = functional.autocast(query, key, value)
    problem = describe(
        query,
        key,
        value,
        None,
        0.0,
        is_causal,
        scale,
        enable_gqa,
        window=window,
        causal_align=causal_align,
        softcap=softcap,
        sinks=sinks,
        num_heads=num_heads,
    )
    return _attend(problem, call_of(problem, mesh, layout, method, lengths, backend))[0]


def attention_with_vitals(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mesh: Any,
    *,
    is_causal: bool = False,
    scale: Scale = None,
    enable_gqa: bool = False,
    window: Window = None,
    causal_align: str = "top_left",
    softcap: float | None = None,
    sinks: Tensor | None = None,
    num_heads: int | None = None,
    layout: str = "contiguous",
    method: str = "ring",
    lengths: Lengths = None,
    per_row: bool = False,
    merge: bool = True,
    backend: str | None = None,
) -> tuple[Tensor, Vitals]:
    """`attention`, and the vitals of the whole sequence, the same on every rank.

    merge=False: the vitals of the rank's own rows (over all keys; k_rms of its own keys), without a
    further collective; `Vitals.merge` and `merge_vitals` put ranks together. per_row: own rows.
    """
    query, key, value = functional.autocast(query, key, value)
    problem = describe(
        query,
        key,
        value,
        None,
        0.0,
        is_causal,
        scale,
        enable_gqa,
        window=window,
        causal_align=causal_align,
        softcap=softcap,
        sinks=sinks,
        num_heads=num_heads,
        wants_vitals=True,
        per_row=per_row,
    )
    out, partial = _attend(problem, call_of(problem, mesh, layout, method, lengths, backend))
    measured = _vitals(problem, partial)
    return out, merge_vitals(measured, mesh) if merge else measured


def vitals(
    query: Tensor,
    key: Tensor,
    mesh: Any,
    *,
    is_causal: bool = False,
    scale: Scale = None,
    enable_gqa: bool = False,
    window: Window = None,
    causal_align: str = "top_left",
    softcap: float | None = None,
    sinks: Tensor | None = None,
    num_heads: int | None = None,
    layout: str = "contiguous",
    method: str = "ring",
    lengths: Lengths = None,
    per_row: bool = False,
    merge: bool = True,
    backend: str | None = None,
) -> Vitals:
    """The vital signs alone, as `attention_with_vitals` gives them; only keys travel."""
    query, key = functional.autocast(query, key)
    problem = describe(
        query,
        key,
        None,
        None,
        0.0,
        is_causal,
        scale,
        enable_gqa,
        window=window,
        causal_align=causal_align,
        softcap=softcap,
        sinks=sinks,
        num_heads=num_heads,
        scores_only=True,
        wants_vitals=True,
        per_row=per_row,
    )
    call = call_of(problem, mesh, layout, method, lengths, backend)
    with torch.no_grad():
        query, scale_of_heads = _scaled(problem, call)
        partial = run(call, as_inputs(query, problem.key, None, scale_of_heads, problem.sinks))
    measured = _vitals(problem, partial)
    return merge_vitals(measured, mesh) if merge else measured


@torch.compiler.disable
def _attend(problem: Problem, call: Call) -> tuple[Tensor, Partial]:
    """A compiled graph breaks here: the ranks' messages are no operators."""
    assert problem.value is not None
    partials: list[Partial] = []
    query, head_scale = _scaled(problem, call)
    out = Attend.apply(call, partials, query, problem.key, problem.value, head_scale, problem.sinks)
    return functional.shaped(out, problem), partials[0]


def _scaled(problem: Problem, call: Call) -> tuple[Tensor, Tensor | None]:
    """log_n multiplies row i by ln(n_i), the keys of the whole sequence that it sees."""
    query = problem.query
    if problem.settings.log_n:
        factor = visible_keys(call, query.device).clamp(min=1).to(compute_type(query)).log()
        query = query * factor.unsqueeze(-1).to(query.dtype)
    return query, problem.head_scale


@torch.no_grad()
def _vitals(problem: Problem, partial: Partial) -> Vitals:
    """Of the rank's rows."""
    if are_differentiable() and problem.query.requires_grad:
        raise NotImplementedError(
            "vitals over ranks have no gradients: call attention_with_vitals outside of "
            "scaledot.measure.differentiable()"
        )
    query, key, dtype = problem.query.detach(), problem.key.detach(), partial.lse.dtype
    rows = partial.rows()
    key_rms, key_entries = root_mean_square(key, _norms(key, dtype))
    repeats = query.shape[1] // key.shape[1]
    floats, counts = summarise(
        rows,
        query,
        _norms(query, dtype),
        key_rms.repeat_interleave(repeats, 1),
        key_entries.repeat_interleave(repeats, 1),
    )
    planes = torch.stack([rows.max_logit, rows.lse, rows.entropy, rows.top_p, rows.sum_p2])
    planes = planes.masked_fill(rows.broken, float("nan"))
    result = Result(query, floats, counts, planes)
    return vitals_from(result, problem.lead, problem.lead if problem.per_row else None)


def _norms(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.linalg.vector_norm(tensor, dim=-1, dtype=dtype)
