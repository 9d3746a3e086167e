"""The loss, where nobody hands it over: what backward is called on, if that is one number.

Tensor.backward, Lightning and accelerate all end in torch.autograd.backward. A GradScaler's product
is not the loss; what it was given is. Values stay on the device until their step is over.

Where a step has several backward calls (gradient accumulation), its loss is their sum if each was
divided by their number before (`(loss / 4).backward()`, Lightning), or where accelerate makes the
calls, as in transformers' Trainer, which divides in one way or another; else it is their mean.
"""

import logging
import math
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from scaledot.watch.late import Late
from scaledot.watch.probes import hub
from scaledot.watch.probes.by_hand import note_graph
from scaledot.watch.probes.frames import hide, invisible, uncounted
from scaledot.watch.probes.patch import Attribute, KnownToScript, stands_for
from scaledot.watch.reading import LOSS
from scaledot.watch.undisturbed import undisturbed

_len_torch_dispatch_stack = torch._C._len_torch_dispatch_stack
_len_torch_function_stack = torch._C._len_torch_function_stack
log = logging.getLogger("scaledot.watch")


class _Passes(threading.local):
    """How many backward passes this thread has begun, for `steps`."""

    backward = 0


passes = _Passes()
_listeners: list["Losses"] = []
_patches: list[Attribute | KnownToScript] = []
_scaled: dict[int, Any] = {}  # products of a GradScaler, by id, while they live


class Part(NamedTuple):
    """What one backward call was given."""

    value: float | Tensor  # a tensor where it lies on a device that would have to be waited for
    dtype: torch.dtype
    divisor: float | None  # by which it was divided just before; None: it was not
    adds: bool  # its caller divides: the parts of a step add up


class Losses:
    """What backward was called on since the last `taken`."""

    def __init__(self) -> None:
        self.meant = 1  # calls of the last step, where their mean was taken and not their sum
        self._values: list[Part] = []
        self._shares = 0  # by how many the parts of a step are divided
        self._passed: tuple[int, list[Part]] | None = None  # the last step that was not taken
        self._broken = False  # a loss that is no number was handed on
        _listeners.append(self)
        if not _patches:
            _patches.extend(_made())

    def add(self, value: Tensor, adds: bool = False) -> None:
        number = value.item() if value.is_cpu else value.detach()
        made = value.grad_fn
        divided = made is not None and made.name() in DIVISIONS
        divisor = _divisor(made) if divided else None
        self._values.append(Part(number, value.dtype, divisor, adds))

    def pass_by(self, step: int) -> Late | None:
        """The step is not looked at. Its loss is kept as the last one; the first of a run that is
        no number is handed on all the same, where a look at it does not wait for a device."""
        values, self._values = self._values, []
        if not values:
            return None
        self._passed = step, values
        if self._broken:
            return None
        for part in values:
            if type(part.value) is not float:
                return None
            self._broken = self._broken or not math.isfinite(part.value)
        if not self._broken:
            return None
        self._passed = None
        with undisturbed():
            return self._whole(step, values)

    def taken(self, step: int) -> Late | None:
        """The step's loss, on its way to the host; None: nothing was called."""
        values, self._values, self._passed = self._values, [], None
        return self._whole(step, values) if values else None

    def last(self) -> Late | None:
        """The loss of the last step, where that was passed by."""
        return None if self._passed is None else self._whole(*self._passed)

    def remove(self) -> None:
        if self in _listeners:
            _listeners.remove(self)
        if not _listeners:
            while _patches:
                _patches.pop().undo()
            _scaled.clear()

    def _whole(self, step: int, parts: list[Part]) -> Late:
        values = [_tensor_of(part) for part in parts]
        divided = {part.divisor for part in parts}
        if len(parts) > 1 and _all_by(divided, len(parts)):
            self._shares = len(parts)
        summed = all(part.adds for part in parts)
        self.meant = 1
        if self._shares and _all_by(divided, self._shares) and not summed:
            # The last step of an epoch may have fewer parts; each is a share all the same.
            return Late.of(step, LOSS, torch.stack(values).mean() * self._shares)
        if len(values) == 1:  # its own mean
            return Late.of(step, LOSS, values[0])
        if summed:
            return Late.of(step, LOSS, torch.stack(values).sum())
        self.meant = len(values)
        return Late.of(step, LOSS, torch.stack(values).mean())


def _tensor_of(part: Part) -> Tensor:
    if isinstance(part.value, Tensor):
        return part.value.reshape(())
    return torch.tensor(part.value, dtype=part.dtype, device="cpu")


def _all_by(divisors: set[float | None], number: int) -> bool:
    return all(one is not None and math.isclose(one, number, rel_tol=1e-5) for one in divisors)


DIVISIONS = ("DivBackward0", "MulBackward0")


def _divisor(made: Any) -> float | None:
    """Return 4 of the node of `loss / 4` or `loss * 0.25`; None: a number did not make it."""
    try:
        number = made._saved_other
        if not number.is_cpu or number.dim() or number.requires_grad:
            return None
        factor = number.item()
        return factor if made.name() == "DivBackward0" else 1 / factor
    except (AttributeError, RuntimeError, ZeroDivisionError):  # of another torch; freed; zero
        return None


def _by_accelerate(ours: int) -> bool:
    """Tell whether accelerate has called Tensor.backward or scale, which have called the watch.

    ours: frames of the watch on the stack, the caller's included.
    """
    frame = sys._getframe(ours + 1)
    callers = (frame, frame.f_back)
    return any(one and one.f_globals.get("__name__") == "accelerate.accelerator" for one in callers)


def _is_number(value: Tensor) -> bool:
    if torch._C._len_torch_function_stack():
        with torch._C.DisableTorchFunction():  # a mode of the user's would be asked
            return value.numel() == 1 and value.is_floating_point()
    return value.numel() == 1 and value.is_floating_point()


def _made() -> list[Attribute | KnownToScript]:
    backward = torch.autograd.backward
    told = _told(backward)
    patches = [
        KnownToScript(backward, told, "aten::backward"),
        Attribute(torch.autograd, "backward", told),
        Attribute(torch.amp.GradScaler, "scale", _unscaled(torch.amp.GradScaler.scale)),
    ]
    for patch in patches:
        patch.make()
    return patches


def _told(backward: Callable[..., Any]) -> Callable[..., Any]:
    # Few and short functions: this runs in every step, and steps may be short.
    def told(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        passes.backward += 1
        one = tensors
        if type(one) is not Tensor and isinstance(one, (list, tuple)) and len(one) == 1:
            one = one[0]
        if _scaled and _scaled.pop(id(one), None) is not None:
            pass  # the loss itself was noted when it was scaled
        elif type(one) is Tensor:
            if _len_torch_dispatch_stack() or _len_torch_function_stack():
                with undisturbed():  # a mode of the user's would be asked
                    _note(one)
            else:
                _note(one)
        if is_dynamo_compiling():
            return backward(tensors, *args, **kwargs)
        try:
            return backward(tensors, *args, **kwargs)
        except BaseException as error:
            hide(error)
            raise

    return stands_for(backward, uncounted(told))


def _note(one: Tensor) -> None:
    """Hand on what may be a loss. Nothing that goes wrong here may reach the training."""
    try:
        if one.numel() == 1 and one.is_floating_point():
            adds = "accelerate" in sys.modules and _by_accelerate(ours=2)
            for listener in _listeners:
                listener.add(one, adds)
            if keepers := hub.inventory():
                note_graph(one, keepers)
    except Exception:
        log.exception("the watch could not read a loss; training goes on")


def _unscaled(scale: Callable[..., Any]) -> Callable[..., Any]:
    @invisible
    def unscaled(scaler: Any, outputs: Any) -> Any:
        product = scale(scaler, outputs)
        if type(outputs) is Tensor and _is_number(outputs) and product is not outputs:
            name = id(product)
            _scaled[name] = weakref.ref(product, lambda _: _scaled.pop(name, None))
            adds = _by_accelerate(ours=2)
            with undisturbed():
                for listener in _listeners:
                    listener.add(outputs, adds)
        return product

    return stands_for(scale, unscaled)
