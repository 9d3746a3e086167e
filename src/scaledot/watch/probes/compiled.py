"""What is left of the probe inside torch.compile: one operator that writes to a buffer.

An operator whose result nobody uses is removed by the compiler; one that mutates a buffer stays.
Its body is plain Python and asks at run time whether the step is due, so the graph is one and the
same whatever the cadence. The module's path is read while the compiler traces.
"""

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scaledot import functional
from scaledot.measure import Vitals
from scaledot.watch.probes import hub
from scaledot.watch.probes.seen import Seen, why_not

KIND = "scaled_dot_product_attention"
BUFFER = torch.zeros(1)  # never read
TAGS = (torch.Tag.cudagraph_unsafe,)  # a replayed CUDA graph would not ask whether a step is due


class Site(NamedTuple):
    """A call inside a compiled graph."""

    module: "weakref.ref[nn.Module] | None"
    lines: tuple[int, ...]  # from the module to the call
    with_grad: bool


sites: list[Site] = []


def look(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> None:
    """Called while the compiler traces: leaves the operator in the graph."""
    mask = None if attn_mask is None else attn_mask.detach()
    site = site_of_call(torch.is_grad_enabled())
    _observe(query.detach(), key.detach(), mask, BUFFER, site, is_causal, scale, enable_gqa)


def tracing() -> bool:
    """Whether Dynamo reads this line. Constant to it: the branch costs nothing.

    Later stages run parts of torch as they are, with tensors that stand for others; no operator
    can be added there. Exported programs are left as their authors wrote them.
    """
    return torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting()


@torch.compiler.assume_constant_result
def site_of_call(with_grad: bool) -> int:
    """Runs once, while the compiler traces: which module it is in goes into the graph as a number.

    The same module traced again is the same site: a long run of recompilations adds nothing.
    """
    module = _module_being_traced()
    site = Site(None if module is None else weakref.ref(module), _lines(module), with_grad)
    if site not in sites:
        sites.append(site)
    return sites.index(site)


@torch.compiler.assume_constant_result
def cannot_see(kind: str, reason: str) -> int:
    """Runs once, while the compiler traces a call that no operator can look into."""
    hub.cannot_see(kind, reason, _module_being_traced())
    return 0


def _module_being_traced() -> nn.Module | None:
    """The innermost module of Dynamo's own stack, whose keys are the modules' identities."""
    tracers = _tracers()
    outer = _outermost_module(tracers)
    stacks = [tracer.nn_module_stack for tracer in tracers]
    innermost = next((str(list(stack)[-1]) for stack in stacks if stack), None)
    if innermost is None:
        return outer
    for known in (outer, *(listener.model for listener in hub.listeners)):
        for module in () if known is None else known.modules():
            if str(id(module)) == innermost:
                return module
    return outer


def _outermost_module(tracers: list[Any]) -> nn.Module | None:
    """What was handed to torch.compile: a module, or a method of one."""
    for value in tracers[-1].f_locals.values() if tracers else ():
        if isinstance(value, nn.Module):
            return value
    return None


def _lines(module: nn.Module | None) -> tuple[int, ...]:
    """Where each function between the module's forward and the call stands."""
    forward = getattr(type(module).forward, "__code__", None) if module is not None else None
    lines: list[int] = []
    for tracer in _tracers():
        lines += (id(tracer.f_code), tracer.current_instruction.offset or 0)
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


@torch.library.custom_op("scaledot::watch", mutates_args=("buffer",), tags=TAGS)
def _observe(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    buffer: Tensor,
    site: int,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> None:
    def measure() -> Vitals:
        return functional.vitals(query, key, attn_mask, is_causal, scale, enable_gqa)

    offer(site, query, measure, KIND)


def offer(number: int, query: Tensor, measure: Callable[[], Vitals], kind: str) -> None:
    """Called while the graph runs, by an operator that stands at a site."""
    if not hub.wants():
        return
    site = sites[number]
    module = None if site.module is None else site.module()
    if reason := why_not(query):
        hub.cannot_see(kind, reason, module)
        return
    training = site.with_grad and (module is None or module.training)
    hub.offer(Seen(query, measure, kind, module, training, compiled=True, site=site.lines))


@_observe.register_fake
def _(*arguments: Any) -> None:
    return None
