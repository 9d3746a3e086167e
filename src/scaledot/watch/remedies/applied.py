"""`apply`: a remedy, now. What it did can be read and undone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from scaledot.watch.names import PARALLEL, Names
from scaledot.watch.remedies import calls, discover, rows, rules, shards, sigma
from scaledot.watch.remedies.capture import as_inputs
from scaledot.watch.remedies.ranks import REFUSED, Ranks
from scaledot.watch.remedies.remedy import Remedy, RemedyError, parse
from scaledot.watch.remedies.rows import Layer
from scaledot.watch.remedies.ways import (
    said_of,
    why_not_at_call,
    why_not_compiled,
    why_not_configured,
)

Heads = Mapping[str, Sequence[int] | None]  # by layer; None: all of its heads

GAIN = "scaledot_qk_gain"


class Applied:
    """What a remedy has changed. `undo` puts it back, to the bit if nobody trained since."""

    def __init__(self, remedy: Remedy) -> None:
        self.remedy = remedy
        self.changes: list[str] = []  # in words, one a layer
        self.nothing = "nothing had to be changed"  # what is said while there are none
        self.refused: dict[str, str] = {}  # layers, and why
        self._undo: list[Callable[[], None]] = []
        self._rules: dict[str, rules.Rule] = {}

    def describe(self) -> str:
        kind = self.remedy.kind
        lines = [f"{self.remedy} changes {kind.changes}; it promises: {kind.promise}"]
        lines += [f"  {change}" for change in self.changes or [self.nothing]]
        lines += [f"  {layer}: refused: {reason}" for layer, reason in self.refused.items()]
        lines.append(f"  state dict: {kind.keys}")
        return "\n".join(lines)

    def undo(self) -> None:
        """More than once is fine."""
        while self._undo:
            self._undo.pop()()
        self._rules.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """What the model's own state dict does not hold: apply, then load it, to resume."""
        return {
            f"{layer}.{name}": value.detach().clone()
            for layer, rule in self._rules.items()
            for name, value in rule.state().items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for layer, rule in self._rules.items():
            names = {name: name.removeprefix(f"{layer}.") for name in state}
            mine = {short: state[name] for name, short in names.items() if short != name}
            rule.load({name: value for name, value in mine.items() if "." not in name})

    # How it is filled. ---------------------------------------------------------------------------

    def add_rule(self, layer: str, module: nn.Module | None, rule: rules.Rule) -> None:
        calls.add(module, rule)
        self._rules[layer] = rule
        self._undo.append(lambda: calls.remove(module, rule))

    def keep(self, undo: Callable[[], None]) -> None:
        self._undo.append(undo)


def apply(
    remedy: Remedy | str,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    heads: Heads | None = None,
    *,
    inputs: Any = None,
) -> Applied:
    """Apply a remedy to a model, once.

    inputs: one batch as the model takes it (a tensor, a tuple of arguments, a mapping). qk-clip and
    temperature measure the heads' logits on it and find their weights with it. heads: which, as
    {layer: [head, ...]}; None: every head that needs it. optimizer: gets the parameters that a
    remedy adds; without one they are constants. With several ranks each of them calls it, with a
    batch of its own.
    """
    remedy = parse(remedy) if isinstance(remedy, str) else remedy
    applied = Applied(remedy)
    try:
        _APPLY[remedy.name](applied, model, optimizer, heads, inputs)
    except Exception:
        applied.undo()
        raise
    return applied


def _clip(
    applied: Applied, model: nn.Module, optimizer: Any, heads: Heads | None, inputs: Any
) -> None:
    for layer in _layers(applied.remedy, model, heads, inputs):
        gamma = _gamma(layer, applied.remedy, heads)
        if not bool((gamma < 1).any()):
            continue
        if layer.parts:
            copies = [(part, rows.local_copy(part.parameter)) for part in layer.parts]
            layer.scale_(gamma)
            for part, copy in copies:
                applied.keep(lambda part=part, copy=copy: rows.restore_(part.parameter, copy))
            names = ", ".join(part.path for part in layer.parts)
            applied.changes.append(f"{layer.name}: {in_words(gamma)}: {layer.rule()}: {names}")
        elif reason := why_not_at_call(layer, model):
            applied.refused[layer.name] = reason
        else:
            applied.add_rule(layer.name, layer.module, rules.Temperature(gamma))
            applied.changes.append(
                f"{layer.name}: {in_words(gamma)}: a factor at the call, since {layer.refused}"
            )
    _refuse_if_nothing(applied)


def _temperature(
    applied: Applied, model: nn.Module, optimizer: Any, heads: Heads | None, inputs: Any
) -> None:
    for layer in _layers(applied.remedy, model, heads, inputs):
        gamma = _gamma(layer, applied.remedy, heads)
        reason = why_not_at_call(layer, model, after_norm=True)
        if reason:
            applied.refused[layer.name] = reason
            continue
        applied.add_rule(layer.name, layer.module, rules.Temperature(gamma))
        applied.changes.append(f"{layer.name}: {in_words(gamma)}")
    _refuse_if_nothing(applied)


def _at_every_call(
    applied: Applied, model: nn.Module, optimizer: Any, heads: Heads | None, inputs: Any
) -> None:
    """softcap, log-n, and qk-norm without learned gains: one rule for the whole model."""
    _refuse_heads(applied.remedy, heads)
    refuse_unequal(applied.remedy)
    rule = rule_of(applied.remedy)
    if inputs is not None:
        for layer in _layers(applied.remedy, model, heads, inputs):
            if reason := why_not_at_call(layer, model, after_norm=True, ours=rule.ours):
                raise RemedyError(f"{applied.remedy} in {layer.name}: {reason}")
    elif reason := why_not_compiled(model) or why_not_configured(model) * rule.ours:
        raise RemedyError(f"{applied.remedy}: {reason}")
    applied.add_rule("", model, rule)
    applied.changes.append(f"every attention call of {type(model).__name__}")


def _norm(
    applied: Applied,
    model: nn.Module,
    optimizer: Optimizer | None,
    heads: Heads | None,
    inputs: Any,
) -> None:
    if optimizer is None:
        _at_every_call(applied, model, optimizer, heads, inputs)
        return
    _refuse_heads(applied.remedy, heads)
    gains: list[Tensor] = []
    for layer in _layers(applied.remedy, model, heads, inputs):
        reason = why_not_at_call(layer, model, after_norm=True)
        if reason or layer.module is None:
            raise RemedyError(f"{applied.remedy} in {layer.name}: {reason or 'it has no module'}")
        _refuse_unmanaged(applied.remedy, layer, layer.module, model)
        gains.append(_with_gain(applied, layer, layer.module))
    applied.keep(sigma.add_group(optimizer, gains))


def _with_gain(applied: Applied, layer: Layer, module: nn.Module) -> Tensor:
    assert layer.max_logit is not None
    weight = next(module.parameters(), layer.max_logit)
    gain = nn.Parameter(
        torch.full((layer.heads,), applied.remedy.number, device=weight.device, dtype=weight.dtype)
    )
    module.register_parameter(GAIN, gain)
    applied.keep(lambda: delattr(module, GAIN))
    # By name: what loads a checkpoint or moves the model may put another tensor there.
    rule = rules.QKNorm(applied.remedy.number, lambda: getattr(module, GAIN, None))
    applied.add_rule(layer.name, module, rule)
    applied.changes.append(f"{layer.name}: adds the parameter {GAIN}, one gain a head")
    return gain


def _sigma(
    applied: Applied,
    model: nn.Module,
    optimizer: Optimizer | None,
    heads: Heads | None,
    inputs: Any,
) -> None:
    _refuse_heads(applied.remedy, heads)
    paths, undo = sigma.add(model, optimizer)
    applied.keep(undo)
    how = "learned" if optimizer is not None else "constant, for no optimizer was given"
    applied.changes.append(f"{len(paths)} Linears, gains {how}: {', '.join(paths)}")


_APPLY: dict[str, Callable[..., None]] = {
    "qk-clip": _clip,
    "temperature": _temperature,
    "softcap": _at_every_call,
    "log-n": _at_every_call,
    "qk-norm": _norm,
    "sigma-reparam": _sigma,
}


def rule_of(remedy: Remedy) -> rules.Rule:
    """Of a remedy at the call that needs no reading."""
    if remedy.name == "softcap":
        return rules.Softcap(remedy.number)
    if remedy.name == "log-n":
        return rules.LogN(remedy.value)
    assert remedy.name == "qk-norm"
    return rules.QKNorm(remedy.number)


def in_words(gamma: Tensor) -> str:
    """head 3 x 0.25, head 5 x 0.5"""
    below = [(head, value) for head, value in enumerate(gamma.tolist()) if value < 1]
    return ", ".join(f"head {head} x {value:.4g}" for head, value in below) or "no head yet"


def _layers(remedy: Remedy, model: nn.Module, heads: Heads | None, inputs: Any) -> list[Layer]:
    if inputs is None:
        raise RemedyError(
            f"{remedy} has to see the model's attention at work; give one batch: "
            f"apply({str(remedy)!r}, model, inputs=batch)"
        )
    found = _over_ranks(remedy, model, inputs)
    if not found:
        raise RemedyError("the forward pass called no attention that scaledot knows")
    for name in heads or ():
        if name not in found:
            raise RemedyError(f"there is no layer {name!r}; there are {', '.join(found)}")
    return [layer for name, layer in found.items() if heads is None or name in heads]


def _over_ranks(remedy: Remedy, model: nn.Module, inputs: Any) -> dict[str, Layer]:
    """The layers of this rank, with the largest logits of all ranks that hold the same heads."""
    ranks, found, error = Ranks(), {}, ""
    try:
        found = discover.layers(as_inputs(model, inputs), Names(model))
    except Exception as raised:
        if ranks.number == 1:
            raise
        error = f"{type(raised).__name__}: {raised}"
    if ranks.number == 1:
        return found
    failed = [f"rank {rank}: {one}" for rank, one in enumerate(ranks.told(error)) if one]
    if failed:
        raise RemedyError(f"{remedy}: the forward pass failed on {'; '.join(failed)}")
    maxima = {name: one.max_logit for name, one in found.items() if one.max_logit is not None}
    device = next((maximum.device for maximum in maxima.values()), None)
    ranks.meet([said_of(layer, remedy, model) for layer in found.values()], device)
    largest = ranks.largest(maxima)
    for name, maximum in maxima.items():
        entry = ranks.of(name)
        assert entry is not None
        changes: dict[str, Any] = {"max_logit": largest[entry.places].to(maximum)}
        if entry.said.way == REFUSED:
            changes |= {"parts": (), "refused": entry.said.words}
        found[name] = replace(found[name], **changes)
    return found


def _gamma(layer: Layer, remedy: Remedy, heads: Heads | None) -> Tensor:
    """heads: counted over all ranks."""
    assert layer.max_logit is not None
    wanted = None if heads is None else heads[layer.name]
    part, parts = layer.share
    beyond = [head for head in wanted or () if not 0 <= head < layer.heads * parts]
    if beyond:
        raise RemedyError(
            f"{layer.name} has heads 0 to {layer.heads * parts - 1}, and no {beyond[0]}"
        )
    if wanted is not None:
        local = (head - part * layer.heads for head in wanted)
        wanted = [head for head in local if 0 <= head < layer.heads]
    return rows.only(rows.gamma_of(layer.max_logit, remedy.number), wanted)


def _refuse_if_nothing(applied: Applied) -> None:
    if applied.refused and not applied.changes:
        layer, reason = next(iter(applied.refused.items()))
        more = f" (and {len(applied.refused) - 1} more)" if len(applied.refused) > 1 else ""
        raise RemedyError(f"{applied.remedy} is refused in {layer}{more}: {reason}")


def _refuse_heads(remedy: Remedy, heads: Heads | None) -> None:
    if heads is not None:
        raise RemedyError(f"{remedy} is for all heads; leave heads out")


def refuse_unequal(remedy: Remedy) -> None:
    """log-n without a number takes the length of the first call, which differs between ranks."""
    if remedy.name == "log-n" and remedy.value is None and (number := Ranks().number) > 1:
        raise RemedyError(
            f"log-n takes the number of keys from the first call, which may be another on each of "
            f"{number} ranks; say it, for example log-n:1024"
        )


def _refuse_unmanaged(remedy: Remedy, layer: Layer, module: nn.Module, model: nn.Module) -> None:
    """A parameter that comes later than what keeps the replicas alike is not kept alike."""
    sharded = any(shards.is_sharded(parameter) for parameter in module.parameters())
    if sharded or (isinstance(model, PARALLEL) and Ranks().number > 1):
        raise RemedyError(
            f"{remedy} in {layer.name}: its learned gains must be there before fully_shard, "
            f"parallelize_module or DistributedDataParallel; apply it before them, or without an "
            f"optimizer"
        )
