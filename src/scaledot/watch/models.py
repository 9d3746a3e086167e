"""The models of a process, where nobody hands them over."""

import gc
from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import Optimizer

from scaledot.watch.coverage import attention_modules
from scaledot.watch.names import WRAPPERS
from scaledot.watch.reading import summary


def trained_by(optimizer: Optimizer) -> list[nn.Module]:
    """Find the outermost modules that hold a parameter of the optimizer, in its order."""
    trained = [id(tensor) for group in optimizer.param_groups for tensor in group["params"]]
    place = {one: number for number, one in enumerate(trained)}
    found = []
    for model in _outermost():
        if held := place.keys() & _identities(model.parameters()):
            found.append((min(place[one] for one in held), -len(list(model.modules())), model))
    return [model for *_, model in sorted(found, key=lambda one: one[:2])]


def around(module: nn.Module) -> nn.Module:
    """Find the outermost module that it is a part of, of several the largest; else itself."""
    holders = [model for model in _outermost() if module in model.modules()]
    return max(holders, key=lambda model: len(list(model.modules())), default=module)


def in_words(models: Iterable[nn.Module]) -> str:
    """One line: class, parameters, their types, and how many layers look like attention."""
    parts = []
    for model in models:
        layers = len(attention_modules(model))
        counted = f"{layers} attention layer{'' if layers == 1 else 's'}"
        parts.append(f"{summary(_unwrapped(model))}, {counted}")
    return "; ".join(parts)


def _outermost() -> list[nn.Module]:
    """Find every module of the process that is no part of another, in no order to rely on."""
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
    parts = set().union(*(_identities(_children(module)) for module in found))
    return [module for module in found if id(module) not in parts]


def _children(module: nn.Module) -> Iterable[nn.Module]:
    children = vars(module).get("_modules")  # not there before nn.Module.__init__
    return () if children is None else [one for one in children.values() if one is not None]


def _identities(things: Iterable[nn.Module | Tensor]) -> set[int]:
    return {id(thing) for thing in things}


def _unwrapped(model: nn.Module) -> nn.Module:
    """A compiled or a distributed model is named after what it wraps."""
    for name in (*WRAPPERS, "module"):
        if [name] == [child for child, _ in model.named_children()]:
            return _unwrapped(model.get_submodule(name))
    return model
