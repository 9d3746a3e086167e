"""How a layer can be treated: by its weights, at its call, or not, with the reason."""

from torch import nn

from scaledot.watch.probes import over_ranks, own, sdpa
from scaledot.watch.probes.seen import Seen
from scaledot.watch.remedies.ranks import AT_CALL, BY_WEIGHTS, REFUSED, Said
from scaledot.watch.remedies.remedy import Remedy
from scaledot.watch.remedies.rows import Layer

# The functions whose arguments can be changed on their way.
TRANSFORMERS = "transformers' "
CHANGEABLE = (sdpa.KIND, own.MEASURING, "scaledot.attention", over_ranks.KIND, TRANSFORMERS)
COMPILED = "a compiled graph does not let it in; use qk-clip, which works on weights"
FACTOR = "one factor a head on the queries, at the call"


def said_of(layer: Layer, remedy: Remedy, model: nn.Module, heads: int = 0) -> Said:
    """What this rank tells the others of a layer. heads: of a layer that was not found."""
    after_norm = remedy.name != "qk-clip"
    if layer.parts and not after_norm:
        paths = ", ".join(part.path for part in layer.parts)
        way, words = BY_WEIGHTS, f"{layer.rule()}: {paths}"
    else:
        found = layer.heads > 0
        reason = why_not_at_call(layer, model, after_norm) if found else layer.refused
        way, words = (REFUSED, reason) if reason else (AT_CALL, FACTOR)
    by_weights = way == BY_WEIGHTS
    return Said(
        layer=layer.name,
        identity=layer.identity,
        heads=layer.heads or heads,
        share=layer.share,
        way=way,
        recipe=layer.recipe() if by_weights else "",
        values=layer.values if by_weights else (),
        words=words,
    )


def why_not_at_call(
    layer: Layer, model: nn.Module, after_norm: bool = False, ours: bool = False
) -> str:
    """Why a layer's attention call cannot be changed; after QK-norm qk-clip has no stand-in.

    ours: whether scaledot's attention has to compute it.
    """
    if layer.normalised and not after_norm:
        return (
            f"{layer.refused}; its logits end at the norm's gains times sqrt(d_k): lower their "
            f"learning rate, or use temperature"
        )
    if reason := why_not_compiled(model):
        return reason
    if reason := why_not_ours(layer.kind) * ours:
        return reason
    before = f"{layer.refused}; and " if layer.refused and not after_norm else ""
    if not layer.kind.startswith(CHANGEABLE) or layer.module is None:
        return f"{before}it calls {layer.kind}, whose arguments cannot be changed on their way"
    if not layer.alone:
        return f"{before}its module calls attention more than once, and a factor would meet each"
    return ""


def why_not_reached(seen: Seen, ours: bool) -> str:
    """Why a call that a watch has seen was not changed; "" where it was."""
    if seen.compiled:
        return COMPILED
    if not seen.kind.startswith(CHANGEABLE):
        return f"it calls {seen.kind}, whose arguments cannot be changed on their way"
    return why_not_ours(seen.kind) * ours


def why_not_ours(kind: str) -> str:
    """Why scaledot's attention does not compute what a library's own function was asked for."""
    if not kind.startswith(TRANSFORMERS):
        return ""
    return (
        f"this remedy is computed by scaledot's attention, and the model uses {kind}; load it with "
        'attn_implementation="sdpa"'
    )


def why_not_configured(model: nn.Module) -> str:
    """`why_not_ours` of a model of transformers, from what its configuration names."""
    for module in model.modules():
        name = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if isinstance(name, str) and not name.endswith("sdpa"):
            return why_not_ours(f"{TRANSFORMERS}{name} attention")
    return ""


def why_not_compiled(model: nn.Module) -> str:
    compiled = any(
        "_orig_mod" in module._modules or module._compiled_call_impl is not None
        for module in model.modules()
    )
    return COMPILED * compiled
