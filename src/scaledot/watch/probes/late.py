"""A probe for a package that may not be imported yet, and need never be."""

import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from scaledot.watch.probes import frames, hub

# Where Python looks for every module that it does not know yet. sys.meta_path would do, but
# programs look at it, and put their own finders before and behind what they find there.
_importing: Any = sys.modules["_frozen_importlib"]
_waiting: list["AfterImport"] = []
_below: Any = None  # what `_find` stands in front of


class AfterImport:
    """Puts `probes()` in place now if `module` is imported already, else right after its import."""

    def __init__(self, module: str, probes: Callable[[], Iterable[Any]]) -> None:
        self.module, self.probes = module, probes
        self._placed: list[Any] = []

    def make(self, model: Any = None) -> None:
        if self.module in sys.modules:
            self._placed = self._placed or list(self.probes())
            for placed in self._placed:
                placed.make(model)
        elif self not in _waiting:
            _waiting.append(self)
            _follow_imports()

    def undo(self) -> None:
        _wait_no_more(self)
        for placed in self._placed:
            placed.undo()

    def imported(self) -> None:
        _wait_no_more(self)
        hub.place_late(self)


def _follow_imports() -> None:
    global _below
    if _below is None:
        _below, _importing._find_spec = _importing._find_spec, _find


def _wait_no_more(one: AfterImport) -> None:
    global _below
    if one in _waiting:
        _waiting.remove(one)
    # Where somebody has put theirs above ours since, both stay, and ours only passes on.
    if not _waiting and _importing._find_spec is _find:
        _importing._find_spec, _below = _below, None


def _find(name: str, *where: Any) -> Any:
    below = _below
    if below is None:  # another thread was on its way here when the last one was imported
        return _importing._find_spec(name, *where)
    spec = below(name, *where)
    if spec is None or spec.loader is None or all(one.module != name for one in _waiting):
        return spec
    execute = spec.loader.exec_module

    def exec_module(module: ModuleType) -> None:
        try:
            execute(module)
        except BaseException as error:
            frames.hide(error)
            raise
        for one in [one for one in _waiting if one.module == name]:
            one.imported()

    spec.loader.exec_module = exec_module
    return spec
