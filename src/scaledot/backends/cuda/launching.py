"""Launching a Triton kernel that has been launched before, with less work for the host.

Triton describes every argument anew at each launch, compares the globals of a kernel, and finds the
compiled one by the texts of these. What a kernel is compiled for is known to us, so `launch` finds
it by a plain key and hands it the arguments, as Triton would.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.jit import JITFunction

KNOWN = triton.__version__.startswith("3.6.")  # of which we know how it launches
MOST_KEPT = 8192  # launches that are remembered, each with all of its integers

_compiled: dict[tuple, Any] = {}


def launch(
    kernel: Any, programs: int, like: Tensor, arguments: dict[str, Any], **options: Any
) -> Any:
    """kernel[(programs,)](**arguments, **options) on the device of `like` and its current stream.

    arguments: every parameter of the kernel by name; numbers, tensors, None, tl.constexpr, tensor
    descriptors and tuples of them. options: num_warps and the like. Returns the compiled kernel,
    for `run_again` and `straight_to`; None where there is none.
    """
    if not isinstance(kernel, JITFunction):  # interpreted
        kernel[(programs,)](**arguments, **options)
        return None
    device = like.device
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _launch_again(kernel, programs, device.index, arguments, options)
    return _launch_again(kernel, programs, device.index, arguments, options)


def _launch_again(
    kernel: Any, programs: int, device: int, arguments: dict[str, Any], options: dict[str, Any]
) -> Any:
    key = launch_key(kernel, device, arguments, options)
    compiled = None if kernel.pre_run_hooks else _compiled.get(key)
    if compiled is not None:
        run_again(compiled, programs, device, [arguments[name] for name in kernel.arg_names])
        return compiled
    compiled = kernel[(programs,)](**arguments, **options)
    if not hasattr(compiled, "packed_metadata"):  # compiled in the background
        return None
    if len(_compiled) >= MOST_KEPT:
        _compiled.clear()
    _compiled[key] = compiled
    return compiled


# Launches made with `launch_pdl` need not wait for the one before to end: once all of its programs
# said that they have begun (gdc_launch_dependents), those of the next begin wherever there is room.


@triton.jit
def let_next_begin():
    """In a long kernel, before all else: it waits for nobody itself."""
    gdc_launch_dependents()


@triton.jit
def enter(LAST: tl.constexpr):
    """The first thing that a program does: wait for all that the launch before wrote.

    What a launch costs before it computes is then paid while the other one still runs. LAST: the
    next launch is another's.
    """
    if not LAST:
        gdc_launch_dependents()
    gdc_wait()


@triton.jit
def enter_beside():
    """Instead of `enter` where a program reads nothing of the launch before: it runs beside it."""
    gdc_launch_dependents()


@triton.jit
def leave_beside():
    """The last thing that such a program does. The last of them waits for the launch before, so
    that for whoever comes next both have ended."""
    if tl.program_id(0) == tl.num_programs(0) - 1:
        gdc_wait()


def run_again(compiled: Any, programs: int, device: int, arguments: Sequence[Any]) -> None:
    """A compiled kernel on the current stream of the device, which is the current one."""
    if not KNOWN or hooked():
        compiled[(programs, 1, 1)](*arguments)
        return
    stream = torch._C._cuda_getCurrentRawStream(device)
    function, metadata = compiled.function, compiled.packed_metadata
    compiled.run(programs, 1, 1, stream, function, metadata, None, None, None, *arguments)


def hooked() -> bool:
    """Whether a profiler wants to know of launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


STREAM = 3  # where it stands in Straight.head


class Straight(NamedTuple):
    """The launcher that Triton's own ends in: start(*head, *arguments), the stream filled in."""

    start: Callable[..., None]
    head: list[Any]  # all that comes before the kernel's arguments
    notes: list[dict[str, Any]]  # Triton's own, of each tensor descriptor among them


def straight_to(compiled: Any, programs: int) -> Straight | None:
    """None: a launch of this kernel needs more than numbers and addresses."""
    run, metadata = compiled.run, compiled.packed_metadata
    head = [programs, 1, 1, None, compiled.function]
    if type(run) is not _cuda_launcher():
        return Straight(run, [*head, metadata, None, None, None], [])
    if run.global_scratch_size or run.profile_scratch_size:  # memory that is asked for each time
        return None
    start, notes = run.launch, []
    if inspect.isfunction(start):  # expands descriptors, then calls the launcher
        inside = inspect.getclosurevars(start).nonlocals
        start, notes = inside.get("launcher"), inside.get("tensordesc_meta", [None])
        if start is None or None in notes:  # not as we know it; descriptors without TMA
            return None
    head += [run.launch_cooperative_grid, run.launch_pdl, None, None, metadata, None, None, None]
    return Straight(start, head, notes)


def is_descriptor(value: Any) -> bool:
    """Of a tensor: Triton has several types of them."""
    return hasattr(value, "block_shape")


class Place(NamedTuple):
    """A tensor that only has an address, as a descriptor asks for it."""

    address: int

    def data_ptr(self) -> int:
        return self.address


class Described(NamedTuple):
    """What is read of a tensor descriptor."""

    base: Place
    shape: list[int]
    strides: list[int]
    padding: str


def expand(descriptor: Described, note: dict[str, Any]) -> list[Any]:
    """The arguments that the launcher takes for it; the first holds the address."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return make_tensordesc_arg(descriptor, note)


@functools.cache
def _cuda_launcher() -> Any:
    """None where Triton has none, or one that we do not know."""
    if not KNOWN:
        return None
    try:
        from triton.backends.nvidia.driver import CudaLauncher
    except ImportError:
        return None
    return CudaLauncher


def launch_key(
    kernel: Any, device: int, arguments: dict[str, Any], options: dict[str, Any]
) -> tuple:
    """Equal only for launches that Triton serves by one compiled kernel.

    Integers stand for themselves: Triton asks less of them, but to find out what takes time. Of
    those that a kernel is not compiled for, only how long they are counts. A kernel is known by its
    address, which what was compiled of it keeps: its hash is that of a text.
    """
    key: list[Any] = [id(kernel), device, *options.items()]
    if kernel.do_not_specialize:
        some = {name: arguments[name] for name in kernel.do_not_specialize}
        key += [type(n) if type(n) is int and -(2**31) <= n < 2**31 else n for n in some.values()]
        arguments = {name: value for name, value in arguments.items() if name not in some}
    _note(arguments.values(), key)
    return tuple(key)


def _note(values: Iterable[Any], key: list[Any]) -> None:
    for value in values:
        kind = type(value)
        if kind is int or value is None:
            key.append(value)
        elif kind is Tensor:
            key.append(value.dtype)
            key.append(value.data_ptr() & 15)
        elif kind is float:
            key.append(kind)
        elif kind is tl.constexpr:
            key.append((kind, value.value))
        elif isinstance(value, tuple):
            key.append(len(value))
            _note(value, key)
        elif isinstance(value, Tensor):  # a subclass, whose detach() may be one too
            key.append(value.dtype)
            key.append(value.data_ptr() & 15)
        elif is_descriptor(value):
            key += (value.base.dtype, *value.block_shape, getattr(value, "layout", None))
        else:  # bool, str
            key.append((kind, value))
