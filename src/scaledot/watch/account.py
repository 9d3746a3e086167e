"""The account of a watch: which layers are measured, which are not, and why. Names, not modules."""

import logging

from torch import nn
from torch.fx import GraphModule

from scaledot.watch import models
from scaledot.watch.coverage import Coverage, Ledger
from scaledot.watch.names import Names
from scaledot.watch.probes import place
from scaledot.watch.probes.place import Place

log = logging.getLogger("scaledot.watch")

MOST_LOOKS = 4096  # softmaxes that are looked at; an evaluation without steps has no other end


class Account:
    """Keeps what the probes say; it is still right when the models are gone."""

    def __init__(self, names: Names, replace: bool) -> None:
        self.replace = replace
        self.looking = True  # for attention by hand: in the first steps
        self._names = names
        self._ledger = Ledger()
        self._listed = -1  # how many modules had names when the layers were listed
        self._looks = 0

    def met(self, name: str) -> None:
        """Note a call that is measured, if perhaps later."""
        self._list_layers()
        self._ledger.met(name)

    def saw(self, name: str) -> None:
        self._list_layers()
        self._ledger.saw(name)

    def coverage(self, begun: bool) -> Coverage:
        self._names.refresh()
        self._list_layers()
        return self._ledger.report(begun)

    def knows_models(self) -> bool:
        return bool(self._names.numbered_roots()) or self._listed > 0

    def add(self, root: nn.Module) -> None:
        self._names.add(root)
        self._list_layers()

    # What the probes call. -----------------------------------------------------------------------

    def takes_inventory(self) -> bool:
        if self.looking:
            self._looks += 1
            self.looking = self._looks < MOST_LOOKS
        return self.looking

    def found_by_hand(self, module: nn.Module | None) -> None:
        name = self._name(module, "softmax")
        if name is not None:
            self._list_layers()
            self._ledger.by_hand(name)

    def knows_attention(self) -> bool:
        return self._ledger.knows_any()

    def passed_by(self, kind: str, reason: str) -> None:
        if self._ledger.failed(kind, reason):
            log.warning("the watch cannot measure %s: %s", kind, reason)

    def cannot_see(self, kind: str, reason: str, module: nn.Module | None) -> None:
        name = self._name(module, kind)
        if name is None:
            return
        self._list_layers()
        if self._ledger.failed(name, reason):
            log.warning("the watch cannot measure %s, which calls %s: %s", name, kind, reason)

    def lost(self, name: str, kind: str, reason: str) -> None:
        """Note that a call which was put off could not be measured."""
        self._ledger.unsee(name)
        if self._ledger.failed(name, reason):
            log.warning("the watch cannot measure %s, which calls %s: %s", name, kind, reason)

    def keeps_own(self, kind: str, reason: str, module: nn.Module | None) -> None:
        name = self._name(module, kind)
        if name is not None:
            self._ledger.kept(name, reason)

    # ---------------------------------------------------------------------------------------------

    def _name(self, module: nn.Module | None, kind: str) -> str | None:
        """None: somebody else's attention."""
        where = within(self._names, place.here(), module)
        found = self._names.find(where.modules)
        return None if found is None else found[1] or where.caller or kind

    def _list_layers(self) -> None:
        if self._listed == self._names.known:
            return
        for number, root in self._names.numbered_roots().items():
            self._ledger.lists(number, root, self._names.name_of)
        self._listed = self._names.known


def within(names: Names, where: Place, module: nn.Module | None, compiled: bool = False) -> Place:
    """The place, with the attention's own module as the innermost where the probe knows it."""
    outer = tuple(other for other in where.modules if other is not module)
    if compiled:  # the graph itself is a module on the stack, and nobody's
        outer = tuple(other for other in outer if not isinstance(other, GraphModule))
    if module is None:
        return where._replace(modules=outer)
    if compiled and not outer and not names.knows(module):
        outer = (models.around(module),)  # a compiled function: no module was called on the way
    return where._replace(modules=(module, *outer))
