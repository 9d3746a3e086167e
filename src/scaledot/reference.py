"""The textbook, in float64 and with the whole matrix: what every backend is measured against.

Slow and simple on purpose. It shares the reading of the arguments with the library (problem.py) and
nothing else: no tile, no running sum, no shortcut.
"""

import math
from typing import Any

import torch
from torch import Tensor

from scaledot.measure import SATURATED_ABOVE, RowVitals, Vitals
from scaledot.problem import Problem, describe


def attention_with_vitals(
    query: Tensor, key: Tensor, value: Tensor | None, *args: Any, **kwargs: Any
) -> tuple[Tensor | None, Vitals]:
    """Output and vitals in float64; `scaledot.attention_with_vitals`' arguments, no dropout.

    Also `weight=` for the additive score and `cu_seqlens=(q, k)` for packed sequences, whose
    vitals are stacked and whose rows are left out. Without a value there is no output.
    """
    problem = describe(
        query, key, value, *args, scores_only=value is None, wants_vitals=True, **kwargs
    )
    if problem.settings.dropout_p:
        raise ValueError("the reference knows no dropout")
    if problem.cu_seqlens_q is not None:
        return _packed(problem)
    out, vitals = _dense(problem)
    if out is not None:
        out = out.reshape(*problem.lead, *out.shape[-2:])
    named = {name: t.reshape(problem.lead) for name, t in vars(vitals).items() if name != "per_row"}
    per_row = None
    if problem.per_row and vitals.per_row is not None:
        queries = problem.query.shape[-2]
        per_row = RowVitals(*(t.reshape(*problem.lead, queries) for t in vitals.per_row))
    return out, Vitals(**named, per_row=per_row)


def _packed(problem: Problem) -> tuple[Tensor | None, Vitals]:
    """One sequence after another, each on its own."""
    assert problem.cu_seqlens_q is not None
    assert problem.cu_seqlens_k is not None
    rows, keys = problem.cu_seqlens_q.tolist(), problem.cu_seqlens_k.tolist()
    outs, found = [], []
    for i in range(len(rows) - 1):
        part = problem._replace(
            query=problem.query[:, :, rows[i] : rows[i + 1]],
            key=problem.key[:, :, keys[i] : keys[i + 1]],
            value=None if problem.value is None else problem.value[:, :, keys[i] : keys[i + 1]],
        )
        out, vitals = _dense(part)
        outs.append(out)
        found.append(vitals)
    out = None
    if problem.value is not None:
        missing = problem.query.shape[-2] - rows[-1]  # tokens of no sequence
        shape = (1, problem.query.shape[1], missing, problem.value.shape[-1])
        out = torch.cat([*outs, problem.query.new_zeros(shape).double()], dim=-2)[0].transpose(0, 1)
    names = [name for name in vars(found[0]) if name != "per_row"]
    stacked: dict[str, Any] = {n: torch.cat([getattr(v, n) for v in found]) for n in names}
    return out, Vitals(**stacked)


def _dense(problem: Problem) -> tuple[Tensor | None, Vitals]:
    """[B, H, Q, V] and vitals [B, H]."""
    query = problem.query.double()
    repeats = query.shape[1] // max(problem.key.shape[1], 1)
    key = problem.key.double().repeat_interleave(repeats, dim=1)
    visible, read = _visible(problem)
    scores = _scores(problem, query, key, visible.sum(-1, keepdim=True))
    cap = problem.settings.softcap
    capped = cap * (scores / cap).tanh() if cap else scores
    bias = query.new_zeros(())
    if problem.mask is not None and problem.mask.dtype != torch.bool:
        bias = problem.mask.double()
    arguments = (capped + bias).masked_fill(~visible, -math.inf)
    logits = (scores + bias).expand(visible.shape)
    sink = query.new_full((*query.shape[:-1], 1), -math.inf)
    if problem.sinks is not None:
        sink = problem.sinks.double()[:, :, None, None].expand(sink.shape)
    outcomes = torch.cat([arguments, sink], dim=-1)
    blind = ~visible.any(-1, keepdim=True)
    probability = outcomes.softmax(-1).masked_fill(blind, 0.0)
    out = None
    if problem.value is not None:
        value = problem.value.double().repeat_interleave(repeats, dim=1)
        out = _weigh(probability[..., :-1], value, visible)
    return out, _measure(problem, query, logits, outcomes, probability, visible & read)


def _visible(problem: Problem) -> tuple[Tensor, Tensor]:
    """Pairs that enter the softmax, and pairs that the statistics read, [B, H, Q, K]."""
    batch, heads, queries, _ = problem.query.shape
    keys, settings, device = problem.key.shape[-2], problem.settings, problem.query.device
    lengths = torch.full((batch,), keys, device=device)
    if problem.key_lengths is not None:
        lengths = problem.key_lengths.long()
    row = torch.arange(queries, device=device).view(1, 1, queries, 1)
    column = torch.arange(keys, device=device).view(1, 1, 1, keys)
    length = lengths.view(batch, 1, 1, 1)
    diagonal = row + (length - queries if settings.bottom_right else 0)
    visible = column < length
    if settings.left is not None:
        visible = visible & (column >= diagonal - settings.left)
    if settings.right is not None:
        visible = visible & (column <= diagonal + settings.right)
    read = torch.ones((), dtype=torch.bool, device=device)
    if problem.mask is not None:
        if problem.mask.dtype == torch.bool:
            visible = visible & problem.mask
        else:
            visible = visible & (problem.mask != -math.inf)
            read = ~(problem.mask <= torch.finfo(problem.mask.dtype).min / 2)
    shape = (batch, heads, queries, keys)
    return visible.expand(shape), read.expand(shape)


def _scores(problem: Problem, query: Tensor, key: Tensor, count: Tensor) -> Tensor:
    """scale * q.k, or scale * weight . tanh(q + k); count: keys that the softmax of a row sees."""
    if problem.weight is None:
        # One pair at a time would be the definition; a product of matrices would let a NaN of one
        # key into no other key's score either.
        scores = query @ key.mT
    else:
        weight = problem.weight.double()[:, :, None, None, :]
        scores = ((query[:, :, :, None, :] + key[:, :, None, :, :]).tanh() * weight).sum(-1)
    scale: float | Tensor = problem.settings.scale
    if problem.head_scale is not None:
        scale = problem.head_scale.double()[:, :, None, None] * scale
    if problem.settings.log_n:
        scale = scale * count.clamp(min=1).double().log()
    return scores * scale


def _weigh(probability: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """probability @ value, where what is hidden does not exist."""
    if torch.isfinite(value).all():
        return probability @ value
    terms = probability.unsqueeze(-1) * value.unsqueeze(-3)  # [B, H, Q, K, V]
    return terms.masked_fill(~visible.unsqueeze(-1), 0.0).sum(-2)


def _measure(
    problem: Problem,
    query: Tensor,
    logits: Tensor,
    outcomes: Tensor,
    probability: Tensor,
    allowed: Tensor,
) -> Vitals:
    count = allowed.sum(-1)
    finite = (torch.isfinite(logits) & torch.isfinite(outcomes[..., :-1])) | ~allowed
    broken = ~finite.all(-1) & (count > 0)
    if problem.sinks is not None:
        # A sink of -inf is a sink that nobody falls into.
        broken |= ~(outcomes[..., -1] < math.inf) & (count > 0)
    counted = (count > 0) & ~broken
    number = counted.sum(-1)

    def mean(values: Tensor, over: Tensor = counted) -> Tensor:
        return torch.where(over, values, 0.0).sum(-1) / over.sum(-1).clamp(min=1)

    pairs = allowed & counted.unsqueeze(-1)
    logits = torch.where(pairs, logits, 0.0)
    pair_number = pairs.sum((-1, -2))
    logit_mean = logits.sum((-1, -2)) / pair_number.clamp(min=1)
    deviation = torch.where(pairs, logits - logit_mean[..., None, None], 0.0)
    row_mean = logits.sum(-1) / count.clamp(min=1)
    row_deviation = torch.where(pairs, logits - row_mean.unsqueeze(-1), 0.0)
    row_variance = row_deviation.square().sum(-1) / count.clamp(min=1)
    surprise = torch.where(probability > 0, -probability.log(), 0.0)
    entropy = (probability * surprise).sum(-1)
    possible = count + (0 if problem.sinks is None else 1)
    several = counted & (possible > 1)
    sum_p2 = probability.square().sum(-1)
    keys_only = probability[..., :-1]
    empty = keys_only.shape[-1] == 0
    top_p = torch.zeros_like(entropy) if empty else keys_only.amax(-1)
    first = torch.zeros_like(entropy) if empty else keys_only[..., 0]
    row_max = torch.where(pairs, logits, -math.inf)
    row_max = torch.full_like(entropy, -math.inf) if empty else row_max.amax(-1)
    q_rms, q_entries = _root_mean_square(query, counted)
    k_rms, k_entries = _key_rms(problem)

    def row(values: Tensor, blank: float) -> Tensor:
        return values.masked_fill(count == 0, blank).masked_fill(broken, math.nan)

    no_rows = row_max.shape[-1] == 0
    return Vitals(
        max_logit=logit_mean.new_full(number.shape, -math.inf)
        if no_rows
        else torch.where(counted, row_max, -math.inf).amax(-1),
        logit_mean=logit_mean,
        logit_std=(deviation.square().sum((-1, -2)) / pair_number.clamp(min=1)).sqrt(),
        row_std=mean(row_variance).sqrt(),
        entropy=mean(entropy),
        entropy_ratio=mean(entropy / possible.clamp(min=2).double().log(), several),
        sum_p2=mean(sum_p2),
        top_p=mean(top_p),
        saturated=mean((top_p > SATURATED_ABOVE).double()),
        sink=mean(first),
        off=mean(probability[..., -1]),
        q_rms=q_rms,
        k_rms=k_rms,
        rows=number,
        pairs=pair_number,
        nonfinite=broken.sum(-1),
        ratio_rows=several.sum(-1),
        q_entries=q_entries,
        k_entries=k_entries,
        per_row=RowVitals(
            row(row_max, -math.inf),
            row(outcomes.logsumexp(-1), -math.inf),
            row(entropy, 0.0),
            row(top_p, 0.0),
            row(sum_p2, 0.0),
        ),
    )


def _key_rms(problem: Problem) -> tuple[Tensor, Tensor]:
    batch, keys = problem.key.shape[0], problem.key.shape[-2]
    device = problem.key.device
    inside = torch.ones(batch, 1, keys, dtype=torch.bool, device=device)
    if problem.key_lengths is not None:
        inside = torch.arange(keys, device=device).view(1, 1, -1) < problem.key_lengths.view(
            -1, 1, 1
        )
    rms, entries = _root_mean_square(
        problem.key.double(), inside.expand(batch, problem.key.shape[1], keys)
    )
    repeats = problem.query.shape[1] // max(problem.key.shape[1], 1)
    return rms.repeat_interleave(repeats, 1), entries.repeat_interleave(repeats, 1)


def _root_mean_square(entries: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    usable = torch.isfinite(entries) & rows.unsqueeze(-1)
    number = usable.sum((-1, -2))
    total = torch.where(usable, entries, 0.0).square().sum((-1, -2))
    return (total / number.clamp(min=1)).sqrt(), number
