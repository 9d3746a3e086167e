"""`install`: a remedy in a watched run, from now on.

After each optimizer step that was measured, the heads' maxima of that step are turned into factors
and these into scaled weights, all on the device where the maxima are: the host reads nothing. On
steps that are not measured nothing happens at all. What was done is told from the watch's readings,
which come a step later.
"""

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from scaledot.watch.reading import Reading, Scalar
from scaledot.watch.remedies import discover, rows
from scaledot.watch.remedies.applied import Applied, apply, rule_of, why_not_at_call
from scaledot.watch.remedies.beside import InputsOfStep, Overheard, StepEnd
from scaledot.watch.remedies.remedy import Remedy, parse
from scaledot.watch.remedies.rows import Layer
from scaledot.watch.remedies.rules import Rule, Temperature
from scaledot.watch.watch import Watch

log = logging.getLogger("scaledot.watch")
NOBODY = nn.Module()  # is never called
Say = Callable[[str], None]


def install(
    watch: Watch, remedy: Remedy | str, dry_run: bool = False, say: Say | None = None
) -> "Installed":
    """Apply a remedy from now on, in the run that `watch` watches; `.remove()` ends it.

    dry_run: change nothing and say what would be done. say: gets lines for the user; without it
    they go to the log. qk-clip and temperature act on steps that are measured, so the watch then
    looks at every step, unless it was told how often (every=N).
    """
    remedy = parse(remedy) if isinstance(remedy, str) else remedy
    installed = _Clipping if remedy.kind.reads else _Once
    return installed(watch, remedy, dry_run, say or log.warning)


class Installed:
    """A remedy at work. `describe` says what it has done so far."""

    def __init__(self, watch: Watch, remedy: Remedy, dry_run: bool, say: Say) -> None:
        self.remedy, self.dry_run = remedy, dry_run
        self._watch, self._say = watch, say

    def describe(self) -> str:
        raise NotImplementedError

    def remove(self) -> None:
        """Stop. Weights keep their values; a change at the call is taken away."""
        raise NotImplementedError


class _Once(Installed):
    """A remedy without readings: in place from the first call, or from the first step's end."""

    def __init__(self, watch: Watch, remedy: Remedy, dry_run: bool, say: Say) -> None:
        super().__init__(watch, remedy, dry_run, say)
        self._applied = Applied(remedy)
        self._ends: StepEnd | None = None
        if dry_run:
            say(f"{remedy} would change {remedy.kind.changes}; state dict: {remedy.kind.keys}")
        elif remedy.kind.at_call:
            self._applied.add_rule("", watch.model, rule_of(remedy))
            self._applied.changes.append("every attention call")
            say(f"{remedy} changes {remedy.kind.changes}")
        else:
            self._ends = StepEnd(watch, self._reparametrise)

    def describe(self) -> str:
        if self.dry_run:
            return f"{self.remedy} (dry run): would change {self.remedy.kind.changes}"
        return self._applied.describe()

    def remove(self) -> None:
        if self._ends is not None:
            self._ends.remove()
        self._applied.undo()

    def _reparametrise(self, optimizer: Optimizer | None) -> None:
        """At the end of the first step, when the model and its optimizer are known."""
        assert self._ends is not None
        roots = [self._watch.model] if self._watch.model is not None else self._watch._names.roots()
        if not roots:
            return
        self._ends.remove()
        # A scheduler has a list of the groups it found; one more would be trained at another rate.
        scheduled = getattr(optimizer and optimizer.step, "_wrapped_by_lr_sched", False)
        applied = [apply(self.remedy, root, None if scheduled else optimizer) for root in roots]
        for one in applied:
            self._applied.changes += one.changes
            self._applied.keep(one.undo)
        self._say(self._applied.describe())


class _Clipping(Installed):
    """qk-clip and temperature: gamma = limit / max of each head above it, after the step."""

    def __init__(self, watch: Watch, remedy: Remedy, dry_run: bool, say: Say) -> None:
        super().__init__(watch, remedy, dry_run, say)
        if not (watch.cadence.fixed or dry_run):
            watch.cadence.fixed, watch.cadence.every = True, 1
        self.layers: dict[str, Layer] = {}  # that are known
        self.refused: dict[str, str] = {}
        self.clips: dict[str, dict[int, int]] = {}  # of each layer and head, how many
        self.first: int | None = None  # step with the first
        self._rules: dict[str, Temperature] = {}
        self._applied = Applied(remedy)
        self._pending: dict[str, Tensor] = {}  # gamma, until the weights' optimizer has stepped
        self._asked: set[str] = set()  # layers for which inputs were asked for
        self._first_of: dict[str, Reading] = {}  # of each layer, with a head above the limit
        self._announced: set[str] = set()
        # Before the first call: the watch tells a module's attentions apart by the lines between
        # the module and the call, and the stand-ins are such lines.
        self._applied.add_rule("", NOBODY, Rule())
        self._inputs = InputsOfStep(watch)
        self._maxima = Overheard.in_place_of(watch)
        self._ends = StepEnd(watch, self._step_ended, self._inputs.remove)
        watch._deliveries.append(self._read)

    def describe(self) -> str:
        number = sum(sum(heads.values()) for heads in self.clips.values())
        heads = sum(len(heads) for heads in self.clips.values())
        would = " (dry run): would have clipped" if self.dry_run else " has clipped"
        first = "" if self.first is None else f", the first in step {self.first}"
        lines = [f"{self.remedy}{would} {number} times, {heads} heads{first}"]
        for name, layer in self.layers.items():
            if name in self.refused:
                lines.append(f"  {name}: refused: {self.refused[name]}")
            elif name in self.clips:
                lines.append(f"  {name}: heads {sorted(self.clips[name])}: {self._how(layer)}")
        lines.append(f"  state dict: {self.remedy.kind.keys}")
        return "\n".join(lines)

    def remove(self) -> None:
        self._ends.remove()
        self._inputs.remove()
        self._maxima.remove()
        if self._read in self._watch._deliveries:
            self._watch._deliveries.remove(self._read)
        self._applied.undo()

    # After a step. -------------------------------------------------------------------------------

    def _step_ended(self, optimizer: Optimizer | None) -> None:
        maxima = self._maxima.taken()
        if maxima:
            if unknown := [name for name in maxima if name not in self.layers]:
                self._find(unknown)
            self._pending = {
                name: rows.gamma_of(maximum, self.remedy.number)
                for name, maximum in _over_ranks(maxima).items()
                if name in self.layers
            }
        self._inputs.drop()
        if self._pending:
            self._scale(optimizer)

    def _scale(self, optimizer: Optimizer | None) -> None:
        for name, gamma in list(self._pending.items()):
            layer = self.layers[name]
            if name in self.refused or self.dry_run or len(gamma) != layer.heads:
                del self._pending[name]
            elif name in self._rules:
                self._rules[name].times_(self._pending.pop(name))
            elif optimizer is None or _holds(optimizer, layer):
                layer.scale_(self._pending.pop(name))

    def _find(self, unknown: list[str]) -> None:
        """The layers' weights, from one more forward pass on what the model was given."""
        inputs, reason = self._inputs.taken(), "its inputs could not be taken from the run"
        if inputs is None and not self._asked.issuperset(unknown):
            self._asked.update(unknown)  # in the next step that is measured
            self._inputs.ask()
            return
        found: dict[str, Layer] = {}
        if inputs is not None:
            try:
                found = discover.layers(inputs, self._watch._names)
                reason = "a second forward pass did not call it"
            except Exception as error:
                reason = f"a second forward pass failed: {type(error).__name__}: {error}"
        model = nn.Module() if inputs is None else inputs.model
        for name in unknown:
            layer = found.get(name) or Layer(name, 0, None, "attention", refused=reason)
            self.layers[name] = layer
            self._prepare(name, layer, model)
        self._announce()

    def _prepare(self, name: str, layer: Layer, model: nn.Module) -> None:
        if layer.parts and self.remedy.name == "qk-clip":
            return
        after_norm = self.remedy.name == "temperature"
        reason = layer.refused if not layer.heads else why_not_at_call(layer, model, after_norm)
        if reason:
            self.refused[name] = reason
            self._say(f"{self.remedy} is refused in {name}: {reason}")
        elif not self.dry_run:
            assert layer.max_logit is not None
            rule = Temperature(torch.ones_like(layer.max_logit))
            self._rules[name] = rule
            self._applied.add_rule(name, layer.module, rule)

    def _how(self, layer: Layer) -> str:
        if layer.parts and self.remedy.name == "qk-clip":
            return f"{layer.rule()}: {', '.join(part.path for part in layer.parts)}"
        return "one factor a head on the queries, at the call"

    # What the watch tells. -----------------------------------------------------------------------

    def _read(self, readings: Sequence[Reading], scalars: Sequence[Scalar]) -> None:
        for reading in readings:
            if reading.phase != "train" or reading.layer in self.refused:
                continue
            above = (reading.value("max_logit") > self.remedy.number).nonzero()[0].tolist()
            if above:
                self._count(reading, above)

    def _count(self, reading: Reading, above: list[int]) -> None:
        if self.first is None:
            self.first = reading.step
        known = self.clips.setdefault(reading.layer, {})
        for head in above:
            known[head] = known.get(head, 0) + 1
        self._first_of.setdefault(reading.layer, reading)
        self._announce()

    def _announce(self) -> None:
        """Once a layer, as soon as its weights are known."""
        for name, reading in self._first_of.items():
            if name in self._announced or name not in self.layers or name in self.refused:
                continue
            self._announced.add(name)
            head = int(reading.value("max_logit").argmax())
            largest = float(reading.value("max_logit")[head])
            verb = "would scale" if self.dry_run else "scales"
            self._say(
                f"{self.remedy} {verb} {name} since step {reading.step}: head {head} had a logit "
                f"of {largest:.4g}, so x {self.remedy.number / largest:.3g}: "
                f"{self._how(self.layers[name])}"
            )


def _holds(optimizer: Optimizer, layer: Layer) -> bool:
    """Two optimizers may share a model: who steps the weights comes before the clip."""
    held = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    return any(id(part.parameter) in held for part in layer.parts)


def _over_ranks(maxima: dict[str, Tensor]) -> dict[str, Tensor]:
    """The largest of all ranks: replicas must stay alike. One collective for all layers."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return maxima
    if distributed.get_world_size() == 1:
        return maxima
    packed = torch.cat(list(maxima.values()))
    distributed.all_reduce(packed, distributed.ReduceOp.MAX)
    parts = packed.split([len(maximum) for maximum in maxima.values()])
    return dict(zip(maxima, parts, strict=True))
