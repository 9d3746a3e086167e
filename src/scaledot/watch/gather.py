"""A step's vitals, from many calls to one reading a layer; read from the device a step later."""

import time
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaledot.measure import COUNT_FIELDS, FLOAT_FIELDS, Vitals
from scaledot.watch.reading import Phase, Reading

NAMES = FLOAT_FIELDS + COUNT_FIELDS
MERGE_AT = 64  # calls of one layer that may wait; an endless evaluation must not fill the memory


class Key(NamedTuple):
    layer: str
    phase: Phase


class Gathering:
    """Calls of the step that is running: batches, micro-batches, layers that run twice."""

    def __init__(self) -> None:
        self._calls: dict[Key, list[Vitals]] = {}
        self._streams: set[torch.cuda.Stream] = set()  # on which calls were measured

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, layer: str, phase: Phase, vitals: Vitals, heads: int) -> None:
        """vitals of any leading shape whose last dimension counts heads (or batch times heads)."""
        rows = _mapped(vitals, lambda tensor: tensor.detach().reshape(-1, heads))
        if rows.entropy.is_cuda:
            self._streams.add(torch.cuda.current_stream(rows.entropy.device))
        calls = self._calls.setdefault(Key(layer, phase), [])
        calls.append(rows)
        if len(calls) >= MERGE_AT:
            merged = _joined(calls, 0).over_batch()
            self._calls[Key(layer, phase)] = [_mapped(merged, lambda tensor: tensor[None])]

    def close(self, step: int) -> "list[Waiting]":
        """Everything gathered, merged and on its way to the host; the next step begins empty."""
        calls, self._calls = self._calls, {}
        streams, self._streams = self._streams, set()
        for stream in streams:
            _join(stream, calls)
        layers = {key: _joined(parts, 0) for key, parts in calls.items()}
        # Layers of equal batch are merged side by side, as if they were one with many heads:
        # a merge costs some hundred small operators whatever its width.
        alike: dict[Any, list[Key]] = {}
        for key, vitals in layers.items():
            alike.setdefault((vitals.shape[0], vitals.entropy.device), []).append(key)
        return [_send(step, {key: layers[key] for key in keys}) for keys in alike.values()]


@dataclass(frozen=True)
class Waiting:
    """Readings whose numbers may still be on their way from the device."""

    step: int
    time: float
    heads: dict[Key, int]
    numbers: Tensor  # [fields, heads of all layers], float64: counts stay exact up to 2^53
    arrived: Any  # a CUDA event, or None where the numbers never were elsewhere

    @property
    def here(self) -> bool:
        return self.arrived is None or self.arrived.query()

    def readings(self) -> list[Reading]:
        """Waits where the numbers are not here yet."""
        if self.arrived is not None:
            self.arrived.synchronize()
        parts = self.numbers.split(list(self.heads.values()), dim=1)
        return [
            Reading(
                step=self.step,
                phase=key.phase,
                time=self.time,
                layer=key.layer,
                floats=part[: len(FLOAT_FIELDS)].numpy(),
                counts=part[len(FLOAT_FIELDS) :].numpy(),
            )
            for key, part in zip(self.heads, parts, strict=True)
        ]


def _send(step: int, layers: dict[Key, Vitals]) -> Waiting:
    heads = {key: vitals.shape[-1] for key, vitals in layers.items()}
    merged = _joined(list(layers.values()), 1).over_batch()
    numbers = torch.stack([getattr(merged, name).double() for name in NAMES])
    arrived = None
    if numbers.is_cuda:
        pinned = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
        pinned.copy_(numbers, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(numbers.device))
        numbers = pinned
    return Waiting(step, time.time(), heads, numbers, arrived)


def _join(stream: torch.cuda.Stream, calls: dict[Key, list[Vitals]]) -> None:
    """What was measured on a stream of the user's is merged on the one that is current now."""
    current = torch.cuda.current_stream(stream.device)
    if stream == current:
        return
    current.wait_stream(stream)
    for vitals in (one for parts in calls.values() for one in parts):
        if vitals.entropy.device == stream.device:
            # Memory belongs to the stream that asked for it, and would go back to it too soon.
            _mapped(vitals, lambda tensor: tensor.record_stream(current))


def _joined(parts: list[Vitals], dim: int) -> Vitals:
    if len(parts) == 1:
        return parts[0]
    named: dict[str, Any] = {
        name: torch.cat([getattr(part, name) for part in parts], dim) for name in NAMES
    }
    return Vitals(**named)


def _mapped(vitals: Vitals, function: Any) -> Vitals:
    changed: dict[str, Any] = {name: function(getattr(vitals, name)) for name in NAMES}
    return replace(vitals, **changed, per_row=None)
