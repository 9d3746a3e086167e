"""`install`: a remedy in a watched run, from now on.

After each optimizer step that was measured, the heads' maxima of that step are turned into factors
and these into scaled weights, all on the device where the maxima are: the host reads nothing. On
steps that are not measured nothing happens at all. What was done is told from the watch's readings,
which come a step later. With several ranks (`ranks`), all of them take part in every measured step,
also those that have seen no attention.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from scaledot.watch.names import PARALLEL
from scaledot.watch.reading import Reading, Scalar
from scaledot.watch.remedies import discover, rows, shards
from scaledot.watch.remedies.applied import Applied, apply, refuse_unequal, rule_of
from scaledot.watch.remedies.beside import InputsOfStep, Overheard, StepEnd, Unreached
from scaledot.watch.remedies.capture import Inputs
from scaledot.watch.remedies.factors import Factors
from scaledot.watch.remedies.ranks import BY_WEIGHTS, REFUSED, Ranks, together
from scaledot.watch.remedies.remedy import Remedy, RemedyError, parse
from scaledot.watch.remedies.rows import Layer
from scaledot.watch.remedies.rules import Rule
from scaledot.watch.remedies.ways import said_of
from scaledot.watch.watch import Watch

log = logging.getLogger("scaledot.watch")
NOBODY = nn.Module()  # is never called
Say = Callable[[str], None]


def install(
    watch: Watch, remedy: Remedy | str, dry_run: bool = False, say: Say | None = None
) -> "Installed":
    """Apply a remedy from now on, in the run that `watch` watches; `.remove()` ends it.

    dry_run: change nothing and say what would be done. say: gets lines for the user, print for
    example; without it they go to the log, of the first rank only. qk-clip and temperature act on
    steps that are measured, so the watch then looks at every step, unless it was told how often
    (every=N). With several ranks every one of them installs it.
    """
    remedy = parse(remedy) if isinstance(remedy, str) else remedy
    installed = _Clipping if remedy.kind.reads else _Once
    return installed(watch, remedy, dry_run, say or _log_of_first_rank)


def _log_of_first_rank(line: str) -> None:
    if Ranks().mine == 0:
        log.warning(line)


class Installed:
    """A remedy at work. `describe` says what it has done so far."""

    def __init__(self, watch: Watch, remedy: Remedy, dry_run: bool, say: Say) -> None:
        self.remedy, self.dry_run = remedy, dry_run
        self._watch, self._say = watch, say
        watch.remedies.append(self)

    def describe(self) -> str:
        raise NotImplementedError

    def note(self) -> dict[str, Any]:
        """What the store keeps: since and layers are null and empty before anything was done."""
        since, layers, refused = self._deeds()
        return {
            "spec": str(self.remedy),
            "dry_run": self.dry_run,
            "since": since,
            "layers": layers,
            "refused": refused,
            "words": self.describe(),
        }

    def _deeds(self) -> tuple[int | None, list[str], list[str]]:
        """Since which step, in which layers where these are known, and where it was refused."""
        raise NotImplementedError

    def remove(self) -> None:
        """Stop. Weights keep their values; a change at the call is taken away."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Tensor]:
        """What the model's own state dict does not hold, by layer; the same on all ranks."""
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Resume: before the first step, so that its forward pass is as it would have been."""
        raise NotImplementedError


class _Once(Installed):
    """A remedy without readings: in place from the first call, or from the first step's end."""

    def __init__(self, watch: Watch, remedy: Remedy, dry_run: bool, say: Say) -> None:
        super().__init__(watch, remedy, dry_run, say)
        self._applied = Applied(remedy)
        self._since: int | None = watch.step_number if dry_run else None
        self._refused: list[str] = []
        self._ends: StepEnd | None = None
        if dry_run:
            say(f"{remedy} would change {remedy.kind.changes}; state dict: {remedy.kind.keys}")
        elif remedy.kind.at_call:
            refuse_unequal(remedy)
            self._applied.nothing = "nothing was changed: it has met no attention call that it can"
            rule = rule_of(remedy)
            rule.first_used = self._first_used  # type: ignore[method-assign]
            self._applied.add_rule("", watch.model, rule)
            self._applied.keep(Unreached(watch, rule.ours, self._refuse).remove)
            say(f"{remedy} changes {remedy.kind.changes}")
        else:
            self._ends = StepEnd(watch, self._reparametrise)

    def describe(self) -> str:
        if self.dry_run:
            return f"{self.remedy} (dry run): would change {self.remedy.kind.changes}"
        return self._applied.describe()

    def _first_used(self) -> None:
        self._since = self._watch.step_number
        self._applied.changes.append("every attention call that is not refused")
        self._watch._note_remedies()

    def _refuse(self, layer: str, reason: str) -> None:
        """A call of the layer has passed the remedy by."""
        self._refused.append(layer)
        self._applied.refused[layer] = reason
        self._watch._note_remedies()
        self._say(f"{self.remedy} is refused in {layer}: {reason}")

    def _deeds(self) -> tuple[int | None, list[str], list[str]]:
        return self._since, [], self._refused

    def remove(self) -> None:
        if self._ends is not None:
            self._ends.remove()
        self._applied.undo()

    def state_dict(self) -> dict[str, Tensor]:
        return self._applied.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._applied.load_state_dict(state)

    def _reparametrise(self, optimizer: Optimizer | None) -> None:
        """At the end of the first step, when the model and its optimizer are known."""
        assert self._ends is not None
        roots = [self._watch.model] if self._watch.model is not None else self._watch._names.roots()
        if not roots:
            return
        self._ends.remove()
        # A scheduler has a list of the groups it found; one more would be trained at another rate.
        scheduled = getattr(optimizer and optimizer.step, "_wrapped_by_lr_sched", False)
        # Nor would DistributedDataParallel average the slopes of what it did not find at first.
        learned = not scheduled and not any(isinstance(root, PARALLEL) for root in roots)
        for root in roots:
            try:
                one = apply(self.remedy, root, optimizer if learned else None)
            except RemedyError as error:
                self._say(f"{self.remedy} is refused: {error}")
                self._refused.append("the model")
                return
            self._applied.changes += one.changes
            self._applied.keep(one.undo)
        self._since = self._watch.step_number
        self._watch._note_remedies()
        self._say(self._applied.describe())


TRIES = 2  # meetings at which inputs may be missing before a layer is given up
NO_INPUTS = "its inputs could not be taken from the run"


class _Clipping(Installed):
    """qk-clip and temperature: gamma = limit / max of each head above it, after the step."""

    def __init__(self, watch: Watch, remedy: Remedy, dry_run: bool, say: Say) -> None:
        super().__init__(watch, remedy, dry_run, say)
        if not watch.cadence.fixed:
            watch.cadence.fixed, watch.cadence.every = True, 1
        self.layers: dict[str, Layer] = {}  # that are known, of this rank
        self.refused: dict[str, str] = {}
        self.clips: dict[str, dict[int, int]] = {}  # of each layer and head, how many
        self._ranks = Ranks()
        self._meets = True  # at the end of the next measured step, whoever has something new
        self._tries = 0
        self._applied = Applied(remedy)
        self._factors = Factors(self._ranks, self._applied, watch)
        self._pending: dict[str, Tensor] = {}  # gamma, until the weights' optimizer has stepped
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
        treated = [self.clips[name] for name in self._treated()]
        number, heads = sum(sum(one.values()) for one in treated), sum(map(len, treated))
        would = " (dry run): would have clipped" if self.dry_run else " has clipped"
        first = "" if self.first is None else f", the first in step {self.first}"
        lines = [f"{self.remedy}{would} {number} times, {heads} heads{first}"]
        # A pipeline's layers have other names in the readings of the whole job.
        for name, how in {**dict.fromkeys(self.clips, "on another rank"), **self._ways()}.items():
            if name in self.refused:
                lines.append(f"  {name}: refused: {self.refused[name]}")
            elif name in self.clips:
                lines.append(f"  {name}: heads {sorted(self.clips[name])}: {how}")
        lines.append(f"  state dict: {self.remedy.kind.keys}")
        return "\n".join(lines)

    @property
    def first(self) -> int | None:
        """The step of the first clip."""
        return min((self._first_of[name].step for name in self._treated()), default=None)

    def _treated(self) -> list[str]:
        """The layers with a head above the limit, but for those that were refused since."""
        return [name for name in self.clips if name not in self.refused]

    def _deeds(self) -> tuple[int | None, list[str], list[str]]:
        return self.first, self._treated(), list(self.refused)

    def remove(self) -> None:
        self._ends.remove()
        self._inputs.remove()
        self._maxima.remove()
        if self._read in self._watch._deliveries:
            self._watch._deliveries.remove(self._read)
        self._applied.undo()

    def state_dict(self) -> dict[str, Tensor]:
        return self._factors.state()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if not self.dry_run:
            self._factors.load(state)

    # After a step. -------------------------------------------------------------------------------

    def _step_ended(self, optimizer: Optimizer | None) -> None:
        maxima = self._maxima.taken()
        if maxima is not None:
            try:
                self._measured(maxima)
            except Exception as error:
                self._stop(error)
        if self._pending:
            self._scale(optimizer)

    def _measured(self, maxima: dict[str, Tensor]) -> None:
        """On every rank, whether it has seen attention or not: here they wait for each other."""
        ranks = self._ranks
        if apart := self._watch.ranks.apart:
            raise RemedyError(apart)
        unknown = [name for name in maxima if name not in self.layers]
        if self._meets or ranks.something_new() or (unknown and ranks.number == 1):
            self._meet({name: maxima[name] for name in unknown})
        self._inputs.drop()
        largest = ranks.largest(maxima, new=any(name not in self.layers for name in maxima))
        kept = next(iter(maxima.values()), largest).dtype
        gamma = rows.gamma_of(largest.to(kept), self.remedy.number)
        if not self.dry_run:
            self._factors.turn(gamma)
            self._pending = {
                entry.said.layer: gamma[entry.places]
                for entry in ranks.own()
                if entry.said.way == BY_WEIGHTS and (ranks.number > 1 or entry.said.layer in maxima)
            }

    def _scale(self, optimizer: Optimizer | None) -> None:
        for name in list(self._pending):
            if optimizer is None or _holds(optimizer, self.layers[name]):
                self.layers[name].scale_(self._pending.pop(name))

    def _stop(self, error: Exception) -> None:
        """A rank that went on alone would scale by other factors than its replicas."""
        self.remove()
        self._say(
            f"{self.remedy} has stopped, the weights stay as they are: the ranks did not come "
            f"together ({type(error).__name__}: {error})"
        )
        log.error("%s has stopped", self.remedy, exc_info=error)

    # New layers. ---------------------------------------------------------------------------------

    def _meet(self, unknown: dict[str, Tensor]) -> None:
        """All ranks: find the weights of their new layers, and agree on what is done to them."""
        inputs, ranks = self._inputs.taken(), self._ranks
        told = ranks.told(
            {
                "new": bool(unknown),
                "inputs": inputs is not None,
                "tries": self._tries,
                "needs": shards.coupled(self._roots()) if ranks.number > 1 else [],
            }
        )
        ready = together([one["needs"] for one in told], [one["inputs"] for one in told])
        pairs = list(zip(told, ready, strict=True))
        waiting = [one["new"] and not go and one["tries"] < TRIES for one, go in pairs]
        found, reason = {}, NO_INPUTS
        # Also where nobody has measured yet: attention over ranks is not, in a job's first step.
        if inputs is not None and ready[ranks.mine]:
            found, reason = self._looked(inputs)
        self._meets = any(waiting)
        if self._meets:
            self._inputs.ask()  # in the next step that is measured
        if waiting[ranks.mine]:
            self._tries += 1
            unknown = {}
        elif not ready[ranks.mine]:
            self._tries = 0  # given up; what comes later has its own tries
        self._agree(unknown, found, reason, inputs)

    def _looked(self, inputs: Inputs) -> tuple[dict[str, Layer], str]:
        """The layers' weights, from one more forward pass on what the model was given."""
        try:
            found = discover.layers(inputs, self._watch._names)
        except Exception as error:
            return {}, f"a second forward pass failed: {type(error).__name__}: {error}"
        return found, "a second forward pass did not call it"

    def _agree(
        self,
        unknown: dict[str, Tensor],
        found: dict[str, Layer],
        reason: str,
        inputs: Inputs | None,
    ) -> None:
        model = nn.Module() if inputs is None else inputs.model
        new = {
            name: found.get(name) or Layer(name, 0, None, "attention", refused=reason)
            for name in unknown
        }
        # A layer that another rank measures for this one, too, is found here all the same.
        new |= {name: layer for name, layer in found.items() if name not in self.layers}
        heads = {name: len(maximum) for name, maximum in unknown.items()}
        said = [
            said_of(layer, self.remedy, model, heads.get(name, 0)) for name, layer in new.items()
        ]
        device = next((maximum.device for maximum in unknown.values()), None)
        self._ranks.meet(said, device)
        self._refuse_unseen()
        self.layers.update(new)
        for entry in self._ranks.entries:
            name = entry.said.layer
            if entry.said.way == REFUSED and name not in self.refused:
                self.refused[name] = entry.said.words
                self._say(f"{self.remedy} is refused in {name}: {entry.said.words}")
        if not self.dry_run:
            self._factors.grow({name: layer.module for name, layer in new.items()})
        self._announce()

    def _refuse_unseen(self) -> None:
        """Layers that a rank has and did not call: its weights would stay, its replicas' not."""
        if self._ranks.number == 1:
            return
        elsewhere = {one.said.layer for one in self._ranks.entries} - {
            one.said.layer for one in self._ranks.own()
        }
        have = {name for root in self._roots() for name in self._paths(root)}
        for rank, names in enumerate(self._ranks.told(sorted(elsewhere & have))):
            for name in names:
                self._ranks.refuse(name, f"rank {rank} has it too, and did not call it")

    def _roots(self) -> list[nn.Module]:
        model = self._watch.model
        return self._watch._names.roots() if model is None else [model]

    def _paths(self, root: nn.Module) -> list[str]:
        names = self._watch._names
        names.add(root)
        return [names.name_of(module) for module in root.modules()]

    def _ways(self) -> dict[str, str]:
        """Of every layer of the job, in words."""
        return {entry.said.layer: entry.said.words for entry in self._ranks.entries}

    # What the watch tells. -----------------------------------------------------------------------

    def _read(self, readings: Sequence[Reading], scalars: Sequence[Scalar]) -> None:
        for reading in readings:
            if reading.phase != "train" or reading.layer in self.refused:
                continue
            above = (reading.value("max_logit") > self.remedy.number).nonzero()[0].tolist()
            if above:
                self._count(reading, above)

    def _count(self, reading: Reading, above: list[int]) -> None:
        known = self.clips.setdefault(reading.layer, {})
        for head in above:
            known[head] = known.get(head, 0) + 1
        self._first_of.setdefault(reading.layer, reading)
        self._announce()

    def _announce(self) -> None:
        """Once a layer, as soon as its weights are known."""
        ways = self._ways()
        for name, reading in self._first_of.items():
            if name in self._announced or name not in ways or name in self.refused:
                continue
            self._announced.add(name)
            self._watch._note_remedies()
            head = int(reading.value("max_logit").argmax())
            largest = float(reading.value("max_logit")[head])
            verb = "would scale" if self.dry_run else "scales"
            self._say(
                f"{self.remedy} {verb} {name} since step {reading.step}: head {head} had a logit "
                f"of {largest:.4g}, so x {self.remedy.number / largest:.3g}: "
                f"{ways[name]}"
            )


def _holds(optimizer: Optimizer, layer: Layer) -> bool:
    """Two optimizers may share a model: who steps the weights comes before the clip."""
    held = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    return any(id(part.parameter) in held for part in layer.parts)
