"""What a layer is called: the path of the module that runs when attention is called."""

import weakref

from torch import nn

from scaledot.watch.probes.place import Place

# Modules that only wrap another put these into the path; the model's author never wrote them.
WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
PARALLEL = (nn.parallel.DistributedDataParallel, nn.parallel.DataParallel)


MOST_SITES = 64  # attentions of one module that are told apart


class Names:
    """Paths from the watched model or, without one, from the outermost module that is called."""

    def __init__(self, model: nn.Module | None) -> None:
        self._given = model is not None
        self.known = 0  # modules that were given a name: who lists them looks again when it grows
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._owners: dict[str, int] = {}  # which root a name belongs to
        self._roots: list[weakref.ref[nn.Module]] = []
        self._sites: dict[tuple[str, str], dict[object, int]] = {}
        if model is not None:
            self.add(model)

    def find(self, running: tuple[nn.Module, ...]) -> tuple[nn.Module | None, str] | None:
        """The named module nearest to the call, and its name; None: not part of the model."""
        if not running:
            return None if self._given else (None, "")
        if running[0] not in self._names:  # not seen before, or added to the model since
            for root in self.roots() if self._given else [running[-1]]:
                self.add(root)
        for module in running:
            name = self._names.get(module)
            if name is not None:
                return module, name
        return None

    def roots(self) -> list[nn.Module]:
        return list(self.numbered_roots().values())

    def numbered_roots(self) -> dict[int, nn.Module]:
        """The models that are still there, by their number among all that were."""
        alive = ((number, weak()) for number, weak in enumerate(self._roots))
        return {number: root for number, root in alive if root is not None}

    def knows(self, module: nn.Module) -> bool:
        return self._given or module in self._names

    def name_of(self, module: nn.Module) -> str:
        """Of a module below a root."""
        return self._names[module]

    def names(self) -> list[str]:
        """Of all modules that have one."""
        return list(self._names.values())

    def refresh(self) -> None:
        """Name what was added to the models since they were looked at."""
        for root in self.roots():
            self.add(root)

    def layer(self, name: str, phase: str, place: Place, site: object) -> str:
        """The name, with #2, #3 for further attentions of the same module."""
        name = name or place.caller or "attention"
        sites = self._sites.setdefault((name, phase), {})
        if site not in sites and len(sites) < MOST_SITES:
            sites[site] = len(sites) + 1
        number = sites.get(site, MOST_SITES)
        return name if number == 1 else f"{name}#{number}"

    def add(self, root: nn.Module) -> None:
        if all(weak() is not root for weak in self._roots):
            self._roots.append(weakref.ref(root))
        number = next(i for i, weak in enumerate(self._roots) if weak() is root)
        prefix = f"{type(root).__name__}." if number else ""
        for path, module in root.named_modules():
            if module in self._names:
                continue
            name = prefix + _plain(path, root) if path else type(root).__name__
            # Within a root a path is met twice only where a wrapper stands before its module.
            while self._owners.setdefault(name, number) != number:
                stem, _, count = name.partition("@")
                name = f"{stem}@{int(count or 1) + 1}"
            self._names[module] = name
            self.known += 1


def _plain(path: str, root: nn.Module) -> str:
    parts = [part for part in path.split(".") if part not in WRAPPERS]
    if isinstance(root, PARALLEL) and parts and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts) or type(root).__name__
