"""The flash_attn package, called directly: [batch, tokens, heads, width], or packed tokens."""

import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scaledot import functional
from scaledot.watch.probes import compiled, frames, hub, in_graph
from scaledot.watch.probes.patch import Swap, stands_for
from scaledot.watch.probes.replacing import KEPT, replaced
from scaledot.watch.probes.scores import Scores
from scaledot.watch.probes.seen import Seen, why_not

MODULES = ("flash_attn.flash_attn_interface", "flash_attn_interface")  # the second is version 3
FUNCTIONS = (
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
)
PACKED = {
    "cu_seqlens",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "max_seqlen",
    "max_seqlen_q",
    "max_seqlen_k",
}
RULES = {"dropout_p", "softmax_scale", "causal", "window_size", "softcap"}
HARMLESS = {"deterministic", "return_attn_probs", "num_splits", "pack_gqa", "sm_margin"}
FOLLOWED = frozenset({"q", "k", "v", "kv", "qkv"} | PACKED | RULES | HARMLESS)


def probes(module: str) -> tuple[Any, ...]:
    home = vars(sys.modules[module])
    found = [home[name] for name in FUNCTIONS if name in home]
    return (Swap(*((original, _probe(original)) for original in found)),)


PLACES = tuple((module, partial(probes, module)) for module in MODULES)


def _probe(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)
    names = tuple(signature.parameters)
    usual = {name: signature.parameters[name].default for name in names if name not in FOLLOWED}
    kind = f"flash_attn.{original.__name__}"

    @frames.invisible
    def attention(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            if compiled.tracing():
                # Dynamo knows no inspect.signature.
                given = {**dict(zip(names, args, strict=False)), **kwargs}
                _look_in_graph(kind, given, usual)
            return original(*args, **kwargs)
        replacing = hub.replacing()
        if not (replacing or hub.wants()):
            return original(*args, **kwargs)
        given = frames.given(signature, args, kwargs)
        if given is None:
            return original(*args, **kwargs)
        reason = _why_not_read(given, usual)
        if replacing:
            out = _replaced(signature, given, kind, reason)
            if out is not KEPT:
                return out
        with hub.quiet():
            out = original(*args, **kwargs)
        if not hub.wants():
            return out
        query = _tensors(given)[0]
        if reason := why_not(query) or reason:
            hub.cannot_see(kind, reason)
        else:
            measure = partial(_call, given, vitals_only=True)
            hub.offer(Seen(query, measure, kind, source=partial(_scores, given)))
        return out

    return stands_for(original, attention)


def _look_in_graph(kind: str, given: dict[str, Any], usual: dict[str, Any]) -> None:
    """Traced: leaves an operator beside the call."""
    if reason := _why_not_read(given, usual):
        compiled.cannot_see(kind, reason)
    else:
        query, key, _ = _tensors(given)
        assert key is not None
        lengths = _lengths(given)
        if lengths is None:
            in_graph.look(kind, query.transpose(1, 2), key.transpose(1, 2), **_rules(given))
        else:
            packed = {"cu_seqlens_q": lengths[0], "cu_seqlens_k": lengths[1]}
            in_graph.look(kind, query, key, **packed, **_rules(given))
    if hub.replacing_in_graphs:
        compiled.keeps_own(kind, "it is inside torch.compile")


def _why_not_read(given: dict[str, Any], usual: dict[str, Any]) -> str:
    """usual: the defaults of the arguments that are not followed."""
    if "k_cache" in given:
        return "it reads keys from a cache"
    for name, default in usual.items():
        value = given.get(name, default)
        same = value is default or (isinstance(value, (int, float, tuple)) and value == default)
        if not same:
            return f"the watch does not follow {name}"
    return ""


def _replaced(signature: inspect.Signature, given: dict[str, Any], kind: str, reason: str) -> Any:
    if "return_attn_probs" not in signature.parameters:
        reason = reason or "what it returns differs from version to version"
    if given.get("return_attn_probs"):
        reason = reason or "more than its output is asked for"
    return replaced(_tensors(given)[0], lambda: _call(given), kind, reason=reason)


def _tensors(given: dict[str, Any]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Query, key and value, packed in whatever way; without keys where they are in a cache."""
    if "qkv" in given:
        return given["qkv"].unbind(-3)
    if "kv" in given:
        return given["q"], *given["kv"].unbind(-3)
    return given["q"], given.get("k"), given.get("v")


def _rules(given: dict[str, Any]) -> dict[str, Any]:
    """Causality and window are counted from the last key; -1 means no limit, a cap of 0 no cap."""
    query, key, _ = _tensors(given)
    assert key is not None
    left, right = given.get("window_size", (-1, -1))
    return {
        "is_causal": given.get("causal", False),
        "causal_align": "bottom_right",
        "scale": given.get("softmax_scale"),
        "enable_gqa": query.shape[-2] != key.shape[-2],
        "window": (_limit(left), _limit(right)),
        "softcap": given.get("softcap") or None,
    }


def _lengths(given: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    lengths = given.get("cu_seqlens_q", given.get("cu_seqlens"))
    return None if lengths is None else (lengths, given.get("cu_seqlens_k", lengths))


def _scores(given: dict[str, Any]) -> Scores | None:
    """Of which a part of the batch can be measured; None: its sequences are packed."""
    query, key, _ = _tensors(given)
    assert key is not None
    if _lengths(given) is not None:
        return None
    return Scores(query.transpose(1, 2), key.transpose(1, 2), **_rules(given))


def _call(given: dict[str, Any], vitals_only: bool = False) -> Any:
    query, key, value = _tensors(given)
    assert key is not None
    assert value is not None
    shared = _rules(given)
    if not vitals_only:
        shared["dropout_p"] = given.get("dropout_p", 0.0)
    if (lengths := _lengths(given)) is not None:
        if vitals_only:
            return functional.vitals_varlen(query, key, *lengths, **shared)
        return functional.attention_varlen_with_vitals(query, key, value, *lengths, **shared)
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    if vitals_only:
        return functional.vitals(query, key, **shared)
    out, vitals = functional.attention_with_vitals(query, key, value, **shared)
    return out.transpose(1, 2), vitals


def _limit(tokens: int | None) -> int | None:
    return None if tokens is None or tokens < 0 else tokens
