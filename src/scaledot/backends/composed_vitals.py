"""Compute the vital signs by plain torch operators that differentiate, as composed.py the output.

The fields are those of `measure.summarise`. `saturated` counts rows, so its derivative is 0. The
deviations and root mean squares of entries that are all equal have the derivative 0 there.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from scaledot.backends import composed
from scaledot.backends.inputs import Inputs
from scaledot.measure import FLOAT_FIELDS, SATURATED_ABOVE
from scaledot.problem import Settings


class Vitals(NamedTuple):
    floats: Tensor  # [F, B, H], in the order of FLOAT_FIELDS; packed: [F, sequences, H]
    counts: Tensor  # [C, B, H], in the order of COUNT_FIELDS
    rows: Tensor  # [5, B, H, Q], in the order of ROW_FIELDS


class _Entries(NamedTuple):
    """Which rows or keys belong to which entry of the vitals."""

    belongs: Tensor | None  # bool [sequences, Q] of a packed batch; None: all to their batch entry

    def sum(self, values: Tensor) -> Tensor:
        """Add up [B, H, Q] to [B, H], or to [sequences, H]."""
        if self.belongs is None:
            return values.sum(-1)
        return torch.where(self.belongs, values[0].unsqueeze(1), 0).sum(-1).mT

    def largest(self, values: Tensor) -> Tensor:
        if self.belongs is not None:
            values = torch.where(self.belongs, values[0].unsqueeze(1), -math.inf).transpose(0, 1)
        if values.shape[-1] == 0:
            return values.new_full(values.shape[:-1], -math.inf)
        return values.amax(-1)


EVERYTHING = frozenset({*FLOAT_FIELDS, "per_row"})


def measure(inputs: Inputs, settings: Settings, wanted: frozenset[str] = EVERYTHING) -> Vitals:
    """Return the vitals of a call, and those of its rows; 0 stands for what is not wanted."""
    with composed.exact(inputs.query):
        return _measure(inputs, settings, wanted)


def _measure(inputs: Inputs, settings: Settings, wanted: frozenset[str]) -> Vitals:
    found = composed.scores_of(inputs, settings)
    logits, mask, sinks = found.scores, inputs.mask, inputs.sinks
    everywhere = torch.ones_like(logits, dtype=torch.bool)
    allowed = everywhere if found.visible is None else found.visible & everywhere
    if mask is not None and mask.dtype != torch.bool:
        logits = logits + mask.masked_fill(mask == -math.inf, 0.0)
        allowed = allowed & ~(mask <= torch.finfo(mask.dtype).min / 2)
    count = allowed.sum(-1)
    finite = (logits.isfinite() & found.arguments.isfinite()) | ~allowed
    broken = ~finite.all(-1)
    if sinks is not None:
        broken = broken | ~(sinks < math.inf)[:, :, None]
    broken = broken & (count > 0)
    counted = (count > 0) & ~broken
    # Rows that count nowhere are taken out before anything of them could be multiplied by 0.
    inside = counted.unsqueeze(-1)
    arguments = torch.where(inside, found.arguments, 0.0)
    clean = inputs
    if sinks is not None:
        clean = inputs._replace(sinks=torch.where(sinks < math.inf, sinks, 0.0))
    probability = composed.softmax(clean, found._replace(arguments=arguments))
    keys = probability[..., : logits.shape[-1]]
    logits = torch.where(allowed & inside, logits, 0.0)
    nothing = torch.zeros_like(probability[..., :1]).sum(-1)
    lse = entropy = sum_p2 = row_max = top_p = mean = m2 = nothing
    number = count.clamp(min=1)
    rows_too = "per_row" in wanted
    if rows_too or wanted & {"entropy", "entropy_ratio"}:
        lse, entropy = _lse_and_entropy(arguments, clean.sinks, probability)
    if rows_too or "sum_p2" in wanted:
        sum_p2 = probability.square().sum(-1)
    if rows_too or "max_logit" in wanted:
        row_max = torch.where(allowed, logits, -math.inf)
        row_max = row_max.amax(-1) if keys.shape[-1] else torch.full_like(entropy, -math.inf)
    if rows_too or wanted & {"top_p", "saturated"}:
        top_p = keys.amax(-1) if keys.shape[-1] else nothing
    if wanted & {"logit_mean", "logit_std", "row_std"}:
        mean = logits.sum(-1) / number
        m2 = torch.where(allowed & inside, logits - mean.unsqueeze(-1), 0.0).square().sum(-1)

    rows, columns = _entries(inputs)
    outcomes = count if sinks is None else count + 1
    several = counted & (outcomes > 1)
    total, ratio_total = rows.sum(counted), rows.sum(several)
    pairs = rows.sum(torch.where(counted, count, 0))

    def average(values: Tensor, over: Tensor = counted, by: Tensor = total) -> Tensor:
        return rows.sum(torch.where(over, values, 0.0)) / by.clamp(min=1)

    logit_mean = rows.sum(torch.where(counted, mean * count, 0.0)) / pairs.clamp(min=1)
    of_row = logit_mean.unsqueeze(-1)
    if rows.belongs is not None:  # the mean of each row's own sequence
        of_row = (logit_mean.mT @ rows.belongs.to(logit_mean.dtype)).unsqueeze(0)
    spread = rows.sum(torch.where(counted, m2 + count * (mean - of_row).square(), 0.0))
    q_rms, q_entries = _root_mean_square(inputs.query, counted, rows)
    k_rms, k_entries = _key_rms(inputs, columns)
    first = _first_probability(keys, inputs)
    floats = [
        rows.largest(torch.where(counted, row_max, -math.inf)),
        logit_mean,
        _root(spread / pairs.clamp(min=1)),
        _root(average(m2 / number)),
        average(entropy),
        average(entropy / outcomes.clamp(min=2).to(entropy.dtype).log(), several, ratio_total),
        average(sum_p2),
        average(top_p),
        average((top_p > SATURATED_ABOVE).to(top_p.dtype)),
        average(first),
        torch.zeros_like(q_rms) if sinks is None else average(probability[..., -1]),
        q_rms,
        k_rms,
    ]
    counts = [total, pairs, rows.sum(broken), ratio_total, q_entries, k_entries]
    of_rows = [row_max, lse, entropy, top_p, sum_p2]
    blanks = [-math.inf, -math.inf, 0.0, 0.0, 0.0]
    shown = [
        torch.where(broken, math.nan, torch.where(count == 0, blank, values))
        for values, blank in zip(of_rows, blanks, strict=True)
    ]
    named = zip(FLOAT_FIELDS, floats, strict=True)
    floats = [x if name in wanted else torch.zeros_like(x) for name, x in named]
    return Vitals(torch.stack(floats), torch.stack(counts), torch.stack(shown))


def _lse_and_entropy(
    arguments: Tensor, sinks: Tensor | None, probability: Tensor
) -> tuple[Tensor, Tensor]:
    """ln of the sum over all outcomes, and -sum p ln p, counted from the largest argument."""
    if sinks is not None:
        sink = sinks.to(arguments.dtype)[:, :, None, None].expand(*arguments.shape[:-1], 1)
        arguments = torch.cat([arguments, sink], -1)
    if arguments.shape[-1] == 0:
        nothing = arguments.sum(-1)
        return nothing, nothing
    pivot = arguments.detach().amax(-1, keepdim=True)
    pivot = torch.where(pivot.isfinite(), pivot, 0.0)
    shifted = arguments - pivot
    log_sum = shifted.logsumexp(-1)
    shifted = torch.where(shifted == -math.inf, 0.0, shifted)
    entropy = log_sum - (probability * shifted).sum(-1)
    return pivot.squeeze(-1) + log_sum, entropy.clamp(min=0.0)


def _entries(inputs: Inputs) -> tuple[_Entries, _Entries]:
    """Group rows and keys: by sequence in a packed batch."""
    if inputs.cu_seqlens_q is None or inputs.cu_seqlens_k is None:
        return _Entries(None), _Entries(None)

    def members(ends: Tensor, tokens: int) -> _Entries:
        place = torch.arange(tokens, device=ends.device)
        return _Entries((place >= ends[:-1, None]) & (place < ends[1:, None]))

    queries, keys = inputs.query.shape[-2], inputs.key.shape[-2]
    return members(inputs.cu_seqlens_q, queries), members(inputs.cu_seqlens_k, keys)


def _first_probability(keys: Tensor, inputs: Inputs) -> Tensor:
    """Return the probability of the first key of each row's sequence."""
    if keys.shape[-1] == 0:
        return keys.sum(-1)
    if inputs.cu_seqlens_q is None or inputs.cu_seqlens_k is None:
        return keys[..., 0]
    row = torch.arange(keys.shape[-2], device=keys.device).unsqueeze(-1)
    sequence = (row >= inputs.cu_seqlens_q[1:-1]).sum(-1)
    first = inputs.cu_seqlens_k[sequence].long().clamp(max=keys.shape[-1] - 1)
    return keys.gather(-1, first[:, None].expand(*keys.shape[:-1], 1)).squeeze(-1)


def _key_rms(inputs: Inputs, entries: _Entries) -> tuple[Tensor, Tensor]:
    key = inputs.key
    inside = torch.ones(key.shape[:-1], dtype=torch.bool, device=key.device)
    if inputs.key_lengths is not None:
        place = torch.arange(key.shape[-2], device=key.device)
        inside = inside & (place < inputs.key_lengths[:, None, None])
    rms, number = _root_mean_square(key, inside, entries)
    repeats = inputs.query.shape[1] // max(key.shape[1], 1)
    return rms.repeat_interleave(repeats, 1), number.repeat_interleave(repeats, 1)


def _root_mean_square(tensor: Tensor, rows: Tensor, entries: _Entries) -> tuple[Tensor, Tensor]:
    """Over the finite entries of the rows that count; how many they are."""
    tensor = tensor.to(composed.compute_type(tensor))
    usable = tensor.isfinite() & rows.unsqueeze(-1)
    number = entries.sum(usable.sum(-1))
    squares = entries.sum(torch.where(usable, tensor, 0.0).square().sum(-1))
    return _root(squares / number.clamp(min=1)), number


def _root(square: Tensor) -> Tensor:
    """Take the square root; its derivative at 0 is 0, not infinity."""
    positive = square > 0.0
    return torch.where(positive, torch.where(positive, square, 1.0).sqrt(), square)
