"""A step's vitals, from many calls to one reading a layer; read from the device a step later."""

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaledot.measure import Vitals
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
        """[fields, heads]"""
        return Numbers(*Vitals.unpacked(*self).over_batch().packed())


class Gathering:
    """Calls of the step that is running: batches, micro-batches, layers that run twice."""

    def __init__(self) -> None:
        self._calls: dict[Key, list[Numbers]] = {}
        self._streams: set[torch.cuda.Stream] = set()  # on which calls were measured

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, layer: str, phase: Phase, vitals: Vitals, heads: int) -> None:
        """vitals of any leading shape whose last dimension counts heads (or batch times heads)."""
        floats, counts = vitals.packed()
        rows = Numbers(
            floats.detach().reshape(len(floats), -1, heads),
            counts.detach().reshape(len(counts), -1, heads),
        )
        if floats.is_cuda:
            self._streams.add(torch.cuda.current_stream(floats.device))
        calls = self._calls.setdefault(Key(layer, phase), [])
        calls.append(rows)
        if len(calls) >= MERGE_AT:
            merged = _joined(calls, 1).over_batch()
            self._calls[Key(layer, phase)] = [Numbers(*(part[:, None] for part in merged))]

    def close(self, step: int) -> "list[Waiting]":
        """Everything gathered, on its way to the host; the next step begins empty."""
        calls, self._calls = self._calls, {}
        streams, self._streams = self._streams, set()
        for stream in streams:
            _join(stream, calls)
        layers = {key: _joined(parts, 1) for key, parts in calls.items()}
        # Layers of equal batch are merged side by side, as if they were one with many heads:
        # a merge costs some hundred small operators whatever its width.
        alike: dict[Any, list[Key]] = {}
        for key, one in layers.items():
            alike.setdefault((one.floats.shape[1], one.floats.device), []).append(key)
        return [_send(step, {key: layers[key] for key in keys}) for keys in alike.values()]


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
        floats, counts = Numbers(self.floats, self.counts).over_batch()
        heads = list(self.heads.values())
        parts = zip(self.heads, floats.split(heads, 1), counts.split(heads, 1), strict=True)
        return [
            Reading(
                step=self.step,
                phase=key.phase,
                time=self.time,
                layer=key.layer,
                floats=some.numpy(),
                counts=others.numpy(),
            )
            for key, some, others in parts
        ]


def _send(step: int, layers: dict[Key, Numbers]) -> Waiting:
    heads = {key: one.floats.shape[-1] for key, one in layers.items()}
    floats, counts = together = _joined(list(layers.values()), 2)
    arrived = None
    if not floats.is_cuda or floats.numel() + counts.numel() > SENT_AS_THEY_ARE:
        floats, counts = (part[:, None] for part in together.over_batch())
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
