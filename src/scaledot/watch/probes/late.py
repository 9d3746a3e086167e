"""A probe for a package that may not be imported yet, and need never be."""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from scaledot.watch.probes import hub


class AfterImport(importlib.abc.MetaPathFinder):
    """Puts `probes()` in place now if `module` is imported already, else right after its import."""

    def __init__(self, module: str, probes: Callable[[], Iterable[Any]]) -> None:
        self.module, self.probes = module, probes
        self._looking = False
        self._placed: list[Any] = []

    def make(self, model: Any = None) -> None:
        if self.module in sys.modules:
            self._placed = self._placed or list(self.probes())
            for placed in self._placed:
                placed.make(model)
        elif self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def undo(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for placed in self._placed:
            placed.undo()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.module or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            hub.place_late(self)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
