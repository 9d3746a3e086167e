"""A module that remembers the vitals of its last call, and the switch for it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from scaledot.backends.torch_sdpa import exporting
from scaledot.measure import Vitals


class Measured(nn.Module):
    """`.vitals`: of the last call; None before the first, and after a call that did not measure.

    It is an observation, not state: no parameter, no buffer, without a graph (but inside
    `measure.differentiable()`), and left behind by deepcopy, pickle and torch.save.
    `measure = False` switches to the kernel without vitals; `measuring(model, ...)` does so for a
    whole model. An exported program, and a call inside torch.func's transforms, measures nothing.
    """

    measure: bool
    vitals: Vitals | None

    def __init__(self, measure: bool = True) -> None:
        super().__init__()
        self.measure = measure
        self.vitals = None

    def _attend(
        self,
        attend: Callable[..., Tensor],
        attend_with_vitals: Callable[..., tuple[Tensor, Vitals]],
        *tensors: Tensor,
        **keywords: Any,
    ) -> Tensor:
        """The output of one function or, measuring, of its twin."""
        if exporting():
            return attend(*tensors, **keywords)  # a program has no place to leave the vitals
        if not self.measure or torch._C._are_functorch_transforms_active():
            self.vitals = None
            return attend(*tensors, **keywords)
        out, self.vitals = attend_with_vitals(*tensors, **keywords)
        return out

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "vitals": None}


@contextmanager
def measuring(model: nn.Module, enabled: bool = True) -> Iterator[None]:
    """Set `.measure` of every attention module in `model`, and put it back at the end.

    with scaledot.nn.measuring(model, step % 100 == 0):
        loss = model(batch)
    """
    modules = [module for module in model.modules() if isinstance(module, Measured)]
    before = [module.measure for module in modules]
    for module in modules:
        module.measure = enabled
    try:
        yield
    finally:
        for module, measure in zip(modules, before, strict=True):
            module.measure = measure
