"""A number of a step that is not waited for."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaledot.watch.reading import Scalar


class Late(NamedTuple):
    """A number that may still be on its way from its device."""

    step: int
    name: str
    value: float | Tensor
    arrived: Any  # a CUDA event, or None where there is nothing to wait for

    @staticmethod
    def of(step: int, name: str, value: float | Tensor) -> "Late":
        if not isinstance(value, Tensor):
            return Late(step, name, float(value), None)
        value = value.detach()
        if value.dtype != torch.float32:
            value = value.float()
        if not value.is_cuda:
            return Late(step, name, float(value), None)
        # By name: torch.set_default_device may say otherwise, and only a CPU has pages to pin.
        pinned = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True)
        pinned.copy_(value, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(value.device))
        return Late(step, name, pinned, arrived)

    @property
    def here(self) -> bool:
        return self.arrived is None or self.arrived.query()

    def scalar(self) -> Scalar:
        if self.arrived is not None:
            self.arrived.synchronize()
        return Scalar(self.step, self.name, float(self.value))
