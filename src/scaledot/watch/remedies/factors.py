"""The temperatures of a run: one factor a head, of all layers of all ranks in one tensor.

Every rank keeps all of them, for the maxima of all heads reach it anyway: so any rank can write a
whole checkpoint without asking the others.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from scaledot.watch.probes import place
from scaledot.watch.remedies import shards
from scaledot.watch.remedies.applied import Applied
from scaledot.watch.remedies.ranks import AT_CALL, Entry, Ranks
from scaledot.watch.remedies.remedy import RemedyError
from scaledot.watch.remedies.rules import Arguments, Temperature
from scaledot.watch.watch import Watch

NAME = "factor"


class Factors:
    """Turned with every measured step; `state` and `load` for checkpoints."""

    def __init__(self, ranks: Ranks, applied: Applied, watch: Watch) -> None:
        self._ranks, self._applied, self._watch = ranks, applied, watch
        self._all: Tensor | None = None  # [heads of all entries]
        self._at_call: Tensor | None = None  # [heads of all entries], bool
        self._rules: dict[str, Temperature] = {}
        self._loaded: dict[str, Tensor] = {}  # [heads of the whole layer], where the factors begin

    def grow(self, modules: Mapping[str, nn.Module | None]) -> None:
        """After the ranks have met: factors for the new entries, rules for the layers of mine."""
        known = 0 if self._all is None else len(self._all)
        new = [self._first(one) for one in self._ranks.entries if one.first >= known]
        if new:
            before = [] if self._all is None else [self._all.to(new[0])]
            self._all = torch.cat([*before, *new])
        self._at_call = None
        for name, module in modules.items():
            entry = self._ranks.of(name)
            if entry is None or entry.said.way != AT_CALL or name in self._rules:
                continue
            self._rules[name] = Temperature(self._part(entry))
            self._applied.add_rule(name, module, self._rules[name])
        for name in list(self._rules):
            self._put(name)

    def turn(self, gamma: Tensor) -> None:
        """gamma: [heads of all entries], of the step that has ended."""
        if self._all is None or not self._any_at_call():
            return
        if self._at_call is None or self._at_call.device != gamma.device:
            marks = [
                torch.full((one.said.heads,), one.said.way == AT_CALL)
                for one in self._ranks.entries
            ]
            self._at_call = torch.cat(marks).to(gamma.device)
        turned = torch.where(self._at_call, gamma, 1.0)
        # A new tensor: the graph of the step that is over may still hold the old one.
        self._all = self._all.to(gamma) * turned
        for name in self._rules:
            self._put(name)

    def state(self) -> dict[str, Tensor]:
        """{"LAYER.factor": [heads of the whole layer]}; the same on all ranks that have it."""
        found = {f"{name}.{NAME}": factor.clone() for name, factor in self._loaded.items()}
        for entry in self._ranks.entries:
            name = entry.said.layer
            if entry.said.way == AT_CALL and self._ranks.of(name) is not None:
                parts = [self._part(one) for one in self._ranks.all_heads_of(name)]
                found[f"{name}.{NAME}"] = torch.cat(parts).detach().clone()
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Layers whose modules are known are treated from the next call on."""
        for key, factor in state.items():
            name, _, kind = key.rpartition(".")
            if kind != NAME or factor.dim() != 1:
                raise RemedyError(
                    f"{key!r} is no factor of a layer; give what the remedy's state_dict() returned"
                )
            self._loaded[name] = factor.detach().clone()
        for name in list(self._loaded):
            entry = self._ranks.of(name)
            if entry is not None:
                self._overwrite(entry)
            elif (module := self._named(name)) is not None and name not in self._rules:
                self._rules[name] = Resumed(self._loaded[name])
                self._applied.add_rule(name, module, self._rules[name])

    def _any_at_call(self) -> bool:
        return any(entry.said.way == AT_CALL for entry in self._ranks.entries)

    def _part(self, entry: Entry) -> Tensor:
        assert self._all is not None
        return self._all[entry.places]

    def _put(self, name: str) -> None:
        """A layer that is known from a checkpoint alone keeps what was loaded."""
        entry = self._ranks.of(name)
        if entry is not None:
            self._rules[name].factor = self._part(entry)

    def _first(self, entry: Entry) -> Tensor:
        loaded = self._loaded.get(entry.said.layer)
        return torch.ones(entry.said.heads) if loaded is None else _share(loaded, entry)

    def _overwrite(self, entry: Entry) -> None:
        assert self._all is not None
        factor = self._loaded[entry.said.layer]
        changed = self._all.clone()
        for one in self._ranks.all_heads_of(entry.said.layer):
            changed[one.places] = _share(factor, one).to(changed)
        self._all = changed
        for name in self._rules:
            self._put(name)

    def _named(self, name: str) -> nn.Module | None:
        model = self._watch.model
        if model is None:
            return None  # nobody knows it before its first call
        names = self._watch._names
        names.add(model)
        found = (module for module in model.modules() if names.name_of(module) == name)
        return next(found, None)


class Resumed(Temperature):
    """From a checkpoint, for all heads of a layer: of them those that are computed here."""

    def change(self, given: Arguments) -> Arguments:
        heads = given.query.shape[-3]
        if len(self.factor) > heads and given.query.dim() == 4:
            for module in place.here().modules:
                part, parts = shards.share(module.parameters())
                if parts * heads == len(self.factor):
                    self.factor = self.factor[part * heads : (part + 1) * heads]
                    break
            else:
                raise RemedyError(
                    f"the checkpoint has factors for {len(self.factor)} heads and the call has "
                    f"{heads}; load the factors of this model"
                )
        return super().change(given)


def _share(factor: Tensor, entry: Entry) -> Tensor:
    """Of all heads of a layer, an entry's."""
    part, parts = entry.said.share
    heads = entry.said.heads
    if len(factor) == heads:
        return factor
    if len(factor) != heads * parts:
        raise RemedyError(
            f"the checkpoint has factors for {len(factor)} heads of {entry.said.layer}, which has "
            f"{heads * parts}; load the factors of this model"
        )
    return factor[part * heads : (part + 1) * heads]
