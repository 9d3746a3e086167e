"""A step's vitals, from many calls to one reading a layer; a device's are read some steps later."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from scaledot.measure import Vitals
from scaledot.watch.over_batch import over_batch
from scaledot.watch.reading import Phase, Reading

MERGE_AT = 64  # calls of one layer that may wait; an endless evaluation must not fill the memory
# Numbers of a step that are sent from a GPU as they are and merged on the host: a merge is some
# hundred small operators, each of which the host would have to launch. More are merged before.
SENT_AS_THEY_ARE = 2**20


class Key(NamedTuple):
    layer: str
    phase: Phase


class Numbers(NamedTuple):
    """Vitals as `Vitals.packed` has them, [fields, batch, heads]: taken apart only when merged."""

    floats: Tensor
    counts: Tensor

    def over_batch(self) -> "Numbers":
        """[fields, 1, heads]"""
        if self.floats.shape[1] == 1:
            return self
        if self.floats.device.type == "cpu":
            merged = map(torch.from_numpy, over_batch(self.floats.numpy(), self.counts.numpy()))
        else:
            merged = Vitals.unpacked(*self).over_batch().packed()
        return Numbers(*(part[:, None] for part in merged))


class _Stacked(NamedTuple):
    """Calls of one shape, measured as one."""

    keys: Sequence[Key]
    numbers: Numbers  # [fields, calls * batch, heads]
    heads: int

    def sent(self, step: int) -> "Waiting":
        """Lay the heads of all calls side by side. They are different layers', and on the host."""
        calls = len(self.keys)
        parts = (
            part.unflatten(1, (calls, -1)).transpose(1, 2).flatten(2, 3) for part in self.numbers
        )
        heads = dict.fromkeys(self.keys, self.heads)
        return Waiting(step, time.time(), heads, *Numbers(*parts).over_batch(), None)


class Gathering:
    """Calls of the step that is running: batches, micro-batches, layers that run twice."""

    def __init__(self) -> None:
        self._calls: dict[Key, list[Numbers]] = {}
        self._order: dict[Key, None] = {}  # in which calls were made, some of them put off
        self._stacks: list[_Stacked] = []
        # On which calls were measured, by device and by torch's number for it.
        self._streams: dict[tuple[int, int], torch.cuda.Stream] = {}

    def __bool__(self) -> bool:
        return bool(self._calls or self._stacks)

    def expect(self, key: Key) -> None:
        """Remember the place of a call that is measured later."""
        self._order[key] = None

    def add_stack(self, keys: Sequence[Key], numbers: Numbers, heads: int) -> None:
        """Take calls of one shape, one after the other: [fields, calls * batch, heads]."""
        self._stacks.append(_Stacked(keys, numbers, heads))
        if len(self._stacks) > 1:  # of a long step, or layers of several shapes
            self._take_apart()

    def _take_apart(self) -> None:
        stacks, self._stacks = self._stacks, []
        for keys, (floats, counts), heads in stacks:
            parts = zip(floats.chunk(len(keys), 1), counts.chunk(len(keys), 1), strict=True)
            for key, part in zip(keys, parts, strict=True):
                self.add(key.layer, key.phase, Numbers(*part), heads)

    def add(self, layer: str, phase: Phase, numbers: Numbers, heads: int) -> None:
        """numbers of any shape whose last dimension counts heads (or batch times heads)."""
        floats, counts = numbers
        if floats.requires_grad:
            floats = floats.detach()
            numbers = Numbers(floats, counts)
        if floats.dim() != 3 or floats.shape[-1] != heads:
            floats = floats.reshape(len(floats), -1, heads)
            numbers = Numbers(floats, counts.reshape(len(counts), -1, heads))
        if floats.is_cuda:
            self._note_stream(floats.device)
        key = Key(layer, phase)
        self._order[key] = None
        calls = self._calls.setdefault(key, [])
        calls.append(numbers)
        if len(calls) >= MERGE_AT:
            for stream in self._streams.values():
                _join(stream, {key: calls})
            calls[:] = [_joined(calls, 1).over_batch()]

    def close(self, step: int) -> "list[Waiting]":
        """Everything gathered, on its way to the host; the next step begins empty."""
        if self._stacks:
            (stack,) = self._stacks
            if not self._calls and len(set(stack.keys)) == len(stack.keys):
                self._stacks, self._order = [], {}
                return [stack.sent(step)]
            self._take_apart()
        order, self._order = self._order, {}
        calls = {key: self._calls[key] for key in order if key in self._calls}
        self._calls = {}
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            _join(stream, calls)
        # Layers of equal batch are merged side by side, as if they were one with many heads:
        # a merge costs the same few dozen operations whatever its width.
        alike: dict[Any, dict[Key, Numbers]] = {}
        for key, parts in calls.items():
            one = parts[0] if len(parts) == 1 else _joined(parts, 1)
            alike.setdefault((one.floats.shape[1], one.floats.device), {})[key] = one
        return [_send(step, layers) for layers in alike.values()]

    def _note_stream(self, device: torch.device) -> None:
        # A Stream is an object of some microseconds, and mostly it is the same at every call.
        key = device.index, torch._C._cuda_getCurrentRawStream(device.index)
        if key not in self._streams:
            self._streams[key] = torch.cuda.current_stream(device)


@dataclass(frozen=True)
class Waiting:
    """Readings whose numbers may still be on their way from the device."""

    step: int
    time: float
    heads: dict[Key, int]
    floats: Tensor  # [fields, batch, heads of all layers], on the host
    counts: Tensor
    arrived: Any  # a CUDA event, or None where the numbers never were elsewhere

    @property
    def here(self) -> bool:
        return self.arrived is None or self.arrived.query()

    def readings(self) -> list[Reading]:
        """Waits where the numbers are not here yet."""
        if self.arrived is not None:
            self.arrived.synchronize()
        floats, counts = over_batch(self.floats.numpy(), self.counts.numpy())
        if floats.dtype != np.float32:
            with np.errstate(over="ignore"):  # a float64 logit of 1e300 is kept as infinity
                floats = floats.astype(np.float32)
        found, end = [], 0
        for key, heads in self.heads.items():
            begin, end = end, end + heads
            # Copies: who keeps one layer's reading does not keep those of all layers.
            some, others = floats[:, begin:end].copy(), counts[:, begin:end].copy()
            found.append(Reading.trusted(self.step, key.phase, self.time, key.layer, some, others))
        return found


def _send(step: int, layers: dict[Key, Numbers]) -> Waiting:
    heads = {key: one.floats.shape[-1] for key, one in layers.items()}
    floats, counts = together = _joined(list(layers.values()), 2)
    arrived = None
    if not floats.is_cuda or floats.numel() + counts.numel() > SENT_AS_THEY_ARE:
        floats, counts = together.over_batch()
    if floats.is_cuda:
        stream = torch.cuda.current_stream(floats.device)
        floats, counts = _to_host(floats), _to_host(counts)
        arrived = torch.cuda.Event()
        arrived.record(stream)
    return Waiting(step, time.time(), heads, floats, counts, arrived)


def _to_host(numbers: Tensor) -> Tensor:
    """Of which nothing is known before the copy's event."""
    pinned = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
    return pinned.copy_(numbers, non_blocking=True)


def _join(stream: torch.cuda.Stream, calls: dict[Key, list[Numbers]]) -> None:
    """What was measured on a stream of the user's is merged on the one that is current now."""
    current = torch.cuda.current_stream(stream.device)
    if stream == current:
        return
    current.wait_stream(stream)
    for one in (one for parts in calls.values() for one in parts):
        if one.floats.device == stream.device:
            # Memory belongs to the stream that asked for it, and would go back to it too soon.
            for part in one:
                part.record_stream(current)


def _joined(parts: list[Numbers], dim: int) -> Numbers:
    if len(parts) == 1:
        return parts[0]
    floats, counts = zip(*parts, strict=True)
    return Numbers(torch.cat(floats, dim), torch.cat(counts, dim))
