"""Launching a Triton kernel that has been launched before, with less work for the host.

Triton describes every argument anew at each launch, compares the globals of a kernel, and finds the
compiled one by the texts of these. What a kernel is compiled for is known to us, so `launch` finds
it by a plain key and hands it the arguments, as Triton would.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction

from scaledot.backends.cuda.arguments import NO_HEADS, NO_NUMBERS

KNOWN = triton.__version__.startswith("3.6.")  # of which we know how it launches
MOST_KEPT = 8192  # launches that are remembered, each with all of its integers

_compiled: dict[tuple, Any] = {}
_launched: dict[tuple, Any] = {}  # the same kernels once more, by a key that is made faster


def launch(
    kernel: Any, programs: int, like: Tensor, arguments: dict[str, Any], **options: Any
) -> None:
    """kernel[(programs,)](**arguments, **options) on the device of `like` and its current stream.

    arguments: every parameter of the kernel by name; numbers, tensors, None, tl.constexpr and
    tuples of them. options: num_warps and the like.
    """
    if not isinstance(kernel, JITFunction):  # interpreted
        kernel[(programs,)](**arguments, **options)
    elif like.device.index != torch.cuda.current_device():
        with torch.cuda.device(like.device):
            launch(kernel, programs, like, arguments, **options)
    else:
        _launch_again(kernel, programs, like.device.index, arguments, options)


def _launch_again(
    kernel: Any, programs: int, device: int, arguments: dict[str, Any], options: dict[str, Any]
) -> None:
    same: list[Any] = [kernel, device, *options.items()]
    _note(arguments.values(), same)
    launched = tuple(same)
    compiled = None if kernel.pre_run_hooks else _launched.get(launched)
    if compiled is None:
        key = compilation_key(kernel, device, arguments, options)
        compiled = _compiled.get(key)
        if compiled is None or kernel.pre_run_hooks:
            compiled = kernel[(programs,)](**arguments, **options)
            if hasattr(compiled, "packed_metadata"):  # not one that is compiled in the background
                _compiled[key] = compiled
            return
        if len(_launched) >= MOST_KEPT:
            _launched.clear()
        _launched[launched] = compiled
    run_again(compiled, programs, device, [arguments[name] for name in kernel.arg_names])


def run_again(compiled: Any, programs: int, device: int, arguments: Sequence[Any]) -> None:
    """A compiled kernel on the current stream of the device, which is the current one."""
    if not KNOWN or _hooks():
        compiled[(programs, 1, 1)](*arguments)
        return
    stream = torch._C._cuda_getCurrentRawStream(device)
    function, metadata = compiled.function, compiled.packed_metadata
    compiled.run(programs, 1, 1, stream, function, metadata, None, None, None, *arguments)


def _hooks() -> bool:
    """Whether a profiler wants to know of launches."""
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return any(getattr(hook, "calls", hook) for hook in hooks)


def _note(values: Iterable[Any], key: list[Any]) -> None:
    """All that a compiled kernel may depend on, and the integers themselves."""
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
            key.append(value.value)
        elif isinstance(value, tuple):
            key.append(len(value))
            _note(value, key)
        elif isinstance(value, Tensor):
            _note((value.detach(),), key)
        else:  # bool, str
            key.append((kind, value))


def compilation_key(
    kernel: Any, device: int, arguments: dict[str, Any], options: dict[str, Any]
) -> tuple:
    """Equal only for launches that Triton serves by one compiled kernel."""
    key: list[Any] = [id(kernel), device, *options.items()]
    for parameter in kernel.params:
        value = arguments[parameter.name]
        if parameter.is_constexpr:
            key.append(value.value if type(value) is tl.constexpr else value)
        else:
            _describe((value,), key)
    return tuple(key)


def _describe(values: tuple, key: list[Any]) -> None:
    """What Triton specialises a kernel for: types, alignment to 16 bytes, some integers."""
    for value in values:
        kind = type(value)
        if kind is int:
            if value == 1:  # compiled in
                key.append("one")
            elif -(2**31) <= value < 2**31:
                key.append(value & 15 == 0)
            else:
                key.append((value & 15 == 0, value < 2**63))
        elif value is None:
            key.append(None)
        elif value is NO_HEADS or value is NO_NUMBERS:  # a third of most calls
            key.append(kind)
        elif isinstance(value, tuple):
            key.append(len(value))
            _describe(value, key)
        elif kind is float or kind is bool:
            key.append(kind)
        elif kind is tl.constexpr:
            key.append(kind)
            key.append(value.value)
        else:
            key.append(value.dtype)
            key.append(value.data_ptr() & 15 == 0)
