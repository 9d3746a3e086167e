"""One forward pass of the model, and every attention call in it: module, inputs, q and k.

The pass leaves no trace: evaluation mode for its time, random numbers put back, and no watch sees
it. It keeps no graph either, so it takes less memory than a training step; what needs one runs the
attention module `again`, by itself. Attention is found by the watch's own probes; what they measure
is one record of the call.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scaledot import functional
from scaledot.measure import Vitals
from scaledot.problem import Problem
from scaledot.watch.names import PARALLEL, Names
from scaledot.watch.probes import hub, place
from scaledot.watch.probes.patch import Attribute
from scaledot.watch.probes.seen import Seen

OVER_RANKS = "scaledot.distributed.attention"  # where context parallel calls are described


class Running(NamedTuple):
    """A module on the stack and what it was called with."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Inputs(NamedTuple):
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Call:
    layer: str
    module: nn.Module | None  # that the layer is named after
    running: tuple[Running, ...]  # the innermost first
    problem: Problem
    kind: str
    max_logit: Tensor  # [heads]


def as_inputs(model: nn.Module, inputs: Any) -> Inputs:
    """A batch as people have it: a tensor, a tuple of arguments, or a mapping of named ones."""
    if isinstance(inputs, Mapping):
        return Inputs(model, (), dict(inputs))
    if isinstance(inputs, tuple | list):
        return Inputs(model, tuple(inputs), {})
    return Inputs(model, (inputs,), {})


def run(inputs: Inputs, names: Names, look: Callable[[Call], None]) -> None:
    """Calls `look` inside of each attention call, while its weights are there (FSDP2)."""
    model = _unwrapped(inputs.model)
    listener = _Listener(model, names, look)
    with ExitStack() as stack:
        stack.enter_context(_as_it_was(model))
        stack.enter_context(listener.alone())
        stack.enter_context(torch.no_grad())
        stack.enter_context(_no_fast_path())
        if "torch._dynamo" in sys.modules:  # something may be compiled: no probe looks inside
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        model(*inputs.args, **inputs.kwargs)
    if listener.error is not None:
        raise listener.error


def again(running: Running, tensors: dict[str, Tensor]) -> list[Problem]:
    """The attention calls of one module with other weights, and their graph; within `look`.

    Its forward alone, without hooks: they belong to the pass that is going on around it.
    """
    module, args, kwargs = running
    found: list[Problem] = []
    kwargs = {name: None if name in CACHES else value for name, value in kwargs.items()}
    with _recording(found), _heard(), _with_weights(module, tensors), torch.enable_grad():
        type(module).forward(module, *args, **kwargs)
    return found


CACHES = ("past_key_values", "past_key_value", "layer_past")  # would grow by a second call


class _Listener:
    def __init__(self, model: nn.Module, names: Names, look: Callable[[Call], None]) -> None:
        self.model: nn.Module | None = model
        self.error: Exception | None = None
        self._names, self._look = names, look
        self._found: list[Problem] = []

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else listens: what runs now is no part of the training."""
        with _recording(self._found):
            hub.listen(self)
            before, keepers = hub.listeners, hub.keepers
            hub.listeners, hub.keepers = (self,), ()
            try:
                yield
            finally:
                hub.listeners, hub.keepers = before, keepers
                hub.leave(self)

    def wants(self) -> bool:
        return True

    def replaces(self) -> bool:
        return False

    def cannot_see(self, kind: str, reason: str, module: nn.Module | None) -> None:
        pass  # the watch says so in its coverage

    def saw(self, seen: Seen) -> None:
        if self.error is not None:
            return
        running = running_modules()
        if seen.module is not None and all(one.module is not seen.module for one in running):
            return  # an operator on behalf of a module that was not called: no inputs
        found = self._names.find(tuple(one.module for one in running))
        if found is None:
            return
        if seen.module is not None:
            while running[0].module is not seen.module:
                running = running[1:]
        module, name = found
        where = place.here()
        # The phase keeps these numbers apart from the watch's own.
        layer = self._names.layer(name, "remedy", where, where.site)
        try:
            vitals = seen.measure()
            problem = self._found[-1]
            self._found.clear()
            heads = problem.query.shape[1]
            max_logit = vitals.max_logit.detach().reshape(-1, heads).amax(0)
            self._look(Call(layer, module, running, problem, seen.kind, max_logit))
        except Exception as error:  # the hub would call it a call that cannot be measured
            self.error = error


def running_modules() -> tuple[Running, ...]:
    """Read from the stack, as `place` does, with the arguments that are still there."""
    found: list[Running] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is place.CALL:
            known = frame.f_locals
            found.append(Running(known["self"], tuple(known["args"]), dict(known["kwargs"])))
        frame = frame.f_back
    return tuple(found)


@contextmanager
def _recording(found: list[Problem]) -> Iterator[None]:
    original = functional._with_vitals

    def with_vitals(problem: Problem, backend: str | None) -> tuple[Tensor, Vitals]:
        found.append(problem)
        return original(problem, backend)

    records = [Attribute(functional, "_with_vitals", with_vitals)]
    if over_ranks := sys.modules.get(OVER_RANKS):
        describe = over_ranks.describe

        def described(*args: Any, **kwargs: Any) -> Problem:
            found.append(describe(*args, **kwargs))  # this rank's queries and keys
            return found[-1]

        records.append(Attribute(over_ranks, "describe", described))
    for record in records:
        record.make()
    try:
        yield
    finally:
        for record in records:
            record.undo()


class _Again:
    """Listens to a second call: measures, so that the call is recorded, and keeps nothing."""

    model: nn.Module | None = None

    def wants(self) -> bool:
        return True

    def replaces(self) -> bool:
        return False

    def saw(self, seen: Seen) -> None:
        seen.measure()

    def cannot_see(self, kind: str, reason: str, module: nn.Module | None) -> None:
        pass


@contextmanager
def _heard() -> Iterator[None]:
    """The probes are silent inside of a call that they look at; here they look once more."""
    before, quiet = hub.listeners, hub._thread.quiet
    hub.listeners, hub._thread.quiet = (_Again(),), 0
    try:
        yield
    finally:
        hub.listeners, hub._thread.quiet = before, quiet


@contextmanager
def _with_weights(module: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Other tensors in the place of parameters; the parameters are not touched."""
    held: list[tuple[dict[str, Any], str, Any]] = []
    for path, tensor in tensors.items():
        owner, _, name = path.rpartition(".")
        parameters = module.get_submodule(owner)._parameters
        held.append((parameters, name, parameters[name]))
        parameters[name] = tensor  # type: ignore[assignment]
    try:
        yield
    finally:
        for parameters, name, before in held:
            parameters[name] = before


@contextmanager
def _no_fast_path() -> Iterator[None]:
    """Of nn.TransformerEncoderLayer: one operator, which never calls its attention module."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Evaluation mode (no dropout, no statistics of batches), and the random numbers put back."""
    training = [module for module in model.modules() if module.training]
    devices = sorted({p.device.index for p in model.parameters() if p.is_cuda})
    try:
        with torch.random.fork_rng(devices=devices):
            model.eval()
            yield
    finally:
        for module in training:
            module.training = True
        for module in model.modules():
            if callable(reshard := getattr(module, "reshard", None)) and hasattr(module, "unshard"):
                reshard()  # FSDP2 would keep the gathered weights, which are about to change


def _unwrapped(model: nn.Module) -> nn.Module:
    """DistributedDataParallel counts forward passes; a compiled model would not be seen into."""
    while isinstance(model, PARALLEL):
        model = model.module
    inner = vars(model).get("_modules", {}).get("_orig_mod")
    return model if inner is None else _unwrapped(inner)
