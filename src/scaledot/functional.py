"""The public functions: describe the problem, choose a backend, run it.

Arguments mean what they mean in torch.nn.functional.scaled_dot_product_attention; ours come after
the star. `scale` is a number, a tensor of one value a head, or the name of a rule (scale.RULES).
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.jit import _builtins
from torch.overrides import handle_torch_function, has_torch_function

from scaledot import backends, nested
from scaledot.backends import torch_sdpa
from scaledot.measure import Vitals, vitals_from
from scaledot.problem import Problem, describe, is_causal_bias

Scale = float | str | Tensor | None
Window = tuple[int | None, int | None] | None
Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")


def overridable(function: Callable[Arguments, Returned]) -> Callable[Arguments, Returned]:
    """Make a function take part in torch's override protocol, as torch's own functions do.

    A TorchFunctionMode, or a tensor class with `__torch_function__`, is asked before it runs.
    """

    @functools.wraps(function)
    def public(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Returned:
        if has_torch_function(args) or (kwargs and has_torch_function(tuple(kwargs.values()))):
            # A CausalBias would make its like of the result; `describe` reads it as an argument.
            asked = tuple(x for x in (*args, *kwargs.values()) if not is_causal_bias(x))
            if has_torch_function(asked):
                return handle_torch_function(public, asked, *args, **kwargs)
        return function(*args, **kwargs)

    return public


@overridable
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Scale = None,
    enable_gqa: bool = False,
    *,
    window: Window = None,
    causal_align: str = "top_left",
    softcap: float | None = None,
    sinks: Tensor | None = None,
    key_lengths: Tensor | None = None,
    num_heads: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """softmax(scale * query key^T + bias) value, a drop-in for torch's function.

    query [..., heads, Q, D], key [..., heads, K, D], value [..., heads, K, V]; the result is
    [..., heads, Q, V].
    attn_mask: bool (True = may be seen) or a float bias, any shape that broadcasts to [..., Q, K].
    is_causal: row i sees keys up to the diagonal, which starts at (0, 0), or ends at the last key
    with causal_align="bottom_right". window=(left, right): keys seen on each side of that diagonal.
    softcap: scores are bent to softcap * tanh(score / softcap). sinks [heads]: the logit of one
    more outcome that takes probability and gives nothing. key_lengths [batch]: keys past it are
    hidden.
    A row that may see no key comes out as zeros. backend: force one by name, or raise.
    """
    if (
        attn_mask is scale is window is softcap is sinks is key_lengths is num_heads is None
        and backend is None
        and (type(dropout_p) is float or type(dropout_p) is int)
        and dropout_p == 0.0
        and type(causal_align) is str
        and causal_align == "top_left"
        and (is_causal is False or is_causal is True)
        and (enable_gqa is False or enable_gqa is True)
    ):
        out = torch_sdpa.straight(query, key, value, is_causal)
        if out is not None:
            return out
    if nested.is_nested(query):
        options = {
            "dropout_p": dropout_p,
            "is_causal": is_causal,
            "scale": scale,
            "enable_gqa": enable_gqa,
            "window": window,
            "causal_align": causal_align,
            "softcap": softcap,
            "sinks": sinks,
            "num_heads": num_heads,
            "backend": backend,
        }
        per_entry = {"attn_mask": attn_mask, "key_lengths": key_lengths}
        return nested.serve(attention, attention_varlen, (query, key, value), per_entry, options)
    query, key, value = autocast(query, key, value)
    problem = describe(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        window=window,
        causal_align=causal_align,
        softcap=softcap,
        sinks=sinks,
        key_lengths=key_lengths,
        num_heads=num_heads,
    )
    return shaped(backends.choose(problem, backend).attend(problem).out, problem)


# torch.jit.script cannot compile it: in a script it stands for torch's own operator.
_builtins._register_builtin(attention, "aten::scaled_dot_product_attention")


@overridable
def attention_with_vitals(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Scale = None,
    enable_gqa: bool = False,
    *,
    window: Window = None,
    causal_align: str = "top_left",
    softcap: float | None = None,
    sinks: Tensor | None = None,
    key_lengths: Tensor | None = None,
    num_heads: int | None = None,
    per_row: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Vitals]:
    """`attention`, and how healthy each head's softmax is, from the same pass.

    The vitals change nothing of the output, and carry no graph outside of
    `measure.differentiable()`. per_row=True adds one number a row.
    """
    if nested.is_nested(query):
        options = {
            "dropout_p": dropout_p,
            "is_causal": is_causal,
            "scale": scale,
            "enable_gqa": enable_gqa,
            "window": window,
            "causal_align": causal_align,
            "softcap": softcap,
            "sinks": sinks,
            "num_heads": num_heads,
            "per_row": per_row,
            "backend": backend,
        }
        per_entry = {"attn_mask": attn_mask, "key_lengths": key_lengths}
        return nested.serve(
            attention_with_vitals,
            attention_varlen_with_vitals,
            (query, key, value),
            per_entry,
            options,
        )
    query, key, value = autocast(query, key, value)
    problem = describe(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        window=window,
        causal_align=causal_align,
        softcap=softcap,
        sinks=sinks,
        key_lengths=key_lengths,
        num_heads=num_heads,
        wants_vitals=True,
        per_row=per_row,
    )
    return _with_vitals(problem, backend)


@overridable
def vitals(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: Scale = None,
    enable_gqa: bool = False,
    *,
    window: Window = None,
    causal_align: str = "top_left",
    softcap: float | None = None,
    sinks: Tensor | None = None,
    key_lengths: Tensor | None = None,
    num_heads: int | None = None,
    per_row: bool = False,
    backend: str | None = None,
) -> Vitals:
    """The vital signs alone: no values, no output. For looking into somebody else's attention."""
    if nested.is_nested(query):
        options = {
            "is_causal": is_causal,
            "scale": scale,
            "enable_gqa": enable_gqa,
            "window": window,
            "causal_align": causal_align,
            "softcap": softcap,
            "sinks": sinks,
            "num_heads": num_heads,
            "per_row": per_row,
            "backend": backend,
        }
        per_entry = {"attn_mask": attn_mask, "key_lengths": key_lengths}
        return nested.serve(vitals, vitals_varlen, (query, key), per_entry, options)
    query, key = autocast(query, key)
    problem = describe(
        query,
        key,
        None,
        attn_mask,
        0.0,
        is_causal,
        scale,
        enable_gqa,
        window=window,
        causal_align=causal_align,
        softcap=softcap,
        sinks=sinks,
        key_lengths=key_lengths,
        num_heads=num_heads,
        scores_only=True,
        wants_vitals=True,
        per_row=per_row,
    )
    return _with_vitals(problem, backend)[1]


@overridable
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Scale = None,
    enable_gqa: bool = False,
    window: Window = None,
    causal_align: str = "top_left",
    softcap: float | None = None,
    sinks: Tensor | None = None,
    num_heads: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """`attention` over packed sequences: query [tokens, heads, D], key and value likewise.

    Sequence i owns the tokens cu_seqlens[i] to cu_seqlens[i + 1]; no row sees another sequence.
    """
    query, key, value = autocast(query, key, value)
    problem = describe(
        query,
        key,
        value,
        None,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        window=window,
        causal_align=causal_align,
        softcap=softcap,
        sinks=sinks,
        num_heads=num_heads,
        cu_seqlens=(cu_seqlens_q, cu_seqlens_k),
    )
    return shaped(backends.choose(problem, backend).attend(problem).out, problem)


@overridable
def attention_varlen_with_vitals(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Scale = None,
    enable_gqa: bool = False,
    window: Window = None,
    causal_align: str = "top_left",
    softcap: float | None = None,
    sinks: Tensor | None = None,
    num_heads: int | None = None,
    per_row: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Vitals]:
    """`attention_varlen` and its vitals, [sequences, heads]; per row [heads, tokens]."""
    query, key, value = autocast(query, key, value)
    problem = describe(
        query,
        key,
        value,
        None,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        window=window,
        causal_align=causal_align,
        softcap=softcap,
        sinks=sinks,
        num_heads=num_heads,
        cu_seqlens=(cu_seqlens_q, cu_seqlens_k),
        wants_vitals=True,
        per_row=per_row,
    )
    return _with_vitals(problem, backend)


@overridable
def vitals_varlen(
    query: Tensor,
    key: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    is_causal: bool = False,
    scale: Scale = None,
    enable_gqa: bool = False,
    window: Window = None,
    causal_align: str = "top_left",
    softcap: float | None = None,
    sinks: Tensor | None = None,
    num_heads: int | None = None,
    per_row: bool = False,
    backend: str | None = None,
) -> Vitals:
    """The vital signs of packed sequences alone, [sequences, heads]."""
    query, key = autocast(query, key)
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
        cu_seqlens=(cu_seqlens_q, cu_seqlens_k),
        scores_only=True,
        wants_vitals=True,
        per_row=per_row,
    )
    return _with_vitals(problem, backend)[1]


@overridable
def additive_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Scale = None,
    enable_gqa: bool = False,
    *,
    window: Window = None,
    causal_align: str = "top_left",
    softcap: float | None = None,
    sinks: Tensor | None = None,
    key_lengths: Tensor | None = None,
    num_heads: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """Bahdanau's attention: the score of a pair is weight . tanh(query + key).

    query and key are already projected, weight is [width] or [heads, width], the default scale 1.
    The [Q, K, width] tensor of the plain formula never exists.
    """
    query, key, value, weight = autocast(query, key, value, weight)
    problem = describe(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        window=window,
        causal_align=causal_align,
        softcap=softcap,
        sinks=sinks,
        key_lengths=key_lengths,
        num_heads=num_heads,
        weight=weight,
    )
    return shaped(backends.choose(problem, backend).attend(problem).out, problem)


@overridable
def additive_attention_with_vitals(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Scale = None,
    enable_gqa: bool = False,
    *,
    window: Window = None,
    causal_align: str = "top_left",
    softcap: float | None = None,
    sinks: Tensor | None = None,
    key_lengths: Tensor | None = None,
    num_heads: int | None = None,
    per_row: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Vitals]:
    """`additive_attention` and the vitals of its softmax."""
    query, key, value, weight = autocast(query, key, value, weight)
    problem = describe(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        window=window,
        causal_align=causal_align,
        softcap=softcap,
        sinks=sinks,
        key_lengths=key_lengths,
        num_heads=num_heads,
        weight=weight,
        wants_vitals=True,
        per_row=per_row,
    )
    return _with_vitals(problem, backend)


class Choice(NamedTuple):
    """Which backend serves a call, and why each other does not."""

    backend: str
    how: str
    refused: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{self.backend} serves this call: {self.how}"]
        lines += [f"{name} does not: {reason}" for name, reason in self.refused.items()]
        return "\n".join(lines)


def backend_for(
    query: Tensor, key: Tensor, value: Tensor | None = None, *args: Any, **kwargs: Any
) -> Choice:
    """Takes `attention`'s arguments; vitals=True asks for its twin, no value for `vitals`."""
    asked = kwargs.pop("backend", None)
    wants_vitals = kwargs.pop("vitals", False) or value is None
    for name in kwargs.keys() - inspect.signature(describe).parameters.keys():
        raise TypeError(f"backend_for() got an unexpected keyword {name!r}; it takes attention's")
    tensors = autocast(query, key) if value is None else autocast(query, key, value)
    query, key, *rest = tensors
    problem = describe(
        query,
        key,
        rest[0] if rest else None,
        *args,
        scores_only=value is None,
        wants_vitals=wants_vitals,
        **kwargs,
    )
    served = backends.choose(problem, asked)
    reasons = backends.explain(problem)
    others = {name: reason for name, reason in reasons.items() if name != served.name}
    refused = {name: reason or "it comes later in the table" for name, reason in others.items()}
    return Choice(served.name, served.how(problem), refused)


def _with_vitals(problem: Problem, backend: str | None) -> tuple[Tensor, Vitals]:
    result = backends.choose(problem, backend).attend(problem)
    row_lead = None
    if problem.per_row:
        row_lead = problem.lead if problem.cu_seqlens_q is None else problem.lead[1:]
    measured = vitals_from(result, problem.lead, row_lead)
    out = result.out if problem.value is None else shaped(result.out, problem)
    return out, measured


def shaped(out: Tensor, problem: Problem) -> Tensor:
    """[B, H, Q, V] back to the caller's rank."""
    if problem.cu_seqlens_q is not None:
        return out.squeeze(0).transpose(0, 1)
    if len(problem.lead) == 2:
        return out
    return out.reshape(*problem.lead, *out.shape[-2:])


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What torch's autocast does to its own attention: float32 becomes the autocast type."""
    if not isinstance(tensors[0], Tensor):
        return tensors
    device = tensors[0].device.type
    device = "cpu" if device == "meta" else device  # meta tensors stand for CPU tensors here
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        tensor.to(dtype)
        if isinstance(tensor, Tensor)
        and tensor.is_floating_point()
        and tensor.dtype != torch.float64
        else tensor
        for tensor in tensors
    )
