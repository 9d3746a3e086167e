"""What a remedy in a run takes from the watch: maxima, inputs, and the ends of steps."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from scaledot.fields import FLOAT_FIELDS
from scaledot.watch.gather import Gathering, Key, Numbers, Waiting
from scaledot.watch.probes import hub
from scaledot.watch.probes.seen import Seen
from scaledot.watch.reading import Phase
from scaledot.watch.remedies.capture import Inputs, running_modules
from scaledot.watch.remedies.ways import why_not_reached
from scaledot.watch.watch import Watch

log = logging.getLogger("scaledot.watch")
MAX_LOGIT = FLOAT_FIELDS.index("max_logit")


class Overheard(Gathering):
    """The watch's own gathering, which also keeps the largest logit of each head, on its device."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._of_step: dict[str, Tensor] = {}
        self._closed: dict[str, Tensor] | None = None  # of a measured step that has ended
        self._watch = watch

    @staticmethod
    def in_place_of(watch: Watch) -> "Overheard":
        overheard = Overheard(watch)
        vars(overheard).update(vars(watch._gathering))
        watch._gathering = overheard
        return overheard

    def add(self, layer: str, phase: Phase, numbers: Numbers, heads: int) -> None:
        super().add(layer, phase, numbers, heads)
        if phase == "train":
            largest = numbers.floats[MAX_LOGIT].detach().reshape(-1, heads).amax(0)
            known = self._of_step.get(layer)
            self._of_step[layer] = largest if known is None else torch.maximum(known, largest)

    def add_stack(self, keys: Sequence[Key], numbers: Numbers, heads: int) -> None:
        super().add_stack(keys, numbers, heads)
        self._take_apart()  # each of them is listened to

    def close(self, step: int) -> list[Waiting]:
        if self._watch.cadence.due:
            self._closed = self._of_step
        self._of_step = {}
        return super().close(step)

    def taken(self) -> dict[str, Tensor] | None:
        """Of the step that has ended; None: it was not measured, or its maxima were taken before.

        A measured step without attention has none, which is not the same: other ranks may have.
        """
        closed, self._closed = self._closed, None
        return closed

    def remove(self) -> None:
        if self._watch._gathering is self:
            plain = Gathering()
            vars(plain).update({name: vars(self)[name] for name in vars(plain)})
            self._watch._gathering = plain


class InputsOfStep:
    """What the outermost module of a measured step was called with, kept while it is needed."""

    def __init__(self, watch: Watch) -> None:
        self.model = watch.model
        self._watch = watch
        self._inputs: Inputs | None = None
        self._listens = False
        self.ask()

    def ask(self) -> None:
        if not self._listens:
            hub.listen(self)
            self._listens = True

    def taken(self) -> Inputs | None:
        inputs = self._inputs
        if inputs is not None:
            self.remove()
        return inputs

    def drop(self) -> None:
        """The step is over, and with it what its batch is held for."""
        self._inputs = None

    def remove(self) -> None:
        hub.leave(self)
        self._listens, self._inputs = False, None

    def wants(self) -> bool:
        return self._inputs is None and self._watch.cadence.due and torch.is_grad_enabled()

    def replaces(self) -> bool:
        return False

    def saw(self, seen: Seen) -> None:
        running = running_modules()
        if seen.compiled:  # the graph of a compiled function is a module, and takes its own inputs
            running = tuple(one for one in running if not isinstance(one.module, GraphModule))
        if running:
            outermost = running[-1]
            self._inputs = Inputs(outermost.module, outermost.args, outermost.kwargs)

    def cannot_see(self, kind: str, reason: str, module: nn.Module | None) -> None:
        pass


class Unreached:
    """Names the layers whose calls a remedy at the call does not change, from what the watch sees.

    A compiled graph, a function whose arguments cannot be changed on their way.
    """

    def __init__(self, watch: Watch, ours: bool, refuse: Callable[[str, str], None]) -> None:
        self.model = watch.model
        self._watch, self._ours, self._refuse = watch, ours, refuse
        self._named: set[str] = set()
        hub.listen(self)

    def wants(self) -> bool:
        return False

    def replaces(self) -> bool:
        return False

    def saw(self, seen: Seen) -> None:
        reason = why_not_reached(seen, self._ours)
        if not reason:
            return
        found = self._watch._layers.of(seen)
        if found is not None and found.layer not in self._named:
            self._named.add(found.layer)
            self._refuse(found.layer, reason)

    def cannot_see(self, kind: str, reason: str, module: nn.Module | None) -> None:
        pass

    def remove(self) -> None:
        hub.leave(self)


class StepEnd:
    """Calls `ended(optimizer)` after the watch has closed a step; None: no optimizer to be had.

    Several optimizers may share a step: it is called after each. watch_removed: what is to be done
    when the watch goes.
    """

    def __init__(
        self,
        watch: Watch,
        ended: Callable[[Optimizer | None], None],
        watch_removed: Callable[[], None] = lambda: None,
    ) -> None:
        self._watch, self._ended, self._watch_removed = watch, ended, watch_removed
        self._handle: Any = register_optimizer_step_post_hook(self._after_step)
        self._below = watch._ends._ended
        watch._ends._ended = self._closed  # a compiled step reaches the watch alone
        remove = watch._ends.remove

        def removing() -> None:
            remove()
            self.remove()

        watch._ends.remove = removing

    def remove(self) -> None:
        self._handle.remove()
        if self._watch._ends._ended == self._closed:
            self._watch._ends._ended = self._below
        self._watch_removed()

    def _closed(self, optimizer: Optimizer | None) -> None:
        self._below(optimizer)
        if optimizer is None:
            self._guarded(None)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._guarded(optimizer)

    def _guarded(self, optimizer: Optimizer | None) -> None:
        """Never raises: it runs inside the user's optimizer.step()."""
        try:
            with torch.no_grad():
                self._ended(optimizer)
        except Exception:
            log.exception("a remedy could not be applied after a step; training goes on")
        finally:
            self._watch._ends.forget_passes()  # those that try the remedy are not the training's
