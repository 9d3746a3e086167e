"""The launches of a call made again for another one like it, with next to no work for the host.

Calls whose tensors are alike in type, shape, strides and alignment, and whose settings are the
same, launch the same kernels with the same numbers: only addresses differ. So the launches of the
second one are written down (many calls have no second), each argument as a number or as the address
of one of the call's tensors, and later calls fill their own addresses in. What passes from kernel
to kernel lies in rooms, which a later call has side by side in one allocation.

A launch that is given any other tensor, one that torch computed or a view, cannot be written down,
and then none of its call is: what torch did for it would not be done again. Writing into one of the
call's tensors by torch is the one thing that must not happen between the launches.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from scaledot.backends.cuda import launching

MOST_KEPT = 4096  # calls that are remembered
MOST_MAPS = 8192  # tensor descriptors that are kept encoded: three a layer, for some hundred layers
ROOM_STEP = 256  # bytes: rooms start where an allocation might


class Call(NamedTuple):
    """What calls that are alike share, and what they do not."""

    key: tuple
    tensors: tuple[Tensor | None, ...]
    addresses: list[int]  # of the tensors that are there


def describe(
    tensors: tuple[Tensor | None, ...], *facts: Any, made: tuple[Tensor | None, ...] = ()
) -> Call:
    """tensors: all that the launches read or write, but the rooms; facts: what else they hang on.

    made: further ones that were made for the call. Their types, shapes and strides follow from the
    rest, so calls need not be told apart by them. The first tensor is there, and says on which
    device the launches are made.
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
    for tensor in made:
        address = None if tensor is None else tensor.data_ptr()
        key.append(address if address is None else address & 15)
        if address is not None:
            addresses.append(address)
    return Call(tuple(key), tensors + made, addresses)


class Map:
    """A tensor descriptor but for its address. Those encoded are kept: addresses come again."""

    def __init__(self, descriptor: Any, note: dict[str, Any]) -> None:
        shape, strides = list(descriptor.shape), list(descriptor.strides)
        padding, address = descriptor.padding, descriptor.base.data_ptr()

        def expand(address: int) -> list[Any]:
            place = launching.Place(address)
            return launching.expand(launching.Described(place, shape, strides, padding), note)

        first, *self.rest = expand(address)  # the other arguments that stand for it
        self._expand = expand
        self._number = next(_numbers)
        self._keep(address, first)

    def at(self, address: int) -> Any:
        known = _encoded.get((self._number, address))
        return self._keep(address, self._expand(address)[0]) if known is None else known

    def _keep(self, address: int, made: Any) -> Any:
        if len(_encoded) >= MOST_MAPS:
            _encoded.clear()
        _encoded[self._number, address] = made
        return made


_numbers = itertools.count()
_encoded: dict[tuple[int, int], Any] = {}  # by the map's number and the address


class Pattern(NamedTuple):
    """A tuple of a kernel's arguments, with gaps for addresses."""

    values: list[Any]
    addresses: list[tuple[int, int, int]]  # position, which of the call's, bytes past it
    parts: list[tuple[int, "Pattern"]]  # position, a tuple with gaps of its own
    maps: list[tuple[int, int, int, Map]]  # as addresses, and what is made of one

    def fill(self, addresses: list[int]) -> list[Any]:
        values = self.values.copy()
        for position, place, distance in self.addresses:
            values[position] = addresses[place] + distance
        for position, part in self.parts:
            values[position] = tuple(part.fill(addresses))
        for position, place, distance, map in self.maps:
            values[position] = map.at(addresses[place] + distance)
        return values


class Launch(NamedTuple):
    """One of them, as it is made again."""

    kernel: Any
    compiled: Any  # keeps what `start` starts
    start: Callable[..., None]
    arguments: Pattern  # and what comes before them


class Replay(NamedTuple):
    """All of a call, and the rooms that they need."""

    launches: tuple[Launch, ...]
    room_bytes: int


_known: dict[tuple, Replay | None] = {}  # None: cannot be made again
_seen: set[tuple] = set()  # once


def again(call: Call) -> bool:
    """Makes the launches of an earlier call for this one; False: there is none like it."""
    replay = _known.get(call.key)
    if replay is None or launching.hooked():
        return False
    first = call.tensors[0]
    assert first is not None
    device = first.device.index
    if device != torch.cuda.current_device():
        return False
    launches, room_bytes = replay
    if any([launch.kernel.pre_run_hooks for launch in launches]):
        return False
    addresses = call.addresses
    if room_bytes:
        room = first.new_empty(room_bytes, dtype=torch.uint8)  # kept until the last launch
        addresses = [*addresses, room.data_ptr()]
    stream = torch._C._cuda_getCurrentRawStream(device)
    for _, _, start, arguments in launches:
        values = arguments.fill(addresses)
        values[launching.STREAM] = stream
        start(*values)
    return True


class Once:
    """Makes launches, and forgets them."""

    def room(self, like: Tensor, numbers: int, dtype: torch.dtype) -> Tensor:
        """For what passes from kernel to kernel; may be cut into parts."""
        return like.new_empty(numbers, dtype=dtype)

    def launch(
        self, kernel: Any, programs: int, like: Tensor, arguments: dict[str, Any], **options: Any
    ) -> None:
        launching.launch(kernel, programs, like, arguments, **options)


ONCE = Once()


class Recording(Once):
    """Makes the launches of a call and writes them down, for `again`.

    They must be given `tensors` instead of those that the call was described by: here each is an
    object of its own, for two that are one now may be two in a call like it.
    """

    def __init__(self, call: Call) -> None:
        self._key = call.key
        self._again = call.key in _seen or call.key in _known
        possible = launching.KNOWN and _known.get(call.key, self) is not None
        self._complete = possible and self._again
        self._launches: list[Launch] = []
        self._rooms: list[Tensor] = []  # kept, so that no two have one address
        self._starts: dict[int, int] = {}  # address of a room: where a later call has it
        self._room_bytes = 0
        self.tensors = call.tensors
        if self._complete:
            self.tensors = tuple([None if t is None else t.detach() for t in call.tensors])
        present = [tensor for tensor in self.tensors if tensor is not None]
        self._places = {id(tensor): place for place, tensor in enumerate(present)}

    def room(self, like: Tensor, numbers: int, dtype: torch.dtype) -> Tensor:
        room = super().room(like, numbers, dtype)
        if not numbers:  # it has no address
            return room
        self._rooms.append(room)
        self._starts[room.data_ptr()] = self._room_bytes
        self._room_bytes += -(-room.nbytes // ROOM_STEP) * ROOM_STEP
        return room

    def launch(
        self, kernel: Any, programs: int, like: Tensor, arguments: dict[str, Any], **options: Any
    ) -> None:
        compiled = launching.launch(kernel, programs, like, arguments, **options)
        straight = None
        if compiled is not None and self._complete:
            straight = launching.straight_to(compiled, programs)
        pattern = None
        if straight is not None:
            values = [arguments[name] for name in kernel.arg_names]
            pattern = self._pattern(values, straight.head, straight.notes)
        if straight is None or pattern is None:
            self._complete = False
        else:
            self._launches.append(Launch(kernel, compiled, straight.start, pattern))

    def keep(self) -> None:
        """After the last launch. What is kept holds no tensor."""
        if not self._again:
            if len(_seen) >= MOST_KEPT:
                _seen.clear()
            _seen.add(self._key)
            return
        _seen.discard(self._key)
        made = Replay(tuple(self._launches), self._room_bytes) if self._complete else None
        if len(_known) >= MOST_KEPT:
            _known.clear()
        _known[self._key] = made

    def _pattern(
        self, values: Sequence[Any], head: Sequence[Any] = (), notes: Sequence[dict[str, Any]] = ()
    ) -> Pattern | None:
        """None: something in it cannot be written down."""
        pattern = Pattern([*head], [], [], [])
        notes = list(notes)
        for value in values:
            position = len(pattern.values)
            pattern.values.append(None)
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
            elif launching.is_descriptor(value):
                found = self._find(value.base)
                if found is None or not notes:
                    return None
                map = Map(value, notes.pop(0))
                pattern.maps.append((position, *found, map))
                pattern.values.extend(map.rest)
            elif not isinstance(value, tl.constexpr):  # compiled in: a launch does not look at it
                pattern.values[position] = value
        return pattern

    def _find(self, tensor: Tensor) -> tuple[int, int] | None:
        """Which of the call's addresses is the tensor's, and how far past it."""
        place = self._places.get(id(tensor))
        if place is not None:
            return place, 0
        start = tensor.untyped_storage().data_ptr()
        if start not in self._starts:
            return None
        return len(self._places), self._starts[start] + tensor.data_ptr() - start
