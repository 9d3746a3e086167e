"""A function swapped for another wherever a module knows it by name, and swapped back."""

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.jit import _builtins

INHERITED = object()


class Swap:
    """Each original becomes its replacement in every module's globals and in the models' modules.

    A script that says `from torch.nn.functional import scaled_dot_product_attention` holds the
    function under a name of its own: one attribute is not enough. What is imported by name while
    the swap lasts is found at the end in the same way.
    """

    def __init__(self, *pairs: tuple[Callable[..., Any], Callable[..., Any]]) -> None:
        self.pairs = pairs
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def make(self, model: nn.Module | None = None) -> None:
        if model is not None:
            self._models.add(model)
        _exchange(self.pairs, _holders(self._models))

    def undo(self) -> None:
        _exchange([(new, old) for old, new in self.pairs], _holders(self._models))


class Item:
    """One entry of a dictionary: for registries."""

    def __init__(self, owner: dict[Any, Any], name: Any, replacement: Any) -> None:
        self.owner, self.name, self.replacement = owner, name, replacement
        self.original = owner[name]
        self._made = False

    def make(self, model: nn.Module | None = None) -> None:
        if not self._made:
            self.owner[self.name] = self.replacement
            self._made = True

    def undo(self) -> None:
        self._made = False
        if self.owner.get(self.name) is self.replacement:
            self.owner[self.name] = self.original


class KnownToScript:
    """torch.jit.script knows builtins by identity: the stand-in is the same operator to it."""

    def __init__(self, replacement: Any, operator: str) -> None:
        self._replacement, self._operator = replacement, operator

    def make(self, model: nn.Module | None = None) -> None:
        _builtins._get_builtin_table()[id(self._replacement)] = self._operator

    def undo(self) -> None:
        _builtins._get_builtin_table().pop(id(self._replacement), None)


class Attribute:
    """One attribute of one object: for methods, and functions that are looked up at every call.

    What the object only inherits is put before the inherited one, and taken away again.
    """

    def __init__(self, owner: Any, name: str, replacement: Any) -> None:
        self.owner, self.name, self.replacement = owner, name, replacement
        self.original = vars(owner).get(name, INHERITED)
        self._made = False

    def make(self, model: nn.Module | None = None) -> None:
        if not self._made:
            setattr(self.owner, self.name, self.replacement)
            self._made = True

    def undo(self) -> None:
        self._made = False
        # Somebody may have wrapped the replacement since. Theirs stays: it was asked for later.
        if vars(self.owner).get(self.name) is not self.replacement:
            return
        if self.original is INHERITED:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.original)


def _holders(models: Iterable[nn.Module]) -> Iterable[dict[str, Any]]:
    """Every namespace in which a function may have been kept under a name."""
    for name, module in list(sys.modules.items()):
        # torch's tables of builtins are made from torch._C when they are first asked for.
        if isinstance(namespace := getattr(module, "__dict__", None), dict) and not name.startswith(
            "torch._C"
        ):
            yield namespace
    for model in models:
        for module in model.modules():  # self.attend = F.scaled_dot_product_attention
            yield vars(module)


def _exchange(pairs: Iterable[tuple[Any, Any]], holders: Iterable[dict[str, Any]]) -> None:
    """One pass over all names of the process, some hundred thousand: the common case is in C."""
    new_by_old = {id(old): new for old, new in pairs}
    for namespace in holders:
        if not new_by_old.keys().isdisjoint(map(id, list(namespace.values()))):
            for name, value in list(namespace.items()):
                if id(value) in new_by_old:
                    namespace[name] = new_by_old[id(value)]
