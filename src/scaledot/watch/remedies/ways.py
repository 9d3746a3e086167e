"""How a layer can be treated: by its weights, at its call, or not, with the reason."""

from torch import nn

from scaledot.watch.probes import over_ranks, own, sdpa
from scaledot.watch.remedies.ranks import AT_CALL, BY_WEIGHTS, REFUSED, Said
from scaledot.watch.remedies.remedy import Remedy
from scaledot.watch.remedies.rows import Layer

# The functions whose arguments can be changed on their way.
CHANGEABLE = (sdpa.KIND, own.MEASURING, "scaledot.attention", over_ranks.KIND, "transformers' ")
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


def why_not_at_call(layer: Layer, model: nn.Module, after_norm: bool = False) -> str:
    """Why a layer's attention call cannot be changed; after QK-norm qk-clip has no stand-in."""
    if layer.normalised and not after_norm:
        return (
            f"{layer.refused}; its logits end at the norm's gains times sqrt(d_k): lower their "
            f"learning rate, or use temperature"
        )
    if reason := why_not_compiled(model):
        return reason
    before = f"{layer.refused}; and " if layer.refused and not after_norm else ""
    if not layer.kind.startswith(CHANGEABLE) or layer.module is None:
        return f"{before}it calls {layer.kind}, whose arguments cannot be changed on their way"
    if not layer.alone:
        return f"{before}its module calls attention more than once, and a factor would meet each"
    return ""


def why_not_compiled(model: nn.Module) -> str:
    compiled = any(
        "_orig_mod" in module._modules or module._compiled_call_impl is not None
        for module in model.modules()
    )
    return "a compiled graph does not let it in; use qk-clip, which works on weights" * compiled
