"""Inside torch.compile: which module is being traced, and what its operators do when they run.

The operators themselves are in `in_graph` and `multihead_compiled`.
"""

import gc
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scaledot.measure import Vitals
from scaledot.nn.measured import exporting
from scaledot.watch.probes import hub
from scaledot.watch.probes.scores import Source, nothing
from scaledot.watch.probes.seen import Seen, why_not

BUFFER = torch.zeros(1, device="cpu")  # never read
TAGS = (torch.Tag.cudagraph_unsafe,)  # a replayed CUDA graph would not ask whether a step is due


class Site(NamedTuple):
    """A call inside a compiled graph."""

    module: "weakref.ref[nn.Module] | None"
    lines: tuple[object, ...]  # from the module to the call: code and offset of each function
    with_grad: bool


sites: list[Site] = []


def constant(function: Any) -> Any:
    """Dynamo runs the function once, while it traces, and keeps what it gave.

    What torch.compiler.assume_constant_result does, without importing the compiler for it.
    """
    function._dynamo_marked_constant = True
    return function


def tracing() -> bool:
    """Whether Dynamo reads this line. Constant to it: the branch costs nothing.

    Later stages run parts of torch as they are, with tensors that stand for others; no operator
    can be added there. Exported programs are left as their authors wrote them.
    """
    return torch.compiler.is_dynamo_compiling() and not exporting()


@constant
def site_of_call(with_grad: bool) -> int:
    """Runs once, while the compiler traces: which module it is in goes into the graph as a number.

    The same module traced again is the same site: a long run of recompilations adds nothing.
    """
    module = module_being_traced()
    site = Site(None if module is None else weakref.ref(module), _lines(module), with_grad)
    if site not in sites:
        sites.append(site)
    return sites.index(site)


@constant
def cannot_see(kind: str, reason: str) -> int:
    """Runs once, while the compiler traces a call that no operator can look into."""
    if not (hub.is_quiet() or already_seen()):
        hub.cannot_see(kind, reason, module_being_traced())
    return 0


@constant
def keeps_own(kind: str, reason: str) -> int:
    """Runs once, while the compiler traces a call that was to be replaced and is not."""
    hub.keeps_own(kind, reason, module_being_traced())
    return 0


def seen(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls it. Whatever another probe meets inside is part of a call that was seen already."""
    return original(*args, **kwargs)


@constant
def already_seen() -> bool:
    """Runs once, while the compiler traces: whether it is inside of what `seen` has called."""
    return any(tracer.f_code is seen.__code__ for tracer in _tracers())


def module_being_traced() -> nn.Module | None:
    """The innermost module that Dynamo is in, else what was handed to torch.compile."""
    return innermost_module() or _outermost_module(_tracers())


def innermost_module() -> nn.Module | None:
    """The last of Dynamo's own stack of modules, whose keys are their identities."""
    tracers = _tracers()
    stacks = [tracer.nn_module_stack for tracer in tracers]
    innermost = next((str(list(stack)[-1]) for stack in stacks if stack), None)
    if innermost is None:
        return None
    for known in (_outermost_module(tracers), *(listener.model for listener in hub.listeners)):
        for module in () if known is None else known.modules():
            if str(id(module)) == innermost:
                return module
    # A compiled function may have its model from anywhere. Traced once, so it may take a moment.
    for thing in gc.get_objects():
        if str(id(thing)) == innermost and issubclass(type(thing), nn.Module):
            return thing
    return None


def _outermost_module(tracers: list[Any]) -> nn.Module | None:
    """What was handed to torch.compile: a module, or a method of one."""
    for value in tracers[-1].f_locals.values() if tracers else ():
        if isinstance(value, nn.Module):
            return value
    return None


def _lines(module: nn.Module | None) -> tuple[object, ...]:
    """Where each function between the module's forward and the call stands."""
    forward = getattr(type(module).forward, "__code__", None) if module is not None else None
    lines: list[object] = []
    for tracer in _tracers():
        lines += (tracer.f_code, tracer.current_instruction.offset or 0)
        if tracer.f_code is forward:
            break
    return tuple(lines)


def _tracers() -> list[Any]:
    """Dynamo's interpreters of the functions being traced, the innermost first.

    They are found on the real stack, on which Dynamo is running. In a version of torch that has
    none of them the list is empty: the compiled calls are then measured without names.
    """
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    except ImportError:
        return []
    tracers: list[Any] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "step":
            tracer = frame.f_locals.get("self")
            if isinstance(tracer, InstructionTranslatorBase) and tracer not in tracers:
                tracers.append(tracer)
        frame = frame.f_back
    return tracers


def offer(
    number: int,
    query: Tensor,
    measure: Callable[[], Vitals],
    kind: str,
    source: Callable[[], Source | None] = nothing,
    scale: float | None = None,
) -> None:
    """Called while the graph runs, by an operator that stands at a site."""
    if not hub.wants():
        return
    site = sites[number]
    module = None if site.module is None else site.module()
    if reason := why_not(query):
        hub.cannot_see(kind, reason, module)
        return
    training = site.with_grad and (module is None or module.training)
    more = {"compiled": True, "site": site.lines, "source": source, "scale": scale}
    hub.offer(Seen(query, measure, kind, module, training, **more))
