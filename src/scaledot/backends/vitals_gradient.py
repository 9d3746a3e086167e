"""Give the vitals of a call gradients: those of the formula, computed when backward asks for them.

The values stay the kernel's. Until a gradient reaches them a graph costs nothing but references to
the tensors of the call, which the output's own node holds too.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaledot.backends import composed_vitals, derivatives
from scaledot.backends.inputs import Inputs
from scaledot.measure import FLOAT_FIELDS, Result
from scaledot.problem import Settings

SCORES_AT_ONCE = 1 << 24  # held while vitals are differentiated, if one head has no more of them
SATURATED = FLOAT_FIELDS.index("saturated")
PER_HEAD = ("mask", "head_scale", "sinks", "weight")


def of_vitals(
    inputs: Inputs, settings: Settings, of_floats: Tensor | None, of_rows: Tensor | None
) -> list[Tensor | None]:
    """Compute what vitals pass on, from the gradients of their floats and rows.

    The scores of some heads at a time are computed anew.
    """
    inputs = inputs._replace(value=None)
    wanted = _wanted(of_floats, of_rows)
    places = derivatives.places_of(inputs)
    found: list[Tensor | None] = [None] * derivatives.DIFFERENTIABLE
    for part in _parts(inputs):

        def vitals(*tensors: Tensor, part: _Part = part) -> tuple[Tensor, Tensor]:
            own = part.of(derivatives.with_tensors(inputs, places, tensors))
            measured = composed_vitals.measure(own, settings, wanted)
            return measured.floats, measured.rows

        (floats, rows), pull = derivatives.vjp(vitals, *[inputs[at] for at in places])
        grads = pull(
            (
                torch.zeros_like(floats) if of_floats is None else part.of_floats(of_floats),
                torch.zeros_like(rows) if of_rows is None else part.of_heads(of_rows),
            )
        )
        found = derivatives.add(found, derivatives.in_order(places, grads))
    return found


def _wanted(of_floats: Tensor | None, of_rows: Tensor | None) -> frozenset[str]:
    """Find the vitals that are asked for: a transform's tensors cannot be looked at, so all."""
    wanted = set() if of_rows is None else {"per_row"}
    if of_floats is not None:
        fields = zip(FLOAT_FIELDS, of_floats, strict=True)
        known = derivatives.is_last() and not derivatives.in_forward_mode()
        wanted |= {name for name, grad in fields if not known or bool(grad.any())}
    return frozenset(wanted)


class _Part(NamedTuple):
    """Some batch entries and key heads of a call, with the query heads that share these."""

    batch: slice
    groups: slice
    heads: slice
    packed: bool

    def of(self, inputs: Inputs) -> Inputs:
        """Take this part of every tensor; sizes of 1 stay."""

        def own(tensor: Tensor, heads: slice = self.heads) -> Tensor:
            tensor = tensor[self.batch] if tensor.shape[0] != 1 else tensor
            return tensor[:, heads] if tensor.shape[1] != 1 else tensor

        lengths = inputs.key_lengths
        per_head = {name: getattr(inputs, name) for name in PER_HEAD}
        return inputs._replace(
            query=own(inputs.query),
            key=own(inputs.key, self.groups),
            value=None,
            **{name: own(tensor) for name, tensor in per_head.items() if tensor is not None},
            key_lengths=None if lengths is None else lengths[self.batch],
        )

    def of_heads(self, tensor: Tensor) -> Tensor:
        return tensor[:, self.batch, self.heads]

    def of_floats(self, tensor: Tensor) -> Tensor:
        """The first dimension of packed vitals counts sequences, not batch entries."""
        return tensor[:, :, self.heads] if self.packed else self.of_heads(tensor)


def _parts(inputs: Inputs) -> Iterator[_Part]:
    batch, heads, queries, _ = inputs.query.shape
    groups, keys = inputs.key.shape[1:3]
    repeats = heads // max(groups, 1)
    width = 1 if inputs.weight is None else inputs.query.shape[-1]
    step = max(SCORES_AT_ONCE // max(repeats * queries * keys * width, 1), 1)
    packed = inputs.cu_seqlens_q is not None
    entries = max(step // max(groups, 1), 1)
    for entry in range(0, batch, entries):
        for group in range(0, groups, step):
            end = min(group + step, groups)
            yield _Part(
                slice(entry, min(entry + entries, batch)),
                slice(group, end),
                slice(group * repeats, end * repeats),
                packed,
            )


class VitalsInGraph(torch.autograd.Function):
    """Vitals that were measured by a kernel, with the formula's gradients."""

    @staticmethod
    def forward(ctx: Any, call: "MeasuredCall", *tensors: Tensor | None) -> tuple[Tensor, ...]:
        ctx.settings = call.settings
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        return call.floats, call.rows

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        of_floats, of_rows = grads
        batched = [torch._C._functorch.is_legacy_batchedtensor(g) for g in grads if g is not None]
        if any(batched):
            raise RuntimeError(
                "vitals have no batched gradients (is_grads_batched=True); take torch.func.jacrev, "
                "or one gradient at a time"
            )
        if of_floats is not None and derivatives.is_last() and of_floats[SATURATED].any():
            raise RuntimeError(
                "vitals.saturated counts rows, so it has no gradient; use vitals.top_p instead"
            )
        inputs = Inputs(*ctx.saved_tensors)
        found = of_vitals(inputs, ctx.settings, of_floats, of_rows)
        return (None, *found, *[None] * (len(inputs) - len(found)))


class MeasuredCall(NamedTuple):
    """What a kernel measured of a call, on its way through autograd."""

    settings: Settings
    floats: Tensor
    rows: Tensor


def in_graph(inputs: Inputs, settings: Settings, result: Result) -> Result:
    """Give the vitals of a call a graph; backward computes them anew by the formula."""
    assert result.floats is not None
    assert result.rows is not None
    call = MeasuredCall(settings, result.floats[: len(FLOAT_FIELDS)], result.rows)
    floats, rows = VitalsInGraph.apply(call, *inputs._replace(value=None))
    return result._replace(floats=floats, rows=rows)
