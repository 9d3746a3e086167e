"""Exchange a function for another one wherever the program holds it."""

import functools
import gc
import sys
import weakref
from collections.abc import Iterable
from types import CellType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

LIBRARIES = ("torch", "scaledot")  # whose tables stay: they look functions up there, by themselves
KEPT_TYPES = (ModuleType, functools._lru_cache_wrapper)


class Pair(NamedTuple):
    """A type of its own, so that a search for what holds a function knows ours at once."""

    old: Any
    new: Any


Pairs = tuple[Pair, ...]

# Functions of ours that stand in the place of others, whose closures hold those, too.
stand_ins: "weakref.WeakSet[Any]" = weakref.WeakSet()


def exchange_names(pairs: Pairs, models: Iterable[nn.Module]) -> None:
    """Put each pair's second in the place of its first, under every name of the process."""
    new_by_old = {id(old): new for old, new in pairs}
    for name, namespace in _namespaces():
        # torch's tables of builtins are made from torch._C when they are first asked for.
        if not name.startswith("torch._C"):
            _in_dict(namespace, new_by_old)
    for model in models:
        for module in model.modules():  # self.attend = F.scaled_dot_product_attention
            _in_dict(vars(module), new_by_old)


def exchange_elsewhere(pairs: Pairs, back: bool = False) -> None:
    """The same in the program's tables, default arguments, partials, closures and objects.

    back: the firsts were put there before, and leave no entry behind.
    """
    if getattr(torch.__spec__, "_initializing", False):
        return  # there is no program yet
    new_by_old = {id(old): new for old, new in pairs}
    namespaces = {id(one): name for name, one in _namespaces()}
    for holder, owners in _holders(pairs, namespaces):
        _in_holder(holder, owners, new_by_old, back)


def references_to(pairs: Pairs) -> int:
    """How many references there are to the firsts of the pairs, the pairs' own included."""
    return sum(sys.getrefcount(pair[0]) for pair in pairs)


def _namespaces() -> Iterable[tuple[str, dict[str, Any]]]:
    """Every module's names."""
    for name, module in list(sys.modules.items()):
        if isinstance(namespace := getattr(module, "__dict__", None), dict):
            yield name, namespace


def _in_dict(names: dict[Any, Any], new_by_old: dict[int, Any]) -> None:
    """One pass over all names of the process, some hundred thousand: the common case is in C."""
    if not new_by_old.keys().isdisjoint(map(id, list(names.values()))):
        for name, value in list(names.items()):
            if id(value) in new_by_old:
                names[name] = new_by_old[id(value)]


def _holders(pairs: Pairs, namespaces: dict[int, str]) -> Iterable[tuple[Any, list[Any]]]:
    """What of the program holds one, with what holds that in turn."""
    originals = [old for old, _ in pairs]
    passed_by = {id(originals), *namespaces, *_tables(), *_parts(pairs)}
    holders = [
        one
        for one in gc.get_referrers(*originals)
        if not (id(one) in passed_by or _is_library(one, namespaces))
    ]
    holders = [one for one in holders if not (_is_entry(one) or _is_of_a_wrapper(one, originals))]
    owners = _owners(holders)  # a look at all objects of the process: for the program's own alone
    # A closure is a tuple of cells: the function is one further.
    tuples = [one for found in owners.values() for one in found if isinstance(one, tuple)]
    further = _owners(tuples)
    for holder in holders:
        found = list(owners.get(id(holder), ()))
        for one in tuple(found):
            found += further.get(id(one), ())
        if not any(_is_library(one, namespaces) for one in found):
            yield holder, found


def _tables() -> Iterable[int]:
    """torch's own, by identity, which are met in every process."""
    yield from map(id, vars(type(torch._C._VariableFunctions)).values())
    rules = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None and rules.get_torch_obj_rule_map.cache_info().currsize:
        yield id(rules.get_torch_obj_rule_map())


def _is_entry(one: Any) -> bool:
    """Tell whether it is one of torch.jit's table of builtins."""
    is_pair = isinstance(one, tuple) and len(one) == 2
    return is_pair and isinstance(one[1], str) and one[1].startswith("aten::")


def _is_of_a_wrapper(one: Any, originals: list[Any]) -> bool:
    """Tell whether it holds one only to say what a wrapper wraps, as functools.wraps does."""
    if not isinstance(one, dict) or "__wrapped__" not in one:
        return False
    known = set(map(id, originals))
    return [name for name, value in one.items() if id(value) in known] == ["__wrapped__"]


def _parts(pairs: Pairs) -> Iterable[int]:
    """The pairs, and what all stand-ins are made of, by identity."""
    yield id(pairs)
    waiting = [*(one for pair in pairs for one in pair), *stand_ins]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen or not isinstance(one, FunctionType):
            continue
        seen.add(id(one))
        if _is_library(one, {}):
            yield id(vars(one))
            waiting += vars(one).values()
            for cell in one.__closure__ or ():
                yield id(cell)
                waiting.append(cell.cell_contents)


def _owners(things: list[Any]) -> dict[int, list[Any]]:
    """What holds each of these, by their identity."""
    known = {id(one) for one in things}
    owners: dict[int, list[Any]] = {}
    for owner in gc.get_referrers(*things) if things else ():
        if owner is not things:
            for part in gc.get_referents(owner):
                if id(part) in known:
                    owners.setdefault(id(part), []).append(owner)
    return owners


def _is_library(thing: Any, namespaces: dict[int, str]) -> bool:
    """Whether torch or scaledot keeps it."""
    if isinstance(thing, KEPT_TYPES):
        return True
    if (name := namespaces.get(id(thing))) is None:
        if isinstance(thing, FunctionType):
            name = thing.__globals__.get("__name__", "")
        else:
            name = (thing if isinstance(thing, type) else type(thing)).__module__
    if not isinstance(name, str) or name.startswith("torch.nn.modules"):
        return False
    return name.partition(".")[0] in LIBRARIES


def _in_holder(holder: Any, owners: list[Any], new_by_old: dict[int, Any], back: bool) -> None:
    if isinstance(holder, dict):
        classes = [one for one in owners if isinstance(one, type)]
        for owner in classes:  # which keeps what it has looked up
            for name, value in list(holder.items()):
                if id(value) in new_by_old:
                    setattr(owner, name, new_by_old[id(value)])
        if not classes:
            _in_dict(holder, new_by_old)
            _in_keys(holder, new_by_old, back)
    elif isinstance(holder, list):
        holder[:] = [new_by_old.get(id(one), one) for one in holder]
    elif isinstance(holder, set):
        for one in [one for one in holder if id(one) in new_by_old]:
            holder.add(new_by_old[id(one)])
            if back:
                holder.discard(one)
    elif isinstance(holder, CellType):
        holder.cell_contents = new_by_old[id(holder.cell_contents)]
    elif isinstance(holder, staticmethod):
        holder.__init__(new_by_old[id(holder.__func__)])  # type: ignore[misc]
    elif isinstance(holder, functools.partial):
        new = new_by_old.get(id(holder.func), holder.func)
        holder.__setstate__((new, holder.args, holder.keywords, vars(holder)))  # type: ignore[attr-defined]
    elif isinstance(holder, tuple):
        for owner in owners:
            if isinstance(owner, FunctionType) and owner.__defaults__ is holder:
                owner.__defaults__ = tuple(new_by_old.get(id(one), one) for one in holder)
    elif isinstance(getattr(holder, "__dict__", None), dict):
        _in_dict(vars(holder), new_by_old)


def _in_keys(table: dict[Any, Any], new_by_old: dict[int, Any], back: bool) -> None:
    """A table of overrides, by function: it is asked for either one."""
    for key in [key for key in table if id(key) in new_by_old]:
        new, value = new_by_old[id(key)], table[key]
        if back:
            del table[key]
        table.setdefault(new, value)
