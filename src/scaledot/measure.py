"""The vital signs: what they are, how they merge.

Two merges, two types. `RowState` describes one row's softmax over a block of keys and merges
**key blocks of the same rows**. `Vitals` is the summary of a head and merges **disjoint rows**:
batches, micro-batches, ranks.
"""

import html
import math
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaledot import table

# Their names here are public, too.
from scaledot.fields import BANDS as BANDS
from scaledot.fields import COUNT_FIELDS as COUNT_FIELDS
from scaledot.fields import FLOAT_FIELDS as FLOAT_FIELDS
from scaledot.fields import MADE_FIELDS as MADE_FIELDS
from scaledot.fields import ROW_FIELDS as ROW_FIELDS
from scaledot.fields import SATURATED_ABOVE as SATURATED_ABOVE
from scaledot.fields import Band as Band


class _InGraph(threading.local):
    wanted = False


_in_graph = _InGraph()


@contextmanager
def differentiable() -> Iterator[None]:
    """Let the vitals of all calls inside carry a graph, to be used in a loss.

        with scaledot.measure.differentiable():
            out, vitals = scaledot.attention_with_vitals(q, k, v)
        loss = task(out) + 0.01 * (4.0 - vitals.entropy).relu().mean()

    Without it vitals are observations and carry none: they may be kept, converted and sent without
    a thought of the memory behind them. A call inside costs no more until backward reaches one of
    its vitals; then all scores of some heads at a time are computed anew. `saturated` counts rows
    and has no gradient.
    """
    before, _in_graph.wanted = _in_graph.wanted, True
    try:
        yield
    finally:
        _in_graph.wanted = before


def are_differentiable() -> bool:
    """Tell whether the vitals of a call shall carry a graph."""
    return _in_graph.wanted


class RowVitals(NamedTuple):
    """`per_row=True`: one number a row, [..., queries]; empty rows hold -inf and 0."""

    max_logit: Tensor
    lse: Tensor
    entropy: Tensor
    top_p: Tensor
    sum_p2: Tensor


class _Together:
    """Where vitals keep a backend's own [fields, ...]: beside the fields, not among them."""

    __slots__ = ("_together",)
    _together: tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False, repr=False)
class Vitals(_Together):
    """How healthy each head's softmax is; see DESIGN.md for the definition of every field.

    All tensors have the query's leading shape. `ratio_rows`, `q_entries` and `k_entries` are the
    weights that `entropy_ratio`, `q_rms` and `k_rms` need to be merged.
    """

    max_logit: Tensor
    logit_mean: Tensor
    logit_std: Tensor
    row_std: Tensor
    entropy: Tensor
    entropy_ratio: Tensor
    sum_p2: Tensor
    top_p: Tensor
    saturated: Tensor
    sink: Tensor
    off: Tensor
    q_rms: Tensor
    k_rms: Tensor
    rows: Tensor
    pairs: Tensor
    nonfinite: Tensor
    ratio_rows: Tensor
    q_entries: Tensor
    k_entries: Tensor
    per_row: RowVitals | None = None

    def packed(self) -> tuple[Tensor, Tensor]:
        """[fields, ...] twice, in the order of FLOAT_FIELDS and of COUNT_FIELDS."""
        made = self._made()
        if made is not None:
            floats, counts = made
            return (floats if len(floats) == len(FLOAT_FIELDS) else floats[:-1]), counts
        parts = [getattr(self, name) for name in (*FLOAT_FIELDS, *COUNT_FIELDS)]
        return torch.stack(parts[: len(FLOAT_FIELDS)]), torch.stack(parts[len(FLOAT_FIELDS) :])

    @staticmethod
    def unpacked(floats: Tensor, counts: Tensor, per_row: RowVitals | None = None) -> "Vitals":
        """The opposite of `packed`; floats may also be of MADE_FIELDS."""
        if torch.compiler.is_compiling():
            return Vitals(**_cut(floats, counts), per_row=per_row)
        known = len(floats) in (len(FLOAT_FIELDS), len(MADE_FIELDS))
        if not known or len(counts) != len(COUNT_FIELDS):
            raise ValueError(
                f"{len(floats)} and {len(counts)} fields are not the {len(FLOAT_FIELDS)} and "
                f"{len(COUNT_FIELDS)} that `packed` gives"
            )
        vitals = object.__new__(Vitals)
        object.__setattr__(vitals, "_together", (floats, counts))
        object.__setattr__(vitals, "per_row", per_row)
        return vitals

    def _made(self) -> tuple[Tensor, Tensor] | None:
        """What a backend made; for a compiler there are only fields."""
        return None if torch.compiler.is_compiling() else getattr(self, "_together", None)

    def __getattr__(self, name: str) -> Tensor:
        """Asked for what is missing: fields are cut when one is first looked at.

        Nineteen tensors take as long as a launch, and most vitals are handed on as they are.
        """
        if name not in _CUT:
            raise AttributeError(f"'Vitals' object has no attribute {name!r}", name=name, obj=self)
        named = vars(self)
        # Fields are cut once: not without their graph because the first look was without it.
        graph = torch.set_grad_enabled(torch.is_grad_enabled() or self._together[0].requires_grad)
        with graph, _outside(self._together[0]):
            named |= _cut(*self._together)
        return named[name]

    def __getstate__(self) -> dict[str, Any]:
        """For copy and pickle: all fields, without a graph, and nothing else."""
        state: dict[str, Any] = {name: getattr(self, name).detach() for name in _names()}
        rows = self.per_row
        state["per_row"] = None if rows is None else RowVitals(*(t.detach() for t in rows))
        return state

    @property
    def passes(self) -> Tensor:
        """1 - sum_p2, the trace of the softmax's Jacobian: how much gradient gets through."""
        made = self._made()
        if made is not None and len(made[0]) == len(MADE_FIELDS):
            with _outside(made[0]):
                return made[0][-1]
        return torch.where(self.rows > 0, 1 - self.sum_p2, torch.zeros_like(self.sum_p2))

    @property
    def shape(self) -> torch.Size:
        made = self._made()
        return self.max_logit.shape if made is None else made[0].shape[1:]

    @staticmethod
    def empty(
        shape: tuple[int, ...] = (),
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> "Vitals":
        """The vitals of no rows at all: merging with it changes nothing."""
        values: dict[str, Any] = {
            name: torch.zeros(shape, dtype=dtype, device=device) for name in FLOAT_FIELDS
        }
        values["max_logit"] = torch.full(shape, -math.inf, dtype=dtype, device=device)
        for name in COUNT_FIELDS:
            values[name] = torch.zeros(shape, dtype=torch.int64, device=device)
        return Vitals(**values)

    def merge(self, other: "Vitals") -> "Vitals":
        """The vitals of both sets of rows together; commutative and associative up to rounding.

        Of one shape, [batch, heads] as a rule; or one of them `Vitals.empty()`.
        """
        if self.shape != other.shape and not (self._fits_any or other._fits_any):
            remedy = "take over_batch() of both"
            if not (self.max_logit.dim() and other.max_logit.dim()):
                remedy = "one of them is of one head, without a dimension for heads"
            raise ValueError(
                f"vitals of shape {list(self.shape)} and {list(other.shape)} do not merge: {remedy}"
            )
        return _merge(self, other)

    def over_batch(self) -> "Vitals":
        """Merged over every leading dimension but the last: [heads]."""
        merged = self._map(lambda t: t.flatten(0, -2) if t.dim() > 1 else t)
        if merged.max_logit.dim() < 2:
            return merged
        if merged.shape[0] == 0:
            return Vitals.empty(
                tuple(merged.shape[1:]), merged.entropy.dtype, merged.entropy.device
            )
        return merged._map(lambda t: t[0]) if merged.shape[0] == 1 else _reduced(merged)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, ready for JSON, which has no infinity and no NaN: None instead.

        `per_row` only where it was asked for.
        """
        plain = {name: _plain(getattr(self, name)) for name in _names()}
        plain["passes"] = _plain(self.passes)
        if self.per_row is not None:
            plain["per_row"] = {
                name: _plain(tensor) for name, tensor in self.per_row._asdict().items()
            }
        return plain

    def _map(self, function: Any) -> "Vitals":
        return Vitals(**{name: function(getattr(self, name)) for name in _names()})

    def __repr__(self) -> str:
        if not self._has_data:
            return f"Vitals {list(self.shape)} without data"
        return table.as_text(*_table(self))

    def _repr_html_(self) -> str:
        return table.as_html(*_table(self)) if self._has_data else html.escape(repr(self))

    @property
    def _fits_any(self) -> bool:
        """Vitals.empty(), as far as one can look."""
        if self.max_logit.dim():
            return False
        return torch.compiler.is_compiling() or not self._has_data or self.rows.item() == 0

    @property
    def _has_data(self) -> bool:
        return not self.max_logit.is_meta and type(self.max_logit) is Tensor


_CUT = frozenset(FLOAT_FIELDS + COUNT_FIELDS)


def _outside(made: Tensor) -> AbstractContextManager[object]:
    """Fields outlive a trace or transform during which they are first looked at."""
    if (
        torch.compiler.is_dynamo_compiling()
        or not (torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active())
        or type(made) is not Tensor
        or torch._C._functorch.is_functorch_wrapped_tensor(made)
        or _is_traced(made)
    ):
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    from torch.utils._python_dispatch import _disable_current_modes

    stack = ExitStack()
    stack.enter_context(temporarily_clear_interpreter_stack())
    stack.enter_context(_disable_current_modes())
    return stack


def _is_traced(made: Tensor) -> bool:
    """By make_fx, which follows tensors as they are."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    if mode is None:
        return False
    from torch.fx.experimental.proxy_tensor import has_proxy_slot

    return has_proxy_slot(made, mode.tracer)


def _cut(floats: Tensor, counts: Tensor) -> dict[str, Any]:
    """Each field by its name."""
    named = dict(zip(FLOAT_FIELDS, floats.unbind(), strict=False))  # `passes` is a property
    named |= zip(COUNT_FIELDS, counts.unbind(), strict=True)
    return named


SHOWN_HEADS = 8


def _table(vitals: Vitals) -> tuple[str, list[str], list[table.Line], str]:
    """One column a head (the batch merged), a few heads at most, and all of them together."""
    shape = list(vitals.shape)
    heads = vitals.over_batch() if vitals.max_logit.dim() else vitals._map(lambda t: t[None])
    number = heads.shape[0]
    # All heads as one more column: a head is to the layer what a batch entry is to a head.
    together = heads._map(lambda t: t[:, None]).over_batch()
    columns = [f"head {head}" for head in range(min(number, SHOWN_HEADS))] + ["all"]
    note = f"(heads 0 to {SHOWN_HEADS - 1} of {number} shown)" if number > SHOWN_HEADS else ""
    lines = []
    for name, band in BANDS.items():
        values = [*getattr(heads, name)[:SHOWN_HEADS].tolist(), getattr(together, name).item()]
        flags = [
            (band.low is not None and value < band.low)
            or (band.high is not None and value > band.high)
            for value in values
        ]
        cells = [f"{value:.4g}" for value in values]
        lines.append(table.Line(name, cells, flags, band.words))
    title = f"Vitals {shape}: {together.rows.item()} rows, {together.pairs.item()} pairs"
    return title, columns, lines, note


def _plain(tensor: Tensor) -> Any:
    values = tensor.tolist()
    return values if bool(torch.isfinite(tensor).all()) else _without_infinity(values)


def _without_infinity(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_infinity(each) for each in value]
    return value if math.isfinite(value) else None


def _names() -> tuple[str, ...]:
    return FLOAT_FIELDS + COUNT_FIELDS


def _combine(parts: list[Vitals], function: Any) -> Vitals:
    return Vitals(**{name: function([getattr(part, name) for part in parts]) for name in _names()})


def _merge(a: Vitals, b: Vitals) -> Vitals:
    dtype = torch.promote_types(a.entropy.dtype, b.entropy.dtype)
    merged: dict[str, Any] = {name: getattr(a, name) + getattr(b, name) for name in COUNT_FIELDS}

    def weights(counts: str) -> tuple[Tensor, Tensor]:
        total = merged[counts].clamp(min=1).double()
        return getattr(a, counts).double() / total, getattr(b, counts).double() / total

    def values(name: str) -> tuple[Tensor, Tensor]:
        return getattr(a, name).double(), getattr(b, name).double()

    def mean(name: str, counts: str) -> Tensor:
        (weight_a, weight_b), (x, y) = weights(counts), values(name)
        return _weighted(weight_a, x) + _weighted(weight_b, y)

    def root_mean_square(name: str, counts: str) -> Tensor:
        (weight_a, weight_b), (x, y) = weights(counts), values(name)
        return _hypot(_weighted(weight_a.sqrt(), x), _weighted(weight_b.sqrt(), y))

    merged["max_logit"] = torch.maximum(*values("max_logit"))
    for name in ("entropy", "sum_p2", "top_p", "saturated", "sink", "off"):
        merged[name] = mean(name, "rows")
    merged["entropy_ratio"] = mean("entropy_ratio", "ratio_rows")
    merged["logit_mean"] = mean("logit_mean", "pairs")
    # Chan's rule, with hypot so that no square overflows.
    weight_a, weight_b = weights("pairs")
    mean_a, mean_b = values("logit_mean")
    between = _weighted((weight_a * weight_b).sqrt(), mean_a - mean_b)
    merged["logit_std"] = _hypot(root_mean_square("logit_std", "pairs"), between)
    merged["row_std"] = root_mean_square("row_std", "rows")
    merged["q_rms"] = root_mean_square("q_rms", "q_entries")
    merged["k_rms"] = root_mean_square("k_rms", "k_entries")
    for name in FLOAT_FIELDS:
        merged[name] = merged[name].to(dtype)
    return Vitals(**merged)


def _reduced(every: Vitals) -> Vitals:
    """Merged over the first dimension: `_merge` of all its entries at once."""
    merged: dict[str, Any] = {name: getattr(every, name).sum(0) for name in COUNT_FIELDS}
    weights = {}
    for counts in ("rows", "ratio_rows", "pairs", "q_entries", "k_entries"):
        weights[counts] = getattr(every, counts).double() / merged[counts].clamp(min=1)

    def mean(counts: str, *names: str) -> None:
        values = torch.stack([getattr(every, name) for name in names]).double()
        merged.update(zip(names, _weighted(weights[counts], values).sum(1), strict=True))

    def root_mean_square(counts: str, value: Tensor) -> Tensor:
        parts = _weighted(weights[counts].sqrt(), value.double())
        largest = parts.abs().amax(0)  # so that no square overflows
        nothing = largest == 0.0  # a norm of zeros has no second derivative
        parts = torch.where(nothing, 1.0, parts / torch.where(nothing, 1.0, largest))
        norm = torch.linalg.vector_norm(parts, dim=0) * largest
        return torch.where(largest.isinf(), largest, norm)

    merged["max_logit"] = every.max_logit.amax(0)
    mean("rows", "entropy", "sum_p2", "top_p", "saturated", "sink", "off")
    mean("ratio_rows", "entropy_ratio")
    mean("pairs", "logit_mean")
    between = every.logit_mean.double() - merged["logit_mean"]
    within = root_mean_square("pairs", every.logit_std)
    merged["logit_std"] = _hypot(within, root_mean_square("pairs", between))
    merged["row_std"] = root_mean_square("rows", every.row_std)
    merged["q_rms"] = root_mean_square("q_entries", every.q_rms)
    merged["k_rms"] = root_mean_square("k_entries", every.k_rms)
    for name in FLOAT_FIELDS:
        merged[name] = merged[name].to(every.entropy.dtype)
    return Vitals(**merged)


def _hypot(one: Tensor, two: Tensor) -> Tensor:
    """Compute the root of the sum of squares; where both are 0 its derivative is 0, not NaN."""
    both = (one == 0.0) & (two == 0.0)
    return torch.where(both, 0.0, torch.hypot(torch.where(both, 1.0, one), two))


def _weighted(weight: Tensor, value: Tensor) -> Tensor:
    """weight * value, and 0 where the weight is 0, whatever the value."""
    return torch.where(weight > 0, weight * value, torch.zeros_like(value))


class Rows(NamedTuple):
    """What a backend measures of each row, [B, H, Q]: `summarise` makes vitals of it."""

    count: Tensor  # allowed keys; 0: the row counts nowhere
    max_logit: Tensor
    lse: Tensor
    entropy: Tensor
    top_p: Tensor
    sum_p2: Tensor
    first_p: Tensor  # probability of the sequence's first key
    off_p: Tensor | None  # probability of the learned sink
    mean: Tensor  # of the row's logits; float64
    m2: Tensor  # sum of squared deviations from that mean; float64
    broken: Tensor  # bool: the row's logits hold NaN or inf


def summarise(
    rows: Rows, query: Tensor, query_norms: Tensor, key_rms: Tensor, key_entries: Tensor
) -> tuple[Tensor, Tensor]:
    """floats [F, B, H] and counts [C, B, H], in the order of FLOAT_FIELDS and COUNT_FIELDS.

    query [B, H, Q, D] and the norms of its rows [B, H, Q]; key_rms, key_entries [B, H].
    """
    dtype = rows.lse.dtype
    counted = (rows.count > 0) & ~rows.broken
    skipped = ~counted
    number = counted.sum(-1)
    divisor = number.clamp(min=1).to(dtype)

    def total(values: Tensor) -> Tensor:
        return values.masked_fill(skipped, 0.0).sum(-1)

    keys = rows.count.to(dtype)
    outcomes = keys if rows.off_p is None else keys + 1
    several = counted & (outcomes > 1)
    ratio_rows = several.sum(-1)
    ratio = (rows.entropy / outcomes.clamp(min=2).log()).masked_fill(~several, 0.0)
    pairs = rows.count.masked_fill(skipped, 0).sum(-1)
    pair_divisor = pairs.clamp(min=1).double()
    mean = total(rows.mean * rows.count) / pair_divisor
    between = rows.count * (rows.mean - mean.unsqueeze(-1)).square()
    spread = total(rows.m2 + between) / pair_divisor
    row_variance = total(rows.m2 / rows.count.clamp(min=1)) / divisor
    top = rows.max_logit.masked_fill(skipped, -math.inf)
    q_rms, q_entries = root_mean_square(query, query_norms, counted)
    floats = [
        top.amax(-1) if top.shape[-1] else top.new_full(number.shape, -math.inf),
        mean.to(dtype),
        spread.sqrt().to(dtype),
        row_variance.sqrt().to(dtype),
        total(rows.entropy) / divisor,
        ratio.sum(-1) / ratio_rows.clamp(min=1),
        total(rows.sum_p2) / divisor,
        total(rows.top_p) / divisor,
        total((rows.top_p > SATURATED_ABOVE).to(dtype)) / divisor,
        total(rows.first_p) / divisor,
        torch.zeros_like(divisor) if rows.off_p is None else total(rows.off_p) / divisor,
        q_rms,
        key_rms,
    ]
    counts = [number, pairs, rows.broken.sum(-1), ratio_rows, q_entries, key_entries]
    return torch.stack(floats), torch.stack(counts)


def root_mean_square(
    entries: Tensor, norms: Tensor, counted: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Of entries [..., n, width] over the counted rows, non-finite ones left out; how many.

    norms: of the rows [..., n]; counted: bool [..., n], None: all.
    """
    squares = norms.double().square_()
    if counted is not None:
        squares = squares.masked_fill(~counted, 0.0)
    total = squares.sum(-1)
    if bool(torch.isfinite(total).all()):
        if counted is None:
            number = torch.full_like(total, squares.shape[-1], dtype=torch.int64)
        else:
            number = counted.sum(-1)
        number = number * entries.shape[-1]
        return (total / number.clamp(min=1)).sqrt().to(norms.dtype), number
    # Some entry is not finite, or a norm overflowed: leave out the one, survive the other.
    usable = torch.isfinite(entries)
    if counted is not None:
        usable &= counted.unsqueeze(-1)
    number = usable.sum((-1, -2))
    exact = entries.double().masked_fill(~usable, 0.0).square().sum((-1, -2))
    return (exact / number.clamp(min=1)).sqrt().to(norms.dtype), number


class Result(NamedTuple):
    """What a backend hands back; the rest is empty or None where no vitals were asked for."""

    out: Tensor  # [B, H, Q, V]
    floats: Tensor | None = None  # [F, B, H], in the order of FLOAT_FIELDS or MADE_FIELDS
    counts: Tensor | None = None  # [C, B, H], in the order of COUNT_FIELDS
    rows: Tensor | None = None  # [5, B, H, Q], in the order of ROW_FIELDS


def vitals_from(result: Result, lead: tuple[int, ...], row_lead: tuple[int, ...] | None) -> Vitals:
    """Vitals of the caller's leading shape; rows too where `row_lead` gives their shape."""
    floats, counts, rows = result.floats, result.counts, result.rows
    assert floats is not None
    assert counts is not None
    assert rows is not None
    per_row = None
    if row_lead is not None:
        queries = rows.shape[-1]
        per_row = RowVitals(*(tensor.reshape(*row_lead, queries) for tensor in rows.unbind()))
    if len(lead) != 2:
        floats, counts = (numbers.reshape(len(numbers), *lead) for numbers in (floats, counts))
    return Vitals.unpacked(floats, counts, per_row)


@dataclass(frozen=True, eq=False)
class RowState:
    """A row's softmax over a block of keys, in a form that merges with other blocks' exactly.

    With m = max: sum_exp = sum e^(z-m), sum_exp_logit = sum e^(z-m) (z-m) and sum_exp2 =
    sum e^(2(z-m)); count, mean and m2 describe the logits themselves. Everything is counted from
    the maximum, so logits of 1e4 lose nothing. Shapes: one value a row.
    """

    max: Tensor
    sum_exp: Tensor
    sum_exp_logit: Tensor
    sum_exp2: Tensor
    count: Tensor
    mean: Tensor
    m2: Tensor

    @staticmethod
    def from_logits(logits: Tensor, allowed: Tensor | None = None) -> "RowState":
        """logits [..., keys], allowed bool of the same shape (None: all)."""
        if not logits.dtype.is_floating_point:
            raise TypeError(f"logits are {logits.dtype}; they must be floating point")
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        if allowed is None:
            allowed = torch.ones_like(logits, dtype=torch.bool)
        allowed = allowed.expand(logits.shape)
        if logits.shape[-1] == 0:
            return RowState.empty(tuple(logits.shape[:-1]), logits.dtype, logits.device)
        hidden = ~allowed
        count = allowed.sum(-1)
        row_max = logits.masked_fill(hidden, -math.inf).amax(-1)
        shifted = logits - _finite(row_max).unsqueeze(-1)
        exponential = shifted.exp().masked_fill(hidden, 0.0)
        shifted = shifted.masked_fill(hidden, 0.0)
        number = count.clamp(min=1).to(logits.dtype)
        mean = (logits.masked_fill(hidden, 0.0) / number.unsqueeze(-1)).sum(-1)
        deviation = (logits - mean.unsqueeze(-1)).masked_fill(hidden, 0.0)
        weighted = torch.where(exponential > 0, exponential * shifted, torch.zeros_like(shifted))
        weighted = torch.where(exponential.isnan(), exponential, weighted)
        return RowState(
            row_max,
            exponential.sum(-1),
            weighted.sum(-1),
            exponential.square().sum(-1),
            count,
            mean,
            deviation.square().sum(-1),
        )

    @staticmethod
    def empty(
        shape: tuple[int, ...] = (),
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> "RowState":
        """The state of a row that has seen no key: merging with it changes nothing."""
        zero = torch.zeros(shape, dtype=dtype, device=device)
        count = torch.zeros(shape, dtype=torch.int64, device=device)
        return RowState(torch.full_like(zero, -math.inf), zero, zero, zero, count, zero, zero)

    def merge(self, other: "RowState") -> "RowState":
        """The state over both blocks of keys, rescaled to the larger maximum first."""
        row_max = torch.maximum(self.max, other.max)
        one, two = self._seen_from(row_max), other._seen_from(row_max)
        count = self.count + other.count
        share = other.count.to(self.mean.dtype) / count.clamp(min=1)
        delta = other.mean - self.mean
        both = (self.count > 0) & (other.count > 0)
        between = torch.where(both, delta * delta * share * self.count, 0.0)
        return RowState(
            row_max,
            one[0] + two[0],
            one[1] + two[1],
            one[2] + two[2],
            count,
            torch.where(self.count == 0, other.mean, self.mean + delta * share),
            self.m2 + other.m2 + between,
        )

    def _seen_from(self, row_max: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The three sums, counted from another maximum."""
        shift = self.max - _finite(row_max)
        factor = shift.exp()  # a block without keys: e^-inf = 0
        moved = torch.where(factor == 0, torch.zeros_like(shift), shift)
        return (
            self.sum_exp * factor,
            (self.sum_exp_logit + self.sum_exp * moved) * factor,
            self.sum_exp2 * factor * factor,
        )

    @property
    def lse(self) -> Tensor:
        """ln sum e^z; -inf for a row without keys."""
        return torch.where(self.count > 0, self.max + self.sum_exp.log(), -math.inf)

    @property
    def entropy(self) -> Tensor:
        """-sum p ln p in nats; 0 for a row without keys."""
        total = torch.where(self.count > 0, self.sum_exp, 1.0)
        return (total.log() - self.sum_exp_logit / total).clamp(min=0.0)

    @property
    def sum_p2(self) -> Tensor:
        return self.sum_exp2 / torch.where(self.count > 0, self.sum_exp, 1.0).square()

    @property
    def top_p(self) -> Tensor:
        return torch.where(self.count > 0, 1.0 / self.sum_exp, 0.0)

    @property
    def std(self) -> Tensor:
        """Population deviation of the logits."""
        return (self.m2 / self.count.clamp(min=1)).sqrt()


def _finite(row_max: Tensor) -> Tensor:
    """A pivot that can be subtracted: 0 for rows that have seen nothing."""
    return torch.where(row_max == -math.inf, torch.zeros_like(row_max), row_max)


def _register_pytrees() -> None:
    """So that vitals go through torch.func, torch.compile and torch.export like any tensors."""
    from torch.utils import _pytree

    def flatten(value: Any) -> tuple[list[Any], tuple[str, ...]]:
        items = [(field.name, getattr(value, field.name)) for field in fields(value)]
        names, children = zip(*(item for item in items if item[1] is not None), strict=True)
        return list(children), names

    for record in (Vitals, RowState):
        _pytree.register_pytree_node(
            record,
            flatten,
            lambda children, names, record=record: record(
                **dict(zip(names, children, strict=True))
            ),
            serialized_type_name=f"scaledot.{record.__name__}",
        )
    _pytree._register_namedtuple(RowVitals, serialized_type_name="scaledot.RowVitals")


_register_pytrees()
