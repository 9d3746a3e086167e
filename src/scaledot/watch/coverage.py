"""What is watched, and what cannot be seen: a module that looks like attention is never missing."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

# Children or parameters that together mean «here queries meet keys».
PROJECTIONS = (
    {"q_proj", "k_proj"},
    {"query", "key"},
    {"q", "k"},
    {"to_q", "to_k"},
    {"q_lin", "k_lin"},
    {"wq", "wk"},
    {"Wq", "Wk"},
    {"W_q", "W_k"},
    {"c_attn"},
    {"qkv"},
    {"qkv_proj"},
    {"to_qkv"},
    {"Wqkv"},
    {"query_key_value"},
    {"in_proj_weight", "out_proj"},
)
SHOWN = 8  # layers named in one line


@dataclass(frozen=True)
class Coverage:
    """Paths of layers; `reasons` says of an unseen layer why, where it is known.

    kept: layers that keep their own attention under replace=True, and why.
    """

    watched: tuple[str, ...]
    unseen: tuple[str, ...] = ()
    reasons: dict[str, str] = field(default_factory=dict)
    begun: bool = True  # a step has been looked at from its start to its end
    kept: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        total = len(self.watched) + len(self.unseen)
        if not (self.begun or self.watched or self.reasons):
            if not total:
                return "no attention seen yet"
            return f"no attention seen yet; {_layers(total)} {_verb(total)} like attention"
        if not total:
            return "no attention found"
        parts = [f"{len(self.watched)} of {total} attention {_layers(total, False)} watched"]
        plain = [layer for layer in self.unseen if layer not in self.reasons]
        if plain:
            uses = "uses" if len(plain) == 1 else "use"
            parts.append(f"{_layers(len(plain))} {uses} unhooked matmuls: {_listed(plain)}")
        for reason, layers in _grouped(self.reasons).items():
            parts.append(f"{_layers(len(layers))} not measured ({reason}): {_listed(layers)}")
        for reason, layers in _grouped(self.kept).items():
            keep = "keeps its" if len(layers) == 1 else "keep their"
            parts.append(f"{_layers(len(layers))} {keep} own attention ({reason}): ")
            parts[-1] += _listed(layers)
        return "; ".join(parts)


class Ledger:
    """Keeps what passed a probe and what could not be measured: names, never modules.

    A script's model may be gone when the account is asked for.
    """

    def __init__(self) -> None:
        self._seen: dict[str, None] = {}
        self._failed: dict[str, str] = {}
        self._kept: dict[str, str] = {}
        self._by_hand: dict[str, None] = {}  # a softmax over products of the module's own
        # Of each model: what looks like attention, and the modules one of which would pass a probe.
        self._looks: dict[int, dict[str, frozenset[str]]] = {}

    def saw(self, name: str) -> None:
        self._failed.pop(name, None)
        self._seen[name] = None

    def met(self, name: str) -> None:
        """It counts as seen unless measuring it has failed before."""
        if name not in self._failed:
            self._seen[name] = None

    def unsee(self, name: str) -> None:
        self._seen.pop(name, None)

    def failed(self, name: str, reason: str) -> bool:
        """True the first time."""
        if name in self._seen or name in self._failed:
            return False
        self._failed[name] = reason
        return True

    def knows_any(self) -> bool:
        return bool(self._seen or self._failed or self._by_hand)

    def kept(self, name: str, reason: str) -> None:
        self._kept.setdefault(name, reason)

    def by_hand(self, name: str) -> None:
        self._by_hand[name] = None

    def lists(self, number: int, root: nn.Module, name_of: Callable[[nn.Module], str]) -> None:
        """What of a model looks like attention, while the model is there to be looked at."""
        parents: dict[nn.Module, list[nn.Module]] = {}
        for parent in root.modules():
            for child in parent.children():
                parents.setdefault(child, []).append(parent)
        looks: dict[str, frozenset[str]] = {}
        for module in attention_modules(root):
            # The parent may use the projections of its child without calling it.
            near = (*module.modules(), *parents.get(module, ()))
            looks[name_of(module)] = frozenset(name_of(part) for part in near)
        self._looks[number] = looks

    def report(self, begun: bool) -> Coverage:
        looks = [look for model in self._looks.values() for look in model.items()]
        unwatched = {name: near for name, near in looks if near.isdisjoint(self._seen)}
        by_hand = [
            name
            for name in self._by_hand
            # What was seen is seen, and a part of a layer that is listed is not one more layer.
            if name not in self._seen and not any(name in near for near in unwatched.values())
        ]
        unseen = dict.fromkeys((*unwatched, *by_hand, *self._failed))
        reasons = {name: self._failed[name] for name in unseen if name in self._failed}
        return Coverage(tuple(self._seen), tuple(unseen), reasons, begun, dict(self._kept))


def attention_modules(root: nn.Module) -> list[nn.Module]:
    """Modules that look like attention and hold no other that does."""
    found = [module for module in root.modules() if looks_like_attention(module)]
    return [
        module
        for module in found
        if not any(other is not module and other in module.modules() for other in found)
    ]


def looks_like_attention(module: nn.Module) -> bool:
    names = {*module._modules.keys(), *module._parameters.keys()}  # scripted ones have no more
    if any(projections <= names for projections in PROJECTIONS):
        return True
    called = type(module).__name__.lower()
    return ("attention" in called or "attn" in called) and any(
        isinstance(child, nn.Linear) for child in module.modules()
    )


def _grouped(reasons: dict[str, str]) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for layer, reason in reasons.items():
        grouped.setdefault(reason, []).append(layer)
    return grouped


def _layers(number: int, counted: bool = True) -> str:
    word = "layer" if number == 1 else "layers"
    return f"{number} {word}" if counted else word


def _verb(number: int) -> str:
    return "looks" if number == 1 else "look"


def _listed(layers: list[str]) -> str:
    more = f" and {len(layers) - SHOWN} more" if len(layers) > SHOWN else ""
    return ", ".join(layers[:SHOWN]) + more
