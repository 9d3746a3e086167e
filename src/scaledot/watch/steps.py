"""When a step ends, and whether a call belongs to training or to evaluation."""

import itertools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from scaledot.watch.probes.compiled import constant
from scaledot.watch.reading import Phase


class StepEnds:
    """Calls `ended(optimizer)` once a training step, after its optimizer's step.

    Micro-batches before it belong to the step. Two optimizers that take turns (Muon for matrices
    and AdamW for the rest) end one step between them: the one that stepped last is not asked
    again until one of them comes a second time. A step that a GradScaler skips does not end.
    """

    def __init__(self, ended: Callable[[Optimizer | None], None]) -> None:
        self._ended = ended
        self._turns = threading.local()  # a training may have several threads
        self._number = next(_numbers)
        _compiled_hooks[self._number] = self
        self._handle = register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():  # torch.compile(optimizer.step)
            _compiled_step(_BUFFER, self._number, _number_of_trace())
        else:
            self.stepped(id(optimizer), optimizer)

    def stepped(self, who: int, optimizer: Optimizer | None) -> None:
        # Who has stepped since a step of this thread ended.
        those = self._turns.__dict__.setdefault("stepped", set())
        if who in those or not those:
            those.clear()
            self._ended(optimizer)
        those.add(who)

    def remove(self) -> None:
        self._handle.remove()
        _compiled_hooks.pop(self._number, None)


_numbers = itertools.count()
_compiled_hooks: dict[int, StepEnds] = {}
_BUFFER = torch.zeros(
    1, device="cpu"
)  # never read: an operator that writes is not removed from a graph


@constant
def _number_of_trace() -> int:
    """Stands for the optimizer whose step is being compiled."""
    return -1 - next(_numbers)


@torch.library.custom_op("scaledot::step_ended", mutates_args=("buffer",))
def _compiled_step(buffer: torch.Tensor, hook: int, who: int) -> None:
    if hook in _compiled_hooks:
        _compiled_hooks[hook].stepped(who, None)


@_compiled_step.register_fake
def _(buffer: torch.Tensor, hook: int, who: int) -> None:
    return None


def phase_of(module: nn.Module | None, inside_function: bool) -> Phase:
    """Evaluation: the module is in evaluation mode, or no gradient will be asked for.

    An autograd.Function runs its forward without gradients and may ask for them all the same:
    reentrant checkpointing does.
    """
    with_grad = torch.is_grad_enabled() or inside_function
    training = with_grad and (module is None or module.training)
    return "train" if training else "eval"


def learning_rate(optimizer: Optimizer) -> float | None:
    """Of the first group; None where reading it would wait for the device."""
    rate = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
    if isinstance(rate, torch.Tensor):
        return float(rate) if rate.device.type == "cpu" else None
    return None if rate is None else float(rate)
