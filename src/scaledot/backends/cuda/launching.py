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

KNOWN = triton.__version__.startswith("3.6.")  # of which we know how it launches
MOST_KEPT = 8192  # launches that are remembered, each with all of its integers

_compiled: dict[tuple, Any] = {}


def launch(
    kernel: Any, programs: int, like: Tensor, arguments: dict[str, Any], **options: Any
) -> Any:
    """kernel[(programs,)](**arguments, **options) on the device of `like` and its current stream.

    arguments: every parameter of the kernel by name; numbers, tensors, None, tl.constexpr and
    tuples of them. options: num_warps and the like. Returns the compiled kernel, for `run_again`;
    None where there is none.
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
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def launch_key(
    kernel: Any, device: int, arguments: dict[str, Any], options: dict[str, Any]
) -> tuple:
    """Equal only for launches that Triton serves by one compiled kernel.

    Integers stand for themselves: Triton asks less of them, but to find out what takes time. A
    kernel is known by its address, which what was compiled of it keeps: its hash is that of a text.
    """
    key: list[Any] = [id(kernel), device, *options.items()]
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
        else:  # bool, str
            key.append((kind, value))
