"""transformers 5: the attention functions of its registry.

Models ask `AttentionInterface.get_interface(name, eager)` at every forward pass. What it returns is
wrapped; the names, and with them the masks that transformers makes for each name, stay as they
are. A new name without a mask function of its own would silently lose the mask.

"sdpa" calls torch's function, where the other probe sees exactly what is computed.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from scaledot.watch.probes import compiled, frames, hub, hugging_face_compiled
from scaledot.watch.probes.flex import dense_mask, why_not_dense
from scaledot.watch.probes.hugging_face_call import Call, call_of
from scaledot.watch.probes.patch import Attribute
from scaledot.watch.probes.replacing import KEPT, replaced
from scaledot.watch.probes.scores import Scores
from scaledot.watch.probes.seen import Seen, why_not

MODULE = "transformers.modeling_utils"
Attend = Callable[..., Any]
AGREEMENT = 16  # roundings of the type by which the model's own eager attention may differ


def probes() -> tuple[Any, ...]:
    from transformers.modeling_utils import AttentionInterface

    original = vars(AttentionInterface)["get_interface"]
    trials = Trials()

    def get_interface(self: Any, attn_implementation: str, default: Attend) -> Any:
        attend = original(self, attn_implementation, default)
        if attn_implementation is not None and attn_implementation.endswith("sdpa"):
            return attend
        if torch.compiler.is_compiling():
            traced = compiled.tracing()
            return _traced(attend, attn_implementation or "eager") if traced else attend
        if not (hub.wants() or hub.replacing()):
            return attend
        return _probe(attend, attn_implementation or "eager", trials)

    return (Attribute(AttentionInterface, "get_interface", get_interface),)


def _probe(attend: Attend, name: str, trials: "Trials") -> Attend:
    kind = f"transformers' {name} attention"

    @frames.invisible
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        reason = _why_not_read(name, attention_mask, args)

        def given() -> Call:
            mask = _tensor_of(attention_mask, query, key)
            return call_of(_is_flash(name), module, query, key, mask, **kwargs)

        def call(value: Tensor | None, dropout: float = 0.0) -> Any:
            return given().computed(value, dropout)

        def scores() -> Scores | None:
            return given().scores()

        if hub.replacing():
            applied = _is_flash(name) or module.training
            dropout = kwargs.get("dropout", 0.0) if applied else 0.0
            why = reason or _why_own(module, kwargs)
            if not why and name == "eager":
                inputs = (query, key, value, attention_mask)
                why = trials.why_not(attend, module, inputs, kwargs, lambda: call(value))
            out = replaced(query, lambda: call(value, dropout), kind, module, reason=why)
            if out is not KEPT:
                return out, None
        # What we cannot read may call a function that another probe reads.
        with nullcontext() if reason else hub.quiet():
            out = attend(module, query, key, value, attention_mask, *args, **kwargs)
        if not hub.wants():
            return out
        if reason := why_not(query) or reason:
            hub.cannot_see(kind, reason, module)
        else:
            hub.offer(Seen(query, lambda: call(None), kind, module, source=scores))
        return out

    return attention


def _traced(attend: Attend, name: str) -> Attend:
    """The same inside torch.compile, which reads these lines once."""
    kind = f"transformers' {name} attention"

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        reason = _why_not_read(name, attention_mask, args)
        if not (reason or attention_mask is None or isinstance(attention_mask, Tensor)):
            reason = why_not_dense(attention_mask, query, key)
        if reason:
            compiled.cannot_see(kind, reason)
            return attend(module, query, key, value, attention_mask, *args, **kwargs)
        mask = _tensor_of(attention_mask, query, key)
        given = call_of(_is_flash(name), module, query, key, mask, **kwargs)
        hugging_face_compiled.look(kind, given)
        if hub.replacing_in_graphs:
            compiled.keeps_own(kind, "it is inside torch.compile")
        return compiled.seen(attend, module, query, key, value, attention_mask, **kwargs)

    return attention


def _is_flash(name: str) -> bool:
    return name.startswith("flash_attention")


def _tensor_of(mask: Any, query: Tensor, key: Tensor) -> Tensor | None:
    if mask is None or isinstance(mask, Tensor):
        return mask
    return dense_mask(mask, query, key)


def _why_not_read(name: str, attention_mask: Any, args: tuple[Any, ...]) -> str:
    known = name in ("eager", "flex_attention") or _is_flash(name)
    if not known:
        return f"the watch does not know what {name!r} computes"
    is_block_mask = name == "flex_attention" and hasattr(attention_mask, "mask_mod")
    if not (attention_mask is None or isinstance(attention_mask, Tensor) or is_block_mask):
        return f"its mask is a {type(attention_mask).__name__}"
    if args:
        return "it was given arguments without their names"
    return ""


def _why_own(module: nn.Module, kwargs: dict[str, Any]) -> str:
    """The weights are asked for: by argument, by configuration, or by the recorder of outputs."""
    config = getattr(module, "config", None)
    asked = kwargs.get("output_attentions") or getattr(config, "output_attentions", False)
    try:
        from transformers.utils.output_capturing import _active_collector

        asked = asked or any("attentions" in name for name in _active_collector.get() or ())
    except ImportError:
        pass
    return "its weights are asked for: output_attentions=True" if asked else ""


class Trials:
    """Each model may bring an eager attention of its own, of which only the signature is known.

    The first call of each, without dropout, is computed both ways and compared.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Attend, type[nn.Module]], str] = {}

    def why_not(
        self,
        attend: Attend,
        module: nn.Module,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
        ours: Callable[[], Any],
    ) -> str:
        key = attend, type(module)
        if key not in self._known:
            try:
                with torch.no_grad(), hub.quiet():
                    theirs = attend(module, *inputs, **{**kwargs, "dropout": 0.0})[0]
                    same = _agree(theirs, ours()[0])
                self._known[key] = "" if same else "its eager attention computes something else"
            except Exception as error:
                self._known[key] = f"{type(error).__name__}: {error}"
        return self._known[key]


def _agree(theirs: Tensor, ours: Tensor) -> bool:
    """Where theirs is a number: a row without a key is NaN in some of them."""
    if theirs.shape != ours.shape:
        return False
    tolerance = AGREEMENT * torch.finfo(theirs.dtype).eps
    there = theirs.isfinite()
    theirs, ours = theirs[there].float(), ours[there].float()
    size = theirs.abs().amax() if len(theirs) else theirs.new_ones(())
    return bool((theirs - ours).abs().le(tolerance * (1 + size)).all())
