"""The launches of a call made again for another one like it, with next to no work for the host.

Calls whose tensors are alike in type, shape, strides and alignment, and whose settings are the
same, launch the same kernels with the same numbers: only addresses differ. So the launches of the
first one are written down, each argument as a number or as the address of one of the call's
tensors, and a later call fills its own addresses in. What passes from kernel to kernel lies in one
allocation, the room.

A launch that is given any other tensor, one that torch computed or a view, cannot be written down,
and then none of its call is: what torch did for it would not be done again. Writing into one of the
call's tensors by torch is the one thing that must not happen between the launches.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from scaledot.backends.cuda import launching

MOST_KEPT = 4096  # calls that are remembered


class Call(NamedTuple):
    """What calls that are alike share, and what they do not."""

    key: tuple
    tensors: tuple[Tensor | None, ...]
    addresses: list[int]  # of the tensors that are there


def describe(tensors: tuple[Tensor | None, ...], *facts: Any) -> Call:
    """tensors: all that the launches read or write, but the room; facts: what else they hang on.

    The first tensor is there, and says on which device the launches are made.
    """
    key, addresses = list(facts), []
    for tensor in tensors:
        if tensor is None:
            key.append(None)
            continue
        address = tensor.data_ptr()
        addresses.append(address)
        device, shape, strides = tensor.get_device(), tensor.shape, tensor.stride()
        key += (tensor.dtype, device, shape, strides, address & 15)
    return Call(tuple(key), tensors, addresses)


class Pattern(NamedTuple):
    """A tuple of a kernel's arguments, with gaps for addresses."""

    values: list[Any]
    addresses: list[tuple[int, int, int]]  # position, which of the call's, bytes past it
    parts: list[tuple[int, "Pattern"]]  # position, a tuple with gaps of its own

    def fill(self, addresses: list[int]) -> tuple:
        values = self.values.copy()
        for position, place, distance in self.addresses:
            values[position] = addresses[place] + distance
        for position, part in self.parts:
            values[position] = part.fill(addresses)
        return tuple(values)


class Launch(NamedTuple):
    """One of them, as it is made again."""

    kernel: Any
    compiled: Any
    programs: int
    arguments: Pattern


class Replay(NamedTuple):
    """All of a call, and the room that they need."""

    launches: tuple[Launch, ...]
    numbers: int  # that the room holds
    dtype: torch.dtype


_known: dict[tuple, Replay | None] = {}  # None: cannot be made again


def again(call: Call) -> bool:
    """Makes the launches of an earlier call for this one; False: there is none like it."""
    replay = _known.get(call.key)
    if replay is None:
        return False
    first = call.tensors[0]
    assert first is not None
    device = first.device.index
    if device != torch.cuda.current_device():
        return False
    if any([launch.kernel.pre_run_hooks for launch in replay.launches]):
        return False
    room = first.new_empty(replay.numbers, dtype=replay.dtype)
    addresses = [*call.addresses, room.data_ptr()]
    for _, compiled, programs, arguments in replay.launches:
        launching.run_again(compiled, programs, device, arguments.fill(addresses))
    return True


class Once:
    """Makes launches, and forgets them."""

    def room(self, like: Tensor, numbers: int, dtype: torch.dtype) -> Tensor:
        """The one allocation for all that passes from kernel to kernel, to be cut into parts."""
        return like.new_empty(numbers, dtype=dtype)

    def launch(
        self, kernel: Any, programs: int, like: Tensor, arguments: dict[str, Any], **options: Any
    ) -> None:
        launching.launch(kernel, programs, like, arguments, **options)


class Recording(Once):
    """Makes the launches of a call and writes them down, for `again`.

    They must be given `tensors` instead of those that the call was described by: here each is an
    object of its own, for two that are one now may be two in a call like it.
    """

    def __init__(self, call: Call) -> None:
        self._key = call.key
        self._complete = launching.KNOWN and _known.get(call.key, self) is not None
        self._launches: list[Launch] = []
        self._room: Tensor | None = None
        self.tensors = call.tensors
        if self._complete:
            self.tensors = tuple([None if t is None else t.detach() for t in call.tensors])
        present = [tensor for tensor in self.tensors if tensor is not None]
        self._places = {id(tensor): place for place, tensor in enumerate(present)}

    def room(self, like: Tensor, numbers: int, dtype: torch.dtype) -> Tensor:
        assert self._room is None
        self._room = super().room(like, numbers, dtype)
        return self._room

    def launch(
        self, kernel: Any, programs: int, like: Tensor, arguments: dict[str, Any], **options: Any
    ) -> None:
        compiled = launching.launch(kernel, programs, like, arguments, **options)
        pattern = None
        if compiled is not None and self._complete:
            pattern = self._pattern([arguments[name] for name in kernel.arg_names])
        if pattern is None:
            self._complete = False
        else:
            self._launches.append(Launch(kernel, compiled, programs, pattern))

    def keep(self) -> None:
        """After the last launch. What is kept holds no tensor."""
        made = None
        if self._complete and self._room is not None:
            made = Replay(tuple(self._launches), self._room.numel(), self._room.dtype)
        if len(_known) >= MOST_KEPT:
            _known.clear()
        _known[self._key] = made

    def _pattern(self, values: Sequence[Any]) -> Pattern | None:
        """None: something in it cannot be written down."""
        pattern = Pattern([None] * len(values), [], [])
        for position, value in enumerate(values):
            if isinstance(value, Tensor):
                found = self._find(value)
                if found is None:
                    return None
                pattern.addresses.append((position, *found))
            elif isinstance(value, tuple):
                part = self._pattern(value)
                if part is None:
                    return None
                if part.addresses or part.parts:
                    pattern.parts.append((position, part))
                else:
                    pattern.values[position] = tuple(part.values)
            elif not isinstance(value, tl.constexpr):  # compiled in: a launch does not look at it
                pattern.values[position] = value
        return pattern

    def _find(self, tensor: Tensor) -> tuple[int, int] | None:
        """Which of the call's addresses is the tensor's, and how far past it."""
        place = self._places.get(id(tensor))
        if place is not None:
            return place, 0
        start = tensor.untyped_storage().data_ptr()
        if self._room is None or start != self._room.data_ptr():
            return None
        return len(self._places), tensor.data_ptr() - start
