"""Make the tensors of a case, in its layouts, on a device."""

import math
from dataclasses import dataclass

import torch

from fuzz.cases import PER_HEAD, Case


@dataclass(frozen=True)
class Call:
    """What a case's call receives; tensors of float types may require gradients."""

    case: Case
    tensors: dict[str, torch.Tensor]  # query, key, value, and mask, scale, sinks, weight if any
    lengths: dict[str, torch.Tensor]  # key_lengths, or cu_seqlens_q and cu_seqlens_k
    words: dict  # plain keywords

    @property
    def leaves(self) -> dict[str, torch.Tensor]:
        """The tensors that gradients are asked of."""
        wanted = self.case.only_wanted
        floats = {n: x for n, x in self.tensors.items() if x.is_floating_point()}
        return {wanted: floats[wanted]} if wanted in floats else floats


def make(case: Case, device: str = "cpu") -> Call:
    """The call of a case: the same numbers in the same layout each time."""
    numbers = torch.Generator().manual_seed(case.seed)
    dtype = getattr(torch, case.dtype)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=numbers, dtype=torch.float64)

    query, key = _query_and_key(case, normal)
    value = normal(*_shape(case, case.value_lead, case.keys, case.value_width))
    value = (value + case.value_shift) * case.value_size
    made = {"query": query, "key": key, "value": value}
    made = {name: x.to(dtype) for name, x in made.items()}
    if case.mask is not None:
        made["mask"] = _mask(case, numbers)
    if case.scale in PER_HEAD:
        made["scale"] = _scale(case, normal).to(dtype)
    if case.sinks is not None:
        made["sinks"] = _sinks(case, normal, dtype)
    if case.additive is not None:
        shape = (case.width,) if case.additive == "shared" else (case.heads, case.width)
        size = min(case.level, 1e3 if case.dtype == "float16" else math.inf)
        made["weight"] = (normal(*shape) * size / math.sqrt(case.width)).to(dtype)
    lengths = _lengths(case)
    if case.bad is not None:
        _break(case, made, lengths, numbers)
    layouts = dict(zip(("query", "key", "value"), case.layouts, strict=True))
    layouts["mask"] = case.mask_layout
    placed = {
        name: laid(x, layouts.get(name, case.small_layout), device).detach()
        for name, x in made.items()
    }
    # Zeros of a stride repeat entries: what they repeat is drawn by the layout.
    return Call(case, placed, {n: x.to(device) for n, x in lengths.items()}, _words(case))


def grad_of(case: Case, out: torch.Tensor) -> torch.Tensor:
    """The gradient of the output, in the case's layout."""
    numbers = torch.Generator().manual_seed(case.seed + 1)
    grad = torch.randn(out.shape, generator=numbers, dtype=torch.float64).to(out.dtype)
    return laid(grad, case.grad_layout, str(out.device))


def laid(x: torch.Tensor, layout: str, device: str = "cpu") -> torch.Tensor:
    """The same numbers in another layout; "expand" repeats the first of a dimension."""
    x = x.to(device)
    dims = x.dim()
    if layout.startswith("expand"):
        at = int(layout[6:])
        if x.numel() == 0 or not -dims <= at < dims:
            return x
        return x.narrow(at, 0, 1).clone().expand(x.shape)
    if x.numel() == 0 or layout == "plain" or dims == 0:
        return x
    blank = math.nan if x.is_floating_point() else 0
    *lead, last = x.shape
    if layout == "permuted":
        return x.transpose(-3, -2).contiguous().transpose(-3, -2) if dims > 2 else x
    if layout == "transposed":
        return x.mT.contiguous().mT if dims > 1 else x
    if layout == "reversed":
        order = tuple(reversed(range(dims)))
        return x.permute(order).contiguous().permute(order)
    if layout == "padded":
        return x.new_full((*lead, last + 4), blank)[..., 1 : last + 1].copy_(x)
    if layout == "more_tokens":
        if dims < 2:
            return x
        return x.new_full((*lead[:-1], lead[-1] + 16, last), blank)[..., : lead[-1], :].copy_(x)
    if layout == "step":
        return x.new_full((*lead, 2 * last), blank)[..., ::2].copy_(x)
    if layout == "misaligned":
        return x.new_full((x.numel() + 1,), blank)[1:].view(x.shape).copy_(x)
    if layout == "single":
        odd = [3 + 2 * i if x.shape[i] == 1 else x.stride(i) for i in range(dims)]
        return x.contiguous().as_strided(x.shape, odd)
    assert layout == "negative", layout
    return torch._neg_view(-x) if x.is_floating_point() else x


def _shape(case: Case, lead: tuple[int, ...], tokens: int, width: int) -> tuple[int, ...]:
    return (tokens, *lead, width) if case.packed is not None else (*lead, tokens, width)


def _query_and_key(case: Case, normal) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the case's size: spread around 0, or all near one number of that size."""
    query = normal(*_shape(case, case.query_lead, case.queries, case.width))
    key = normal(*_shape(case, case.key_lead, case.keys, case.width))
    if not case.common or case.additive is not None:
        size = math.sqrt(case.level)
        return (query * size, key * size) if case.additive is None else (query, key)
    direction = torch.nn.functional.normalize(normal(case.width), dim=0)
    step = math.sqrt(case.level * math.sqrt(case.width)) * direction
    return query + step, key - step


def _mask(case: Case, numbers: torch.Generator) -> torch.Tensor:
    shape = case.mask_shape
    chance = torch.rand(shape, generator=numbers)
    if case.mask == "bool":
        return chance < torch.rand((), generator=numbers).clamp(0.1, 0.95)
    if case.mask == "rows":  # about a third of the rows see nothing
        rows = chance.amax(-1, keepdim=True) if shape and shape[-1] else chance
        return (chance < 0.7) & (torch.rand(rows.shape, generator=numbers) < 0.7)
    if case.mask == "late":  # the first keys are hidden from all
        first = int(torch.randint(0, max(shape[-1], 1), (), generator=numbers))
        return (torch.arange(shape[-1]) >= first).expand(shape).clone()
    dtype = getattr(torch, case.mask_type or case.dtype)
    mask = torch.randn(shape, generator=numbers, dtype=torch.float64)
    if case.mask == "far":
        mask = mask * 1e4 - 1e4 if dtype != torch.float16 else mask * 1e3 - 1e4
    mask = mask.to(dtype)
    if case.mask in ("minus_inf", "lowest"):
        low = -math.inf if case.mask == "minus_inf" else torch.finfo(dtype).min
        share = float(torch.rand((), generator=numbers))
        mask[chance < share] = low
    return mask


def _scale(case: Case, normal) -> torch.Tensor:
    root = 1 / math.sqrt(case.width)
    if case.scale == "one":
        return normal(1) * root
    if case.scale == "one_0d":
        return normal() * root
    each = normal(case.heads) * root
    if case.scale == "same_heads":
        return each[:1].expand(each.shape).clone()
    return -each.abs() if case.scale == "negative_heads" else each


def _sinks(case: Case, normal, dtype: torch.dtype) -> torch.Tensor:
    sinks = normal(case.heads)
    if case.sinks == "far":
        sinks = sinks + math.copysign(min(case.level, 1e4), sinks[0].item())
    if case.sinks == "minus_inf":
        sinks[::2] = -math.inf
    return sinks.to(dtype)


def _lengths(case: Case) -> dict[str, torch.Tensor]:
    kind = torch.int32 if case.int32 else torch.int64
    if case.packed is not None:
        ends = torch.tensor([(0, 0), *case.packed], dtype=kind).cumsum(0, dtype=kind)
        return {"cu_seqlens_q": ends[:, 0], "cu_seqlens_k": ends[:, 1]}  # a stride of two
    if case.key_lengths is None:
        return {}
    lengths = torch.tensor(case.key_lengths, dtype=kind)
    if case.seed % 2:
        lengths = lengths.reshape(case.batch)
    return {"key_lengths": lengths}


def _words(case: Case) -> dict:
    words: dict = {"is_causal": case.is_causal, "causal_align": case.causal_align}
    words["window"], words["softcap"] = case.window, case.softcap
    words["enable_gqa"] = case.gqa
    if case.scale not in PER_HEAD:
        words["scale"] = case.scale
    if case.scale == "sqrt_dmodel":
        words["num_heads"] = case.heads
    return words


def _break(case: Case, made: dict, lengths: dict, numbers: torch.Generator) -> None:
    """Write a number that is not finite into a few entries of one tensor."""
    assert case.bad is not None
    role, number, place = case.bad
    x = made[role]
    if x.numel() == 0:
        return
    tokens = 0 if case.packed is not None else -2
    if role == "mask":
        x.view(-1)[torch.randint(0, x.numel(), (2,), generator=numbers)] = float(number)
        return
    count = x.shape[tokens]
    if role == "query":
        at = torch.randint(0, count, (1,), generator=numbers)
    elif place == "hidden":  # behind the diagonal, a window or a length, where there is one
        at = torch.arange(max(count - 3, 0), count)
        if made.get("mask") is not None and made["mask"].dim() and made["mask"].shape[-1] == count:
            made["mask"][..., at] = float("-inf") if made["mask"].is_floating_point() else False
    else:
        at = torch.randint(0, count, (2,), generator=numbers)
    columns = torch.arange(x.shape[-1])
    if place == "anywhere":
        columns = torch.randint(0, x.shape[-1], (1,), generator=numbers) if x.shape[-1] else columns
    part = x.index_select(tokens, at)
    part[..., columns] = float(number)
    x.index_copy_(tokens, at, part)
