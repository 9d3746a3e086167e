"""The loss, where nobody hands it over: what backward is called on, if that is one number.

Tensor.backward, Lightning and accelerate all end in torch.autograd.backward. A GradScaler's product
is not the loss; what it was given is. Values stay on the device until their step is over.
"""

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scaledot.watch.late import Late
from scaledot.watch.probes.patch import Attribute
from scaledot.watch.reading import LOSS

_listeners: list["Losses"] = []
_patches: list[Attribute] = []
_scaled: dict[int, Any] = {}  # products of a GradScaler, by id, while they live


class Losses:
    """What backward was called on since the last `taken`."""

    def __init__(self) -> None:
        self._values: list[Tensor] = []
        self._passed: tuple[int, list[Tensor]] | None = None  # the last step that was not taken
        self._broken = False  # a loss that is no number was handed on
        _listeners.append(self)
        if not _patches:
            _patches.extend(_made())

    def add(self, value: Tensor) -> None:
        self._values.append(value.detach())

    def pass_by(self, step: int) -> Late | None:
        """The step is not looked at. Its loss is kept as the last one; the first of a run that is
        no number is handed on all the same, where a look at it does not wait for a device."""
        values, self._values = self._values, []
        if not values:
            return None
        self._passed = step, values
        if self._broken or not all(value.is_cpu for value in values):
            return None
        self._broken = not all(math.isfinite(value.item()) for value in values)
        if not self._broken:
            return None
        self._passed = None
        return _mean(step, values)

    def taken(self, step: int) -> Late | None:
        """The mean over the step's backward calls, on its way to the host; None: there was none."""
        values, self._values, self._passed = self._values, [], None
        return _mean(step, values) if values else None

    def last(self) -> Late | None:
        """The loss of the last step, where that was passed by."""
        return None if self._passed is None else _mean(*self._passed)

    def remove(self) -> None:
        if self in _listeners:
            _listeners.remove(self)
        if not _listeners:
            while _patches:
                _patches.pop().undo()
            _scaled.clear()


def _mean(step: int, values: list[Tensor]) -> Late:
    if len(values) == 1:  # its own mean
        return Late.of(step, LOSS, values[0].reshape(()))
    return Late.of(step, LOSS, torch.stack([value.reshape(()) for value in values]).mean())


def _made() -> list[Attribute]:
    patches = [
        Attribute(torch.autograd, "backward", _told(torch.autograd.backward)),
        Attribute(torch.amp.GradScaler, "scale", _unscaled(torch.amp.GradScaler.scale)),
    ]
    for patch in patches:
        patch.make()
    return patches


def _told(backward: Callable[..., Any]) -> Callable[..., Any]:
    def told(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        one = tensors[0] if isinstance(tensors, (list, tuple)) and len(tensors) == 1 else tensors
        if _scaled.pop(id(one), None) is not None:
            pass  # the loss itself was noted when it was scaled
        elif type(one) is Tensor and one.numel() == 1 and one.is_floating_point():
            for listener in _listeners:
                listener.add(one)
        return backward(tensors, *args, **kwargs)

    return told


def _unscaled(scale: Callable[..., Any]) -> Callable[..., Any]:
    def unscaled(scaler: Any, outputs: Any) -> Any:
        product = scale(scaler, outputs)
        if type(outputs) is Tensor and outputs.numel() == 1 and product is not outputs:
            name = id(product)
            _scaled[name] = weakref.ref(product, lambda _: _scaled.pop(name, None))
            for listener in _listeners:
                listener.add(outputs)
        return product

    return unscaled
