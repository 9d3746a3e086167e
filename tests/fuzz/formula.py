"""What the float64 oracle says of a case, and how far the same formula is off in fewer digits."""

import math
from itertools import pairwise

import oracle
import torch

from fuzz.tensors import Call

Tensors = dict[str, torch.Tensor]


def output(call: Call, tensors: Tensors, keep=None, **rounding):
    """The oracle's output for these tensors, in place of the call's own.

    rounding: compute, products and noise of oracle.attend.
    """
    words = {**call.words, **rounding}
    words |= {name: tensors[name] for name in ("scale", "sinks", "weight") if name in tensors}
    query, key, value = (tensors[name] for name in ("query", "key", "value"))
    if call.case.packed is None:
        query, key, value = expanded(call, query, key, value)
        words |= {"attn_mask": tensors.get("mask"), **_lengths(call)}
        return oracle.attend(query, key, value, keep=keep, **words)
    pieces = []
    for (a, b), (c, d) in zip(*_sequences(call), strict=True):
        dropped = None if keep is None else keep[a:b, :, : d - c].transpose(0, 1)
        each = (x.transpose(0, 1) for x in (query[a:b], key[c:d], value[c:d]))
        pieces.append(oracle.attend(*each, keep=dropped, **words).transpose(0, 1))
    empty = query.new_zeros(0, call.case.heads, value.shape[-1], dtype=torch.float64)
    return torch.cat(pieces or [empty])


def vitals(call: Call):
    """Every vital of the call."""
    tensors = on_cpu(call.tensors)
    words = dict(call.words)
    words |= {name: tensors[name] for name in ("scale", "sinks", "weight") if name in tensors}
    if call.case.packed is not None:
        ends = (call.lengths[f"cu_seqlens_{x}"].cpu() for x in "qk")
        return oracle.diagnose_packed(tensors["query"], tensors["key"], *ends, **words)
    query, key, _ = expanded(call, *(tensors[name] for name in ("query", "key", "value")))
    words |= {"attn_mask": tensors.get("mask"), **_lengths(call)}
    return oracle.diagnose(query, key, **words)


def expanded(call: Call, *tensors):
    """Query, key and value with the result's batch dimensions; heads as far as they broadcast."""
    case = call.case
    if not case.lead:
        return tensors
    heads = [case.heads, case.key_heads, case.value_heads]
    if not case.gqa:
        heads = [case.heads] * 3
    return [
        x.expand(*case.batch, count, *x.shape[-2:]) for x, count in zip(tensors, heads, strict=True)
    ]


def on_cpu(tensors: Tensors) -> Tensors:
    return {name: x.detach().cpu() for name, x in tensors.items()}


def visible(call: Call) -> torch.Tensor:
    """Which pairs count, [*lead, Q, K]; packed: [tokens, heads, longest sequence of keys]."""
    tensors = {name: torch.zeros_like(x) for name, x in on_cpu(call.tensors).items()}
    mask = call.tensors.get("mask")
    if mask is not None:
        tensors["mask"] = mask.cpu()
    if "sinks" in tensors:
        tensors["sinks"].fill_(-math.inf)
    tensors["value"] = identity(call, torch.float64)
    if mask is not None and mask.is_floating_point():
        tensors["mask"] = torch.where(tensors["mask"] == -math.inf, -math.inf, 0.0)
    words = {**call.words, "softcap": None, "scale": 0.0}
    tensors.pop("scale", None)
    return output(Call(call.case, tensors, call.lengths, words), tensors) > 0


def identity(call: Call, dtype) -> torch.Tensor:
    """Values that make an output of the weights themselves."""
    case = call.case
    if case.packed is None:
        return torch.eye(case.keys, dtype=dtype).expand(*case.value_lead, case.keys, case.keys)
    longest = max([k for _, k in case.packed], default=0)
    rows = [torch.eye(k, longest, dtype=dtype) for _, k in case.packed]
    rows = torch.cat([torch.zeros(0, longest, dtype=dtype), *rows])
    return rows.unsqueeze(1).expand(case.keys, case.value_heads, longest)


def broken_rows(call: Call) -> torch.Tensor:
    """Rows that see a number that is not finite, [*lead, Q]; packed: [tokens, heads]."""
    tensors, seen = on_cpu(call.tensors), visible(call)
    bad = {name: (~tensors[name].isfinite()).any(-1) for name in ("query", "key", "value")}
    if call.case.packed is not None:
        lead = (call.case.heads,)
        own = bad["query"] & seen.any(-1)
        repeated = (_per_head(bad[n].T, lead).T for n in ("key", "value"))
        by_token = torch.stack(list(repeated)).any(0)  # [tokens, heads]
        return own | (seen & _by_sequence(call, by_token)).any(-1)
    lead = call.case.lead
    query, key, value = (_per_head(bad[n], lead) for n in ("query", "key", "value"))
    pairs = seen & (key | value)[..., None, :]
    if "mask" in tensors:
        odd = tensors["mask"].isnan() | (tensors["mask"] == math.inf)
        pairs = pairs | (seen & odd)
    return (query & seen.any(-1)) | pairs.any(-1)


def claimed(call: Call, broken: torch.Tensor) -> Tensors:
    """Which gradients a broken row leaves alone: those of rows and keys it has no part in."""
    seen, packed = visible(call), call.case.packed is not None
    pairs = seen & broken[..., None]
    if packed:
        keys = torch.zeros(call.case.keys, call.case.heads, dtype=torch.bool)
        for (a, b), (c, d) in zip(*_sequences(call), strict=True):
            keys[c:d] = pairs[a:b, :, : d - c].any(0).T
        heads = broken.any(0)
    else:
        keys = pairs.any(-2)
        heads = broken.any(-1).reshape(-1, call.case.heads).any(0) if call.case.lead else None
    hits = {
        "query": broken,
        "key": keys,
        "value": keys,
        "mask": pairs,
        "scale": heads,
        "sinks": heads,
        "weight": heads,
    }
    return {
        name: ~_reduced(call, name, leaf.shape, hits[name], packed)
        for name, leaf in call.leaves.items()
    }


def _reduced(call: Call, name: str, shape, hit: torch.Tensor | None, packed: bool) -> torch.Tensor:
    """Whether any of the places that an entry is broadcast to is hit."""
    if hit is None:
        return torch.full(shape, bool(broken_rows(call).any()))
    if name == "mask":
        return _any_to(hit, shape)
    if name in ("scale", "sinks", "weight"):
        if len(shape) < 1 or math.prod(shape[:1]) == 1 or (name == "weight" and len(shape) == 1):
            return hit.any().expand(shape)
        return hit.reshape(-1, *[1] * (len(shape) - 1)).expand(shape)
    if packed:
        hit = hit.unflatten(1, (shape[1], -1)).any(-1)  # [tokens, G]
        return hit[..., None].expand(shape)
    if call.case.lead:
        count = shape[-3] if len(shape) > 2 else 1
        hit = hit.unflatten(-2, (count, hit.shape[-2] // max(count, 1))).any(-2)
    return _any_to(hit[..., None], (*shape[:-1], 1)).expand(shape)


def _any_to(hit: torch.Tensor, shape) -> torch.Tensor:
    return hit.double().sum_to_size(shape) > 0


def _per_head(bad: torch.Tensor, lead: tuple[int, ...]) -> torch.Tensor:
    """[..., G, tokens] as [*lead, tokens]: each key head stands for a group of query heads."""
    if bad.dim() > 1 and bad.shape[-2] not in (1, lead[-1]):
        bad = bad.repeat_interleave(lead[-1] // bad.shape[-2], dim=-2)
    return bad.expand(*lead, bad.shape[-1])


def _by_sequence(call: Call, by_token: torch.Tensor) -> torch.Tensor:
    """[key tokens, heads] as [query tokens, heads, longest]."""
    longest = max([k for _, k in call.case.packed], default=0)
    spread = torch.zeros(call.case.queries, call.case.heads, longest, dtype=torch.bool)
    for (a, b), (c, d) in zip(*_sequences(call), strict=True):
        spread[a:b, :, : d - c] = by_token[c:d].T
    return spread


def clean(call: Call) -> Tensors:
    """The tensors with zeros for what is not finite: what rows that do not see it must return."""
    tensors = on_cpu(call.tensors)
    for name, x in tensors.items():
        if x.is_floating_point() and name not in ("mask", "sinks"):
            tensors[name] = torch.where(x.isfinite(), x, torch.zeros_like(x))
        if name == "mask" and x.is_floating_point():
            odd = x.isnan() | (x == math.inf)
            tensors[name] = torch.where(odd, torch.zeros_like(x), x)
    return tensors


def gradients(call: Call, tensors: Tensors, grad, keep=None, **rounding) -> Tensors:
    """Of the clean tensors; those that the call asks for."""
    compute = rounding.get("compute", torch.float64)
    leaves = {name: tensors[name].to(compute).requires_grad_() for name in call.leaves}
    out = output(call, {**tensors, **leaves}, keep, **rounding)
    if not out.requires_grad:  # no sequence at all
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    found = torch.autograd.grad(out, list(leaves.values()), grad.to(compute), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if g is None else g
        for (name, leaf), g in zip(leaves.items(), found, strict=True)
    }


def dropped(weights: torch.Tensor, rate: float) -> torch.Tensor:
    """What multiplies the weights: told by an output whose values were the identity."""
    kept = 0.0 if rate >= 1.0 else 1.0 / (1.0 - rate)
    return (weights.detach().cpu() != 0).double() * kept


def _lengths(call: Call) -> dict:
    """As [batch] for the oracle, whose batch may have several dimensions."""
    lengths = call.lengths.get("key_lengths")
    return {} if lengths is None else {"key_lengths": lengths.cpu().reshape(call.case.batch)}


def _sequences(call: Call):
    return [list(pairwise(call.lengths[f"cu_seqlens_{x}"].tolist())) for x in "qk"]
