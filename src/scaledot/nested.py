"""Serve nested tensors, as torch does: each sequence of a batch attends to itself.

A jagged tensor [batch, heads, ragged tokens, width] lies in memory as packed sequences, so one call
of attention_varlen serves it. One that is ragged along its second dimension, [batch, ragged,
tokens, width], holds dense entries side by side. A strided nested tensor is served entry by entry.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scaledot.errors import ArgumentError, ArgumentTypeError
from scaledot.measure import RowVitals, Vitals

NAMES = ("query", "key", "value")


def is_nested(query: Any) -> bool:
    """Tell whether a query asks for this module."""
    return isinstance(query, Tensor) and query.is_nested


def serve(
    whole: Callable[..., Any],
    packed: Callable[..., Any],
    tensors: tuple[Tensor, ...],
    per_entry: dict[str, Any],
    options: dict[str, Any],
) -> Any:
    """Return what `whole(*tensors, **options)` means for nested tensors.

    whole: the function for dense tensors; packed: its twin for packed sequences. per_entry: the
    arguments with one part for each batch entry, which nested tensors do not take.
    """
    query = tensors[0]
    for name, tensor in zip(NAMES, tensors, strict=False):
        if not isinstance(tensor, Tensor) or not tensor.is_nested:
            raise ArgumentTypeError(
                f"query is a nested tensor but {name} is not; make all of them nested, or none"
            )
        if tensor.layout != query.layout or tensor.dim() != query.dim():
            raise ArgumentError(
                f"query and {name} are nested tensors of different kinds ({query.layout} with "
                f"{query.dim()} dimensions, {tensor.layout} with {tensor.dim()}); make them alike"
            )
        if tensor.size(0) != query.size(0):
            raise ArgumentError(
                f"{name} holds {tensor.size(0)} sequences but query holds {query.size(0)}"
            )
    for name, given in per_entry.items():
        if given is not None:
            raise ArgumentError(
                f"{name} and nested tensors do not go together; pad the sequences to one length "
                f"for a call with {name}, or leave it out: no sequence sees another"
            )
    if query.layout is not torch.jagged:
        return _entry_by_entry(whole, tensors, options)
    return _jagged(whole, packed, tensors, options)


def _jagged(
    whole: Callable[..., Any],
    packed: Callable[..., Any],
    tensors: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:
    query = tensors[0]
    ragged, rank = query._ragged_idx, query.dim()
    for name, tensor in zip(NAMES, tensors, strict=False):
        if tensor._ragged_idx != ragged or (ragged, rank) not in ((2, 4), (1, 3), (1, 4)):
            raise ArgumentError(
                f"{name} is a nested tensor of {rank} dimensions, ragged along dimension "
                f"{tensor._ragged_idx}; make it [batch, heads, ragged tokens, width] or [batch, "
                f"ragged tokens, width], like the others"
            )
        if tensor.lengths() is not None:
            raise ArgumentError(
                f"{name} is a nested tensor with gaps between its sequences; pass "
                f"{name}.contiguous()"
            )
    ends = [tensor.offsets() for tensor in tensors]
    _check_same_lengths(ends)
    rows = [tensor.values() for tensor in tensors]
    if (ragged, rank) == (1, 4):
        result = whole(*rows, **options)
        return _changed(result, lambda out: _as_jagged(out, query, ends[0]))
    if rank == 3:
        result = packed(*[part.unsqueeze(1) for part in rows], *ends[:2], **options)
        return _changed(
            result, lambda out: _as_jagged(out.squeeze(1), query, ends[0]), _of_one_head
        )
    result = packed(*[part.transpose(0, 1) for part in rows], *ends[:2], **options)
    return _changed(result, lambda out: _as_jagged(out, query, ends[0]).transpose(1, 2))


def _check_same_lengths(ends: list[Tensor]) -> None:
    """Key and value may come with offsets of their own; where nobody traces they are compared."""
    if len(ends) < 3 or ends[1] is ends[2] or torch.compiler.is_compiling():
        return
    if torch._C._len_torch_dispatch_stack() or type(ends[1]) is not Tensor:
        return
    if not torch.equal(ends[1], ends[2]):
        raise ArgumentError("key and value are nested tensors of different sequence lengths")


def _as_jagged(out: Tensor, query: Any, ends: Tensor) -> Tensor:
    """Nest rows like the query: with the same offsets, so that both have the same ragged size."""
    return torch.nested.nested_tensor_from_jagged(
        out, ends, min_seqlen=query._maybe_min_seqlen, max_seqlen=query._maybe_max_seqlen
    )


def _changed(
    result: Any,
    output: Callable[[Tensor], Tensor],
    measured: Callable[[Vitals], Vitals] = lambda vitals: vitals,
) -> Any:
    """Return an output, vitals or both of them with each of the two changed."""
    if isinstance(result, Vitals):
        return measured(result)
    if isinstance(result, tuple):
        return output(result[0]), measured(result[1])
    return output(result)


def _of_one_head(vitals: Vitals) -> Vitals:
    """Return [batch] for [batch, 1], as a query [batch, tokens, width] has no heads."""
    floats, counts = vitals.packed()
    rows = vitals.per_row
    if rows is not None:
        rows = RowVitals(*(part.squeeze(0) for part in rows))
    return Vitals.unpacked(floats.squeeze(-1), counts.squeeze(-1), rows)


def _entry_by_entry(
    whole: Callable[..., Any], tensors: tuple[Tensor, ...], options: dict[str, Any]
) -> Any:
    if options.get("per_row"):
        raise ArgumentError(
            "per_row=True needs rows that lie side by side; use a nested tensor of layout "
            "torch.jagged"
        )
    entries = list(zip(*(tensor.unbind() for tensor in tensors), strict=True))
    if not entries:
        raise ArgumentError("query is a nested tensor without a sequence")
    results = [whole(*entry, **options) for entry in entries]
    if isinstance(results[0], Vitals):
        return _stack(results)
    if isinstance(results[0], tuple):
        return _nest([out for out, _ in results]), _stack([vitals for _, vitals in results])
    return _nest(results)


def _nest(outs: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(outs, layout=torch.strided)


def _stack(vitals: list[Vitals]) -> Vitals:
    """Return the vitals [heads] of each entry as [batch, heads]."""
    shapes = {tuple(one.max_logit.shape) for one in vitals}
    if len(shapes) > 1:
        raise ArgumentError(
            f"the sequences have different numbers of heads, {sorted(shapes)}; vitals need the same"
        )
    floats, counts = zip(*(one.packed() for one in vitals), strict=True)
    return Vitals.unpacked(torch.stack(floats, 1), torch.stack(counts, 1))
