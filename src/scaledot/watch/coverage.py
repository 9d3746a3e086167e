"""What is watched, and what cannot be seen: a module that looks like attention is never missing."""

import weakref
from collections.abc import Iterable
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
    """Paths of layers; `reasons` says of an unseen layer why, where it is known."""

    watched: tuple[str, ...]
    unseen: tuple[str, ...] = ()
    reasons: dict[str, str] = field(default_factory=dict)
    begun: bool = True  # a step has been looked at from its start to its end

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
        for reason in dict.fromkeys(self.reasons.values()):
            layers = [layer for layer in self.reasons if self.reasons[layer] == reason]
            parts.append(f"{_layers(len(layers))} not measured ({reason}): {_listed(layers)}")
        return "; ".join(parts)


class Ledger:
    """Keeps which modules passed a probe, and which calls could not be measured."""

    def __init__(self) -> None:
        self._seen: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._functions: dict[str, None] = {}  # attention outside of any module
        self._failed: dict[str, str] = {}

    def saw(self, module: nn.Module | None, name: str) -> None:
        self._failed.pop(name, None)
        if module is None:
            self._functions[name] = None
        else:
            self._seen[module] = name

    def failed(self, name: str, reason: str) -> bool:
        """True the first time."""
        if name in self._functions or name in self._seen.values():
            return False
        return self._failed.setdefault(name, reason) is reason

    def report(self, layers: Iterable[tuple[nn.Module, str]], begun: bool) -> Coverage:
        """layers: all modules that look like attention, with their names."""
        names = dict.fromkeys((*self._seen.values(), *self._functions))
        unseen = dict.fromkeys(
            (*(name for module, name in layers if not self._covers(module)), *self._failed)
        )
        reasons = {name: self._failed[name] for name in unseen if name in self._failed}
        return Coverage(tuple(names), tuple(unseen), reasons, begun)

    def _covers(self, module: nn.Module) -> bool:
        if any(part in self._seen for part in module.modules()):
            return True
        # The parent may use the projections of its child without calling it.
        return any(module is child for parent in self._seen for child in parent.children())


def attention_modules(root: nn.Module) -> list[nn.Module]:
    """Modules that look like attention and hold no other that does."""
    found = [module for module in root.modules() if _looks_like_attention(module)]
    return [
        module
        for module in found
        if not any(other is not module and other in module.modules() for other in found)
    ]


def _looks_like_attention(module: nn.Module) -> bool:
    names = {*module._modules, *module._parameters}
    if any(projections <= names for projections in PROJECTIONS):
        return True
    called = type(module).__name__.lower()
    return ("attention" in called or "attn" in called) and any(
        isinstance(child, nn.Linear) for child in module.modules()
    )


def _layers(number: int, counted: bool = True) -> str:
    word = "layer" if number == 1 else "layers"
    return f"{number} {word}" if counted else word


def _verb(number: int) -> str:
    return "looks" if number == 1 else "look"


def _listed(layers: list[str]) -> str:
    more = f" and {len(layers) - SHOWN} more" if len(layers) > SHOWN else ""
    return ", ".join(layers[:SHOWN]) + more
