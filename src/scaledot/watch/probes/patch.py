"""A function swapped for another wherever a module knows it by name, and swapped back."""

import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import nn
from torch.jit import _builtins

from scaledot.watch.probes import holders

INHERITED = object()


class Swap:
    """Each original becomes its replacement wherever the program holds it.

    A script that says `from torch.nn.functional import scaled_dot_product_attention` holds the
    function under a name of its own: one attribute is not enough. What is imported by name while
    the swap lasts is found at the end in the same way.
    """

    def __init__(
        self, *pairs: tuple[Callable[..., Any], Callable[..., Any]], everywhere: bool = True
    ) -> None:
        """everywhere: also in tables, default arguments and closures, not only under names."""
        self.pairs = tuple(holders.Pair(*pair) for pair in pairs)
        self._everywhere = everywhere
        holders.stand_ins.update(pair.new for pair in self.pairs)
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._references = 0  # to the replacements, before the program knows them

    def make(self, model: nn.Module | None = None) -> None:
        if model is not None:
            self._models.add(model)
        back = self._back()
        self._references = self._references or holders.references_to(back)
        holders.exchange_names(self.pairs, self._models)
        if self._everywhere:
            holders.exchange_elsewhere(self.pairs)

    def undo(self) -> None:
        back = self._back()
        holders.exchange_names(back, self._models)
        if self._everywhere and holders.references_to(back) > self._references:
            holders.exchange_elsewhere(back, back=True)

    def _back(self) -> holders.Pairs:
        return tuple(holders.Pair(new, old) for old, new in self.pairs)


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

    def __init__(self, original: Any, replacement: Any, operator: str) -> None:
        self._original, self._replacement, self._operator = original, replacement, operator

    def make(self, model: nn.Module | None = None) -> None:
        table = _builtins._get_builtin_table()
        table[id(self._replacement)] = self._operator
        # torch makes the table when it is first asked for, of what lies under its names then.
        table.setdefault(id(self._original), self._operator)

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


def stands_for(original: Any, stand_in: Any, place: tuple[str, str] | None = None) -> Any:
    """Give the stand-in the looks of the original: to inspect, pickle, torch.fx and torch.jit.

    place: the module and the name in it under which the stand-in is found, where the original
    calls itself something else. pickle writes these down, so that what holds a stand-in (a model
    with `self.attend = F.scaled_dot_product_attention`) is read again without a watch.
    """
    stand_in.__name__ = original.__name__
    stand_in.__qualname__ = getattr(original, "__qualname__", original.__name__)
    stand_in.__doc__ = original.__doc__
    stand_in.__wrapped__ = original
    holders.stand_ins.add(stand_in)
    if isinstance(original, FunctionType):
        stand_in.__module__ = original.__module__
        stand_in.__prepare_scriptable__ = lambda: original
    if place is not None:
        stand_in.__module__, stand_in.__qualname__ = place
    return stand_in
