"""Which layer a call of attention belongs to: read from the stack, and remembered.

A training step makes the same calls as the one before. What was found out about a call is kept by
its innermost module and the lines from there to the call, for a module is named once. Where more
of the stack has to be known, it is read at every call: outside of modules, without gradients (an
autograd.Function around it may want them), and where ranks may share a layer's heads.
"""

import itertools
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from scaledot.watch.account import within
from scaledot.watch.names import Names
from scaledot.watch.probes import place
from scaledot.watch.probes.seen import Seen
from scaledot.watch.ranks import shares
from scaledot.watch.reading import Phase
from scaledot.watch.steps import phase_of

MOST = 4096  # calls that are remembered; modules that come and go must not fill the memory
# Frames between `place.near` and the model's own line that are there at every call: of the probe,
# hub.offer, the listener's saw, and Layers.of.
OURS = 4


class Layer(NamedTuple):
    name: str  # the module's; "": it is in none
    layer: str  # what its readings are called
    phase: Phase
    module: nn.Module | None  # that is named
    running: tuple[nn.Module, ...]  # around the call, the innermost first; () where heads are whole
    known: "Known | None" = None  # what will be found again for the next such call


@dataclass(slots=True, eq=False)
class Known:
    """What is remembered of the calls at one place of a module."""

    module: "weakref.ref[nn.Module]"
    name: str
    layer: str
    codes: place.Site  # kept, so that no other code takes their addresses
    call: Any = None  # what the watch has made of the last one


class Layers:
    def __init__(self, names: Names) -> None:
        self._names = names
        self._known: dict[tuple[int, object, Phase], Known] = {}  # by the module's id, and site
        self._innermost: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()

    def of(self, seen: Seen) -> Layer | None:
        """None: somebody else's attention."""
        knows_phase = seen.training is not None or torch.is_grad_enabled()
        if not knows_phase or shares.may_be_shared():
            return self._read(seen, place.here())
        if seen.module is not None:
            module, site = seen.module, seen.site
        elif seen.near is not None:
            module, site = seen.near
        elif not seen.compiled:
            module, site = place.near(OURS)
        else:
            module, site = None, ()
        if module is None:
            return self._read(seen, place.here())
        training = module.training if seen.training is None else seen.training
        phase: Phase = "train" if training else "eval"
        known = self._known.get((id(module), site, phase))
        if known is not None and known.module() is module:
            return Layer(known.name, known.layer, phase, module, (), known)
        where = place.here()
        found = self._read(seen, where)
        if found is not None and found.module is module:
            if len(self._known) >= MOST:
                self._known.clear()
            known = Known(weakref.ref(module), found.name, found.layer, where.site)
            self._known[id(module), site, phase] = known
            return found._replace(known=known)
        return found

    def in_training(self, near: place.Near) -> Known | None:
        """Return what is known of a call that belongs to training; None: it has to be read."""
        module = near.module
        if module is None or not (module.training and torch.is_grad_enabled()):
            return None
        known = self._known.get((id(module), near.lines, "train"))
        if known is None or known.module() is not module or shares.may_be_shared():
            return None
        return known

    def _read(self, seen: Seen, here: place.Place) -> Layer | None:
        where = within(self._names, here, seen.module, seen.compiled)
        found = self._names.find(where.modules)
        if found is None:
            return None
        module, name = found
        phase = _phase(seen, where, module)
        layer = self._names.layer(name, phase, where, self._site(seen, where, module))
        return Layer(name, layer, phase, module, where.modules)

    def _site(self, seen: Seen, where: place.Place, module: nn.Module | None) -> object:
        """What tells two attentions of one module apart."""
        if seen.compiled:
            return seen.site
        if seen.module is not None or isinstance(module, nn.MultiheadAttention):
            return ()  # the module is the attention, whichever of its paths it takes
        innermost = where.modules[0] if where.modules else None
        if innermost is None or innermost is module:
            return where.site
        return (*where.site, self._number(innermost))

    def _number(self, module: nn.Module) -> int:
        """Number a module without a name. One made anew for each call gets its forerunner's."""
        number = self._innermost.get(module)
        if number is None:
            taken = set(self._innermost.values())
            number = next(number for number in itertools.count() if number not in taken)
            self._innermost[module] = number
        return number


def _phase(seen: Seen, where: place.Place, module: nn.Module | None) -> Phase:
    if seen.training is not None:
        return "train" if seen.training else "eval"
    return phase_of(module, where.inside_function)
