"""Find when a step ends, and whether a call belongs to training or to evaluation."""

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from scaledot.watch import losses
from scaledot.watch.probes.compiled import constant
from scaledot.watch.reading import Phase


class StepEnds:
    """Call `ended(optimizer)` once a training step, after its optimizer's step.

    A step ends when an optimizer steps after a forward or backward pass that came since the last
    end. Micro-batches before it belong to the step. Optimizers that share the passes (Muon for
    matrices and AdamW for the rest) end one step between them; those that have passes of their own
    (the two of a GAN, or one that takes the place of another) end one each. Where autograd sees no
    pass (gradients written by hand, replayed CUDA graphs), a step ends when an optimizer that has
    stepped since the last end steps again. A step that a GradScaler skips does not end.
    """

    def __init__(self, ended: Callable[[Optimizer | None], None]) -> None:
        self._ended = ended
        self._thread = _Thread()  # each of several that train has steps of its own
        self._number = next(_numbers)
        _compiled_hooks[self._number] = self
        self._handle = register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if is_compiling():  # torch.compile(optimizer.step)
            _compiled_step(_BUFFER, self._number, _number_of_trace())
        else:
            self.stepped(weakref.ref(optimizer), optimizer)

    def stepped(self, who: "weakref.ref[Optimizer] | int", optimizer: Optimizer | None) -> None:
        thread = self._thread.state
        # An optimizer may step inside a backward pass, from a hook of a gradient, where checkpoints
        # run forward again between two optimizers.
        in_backward = _current_graph_task_id() != -1
        pass_came = not thread.in_backward if in_backward else thread.passes != _passes()
        if pass_came or who in thread.stepped:
            thread.stepped.clear()
            self._ended(optimizer)
            thread.in_backward = in_backward
            thread.passes = _passes()
        thread.stepped.append(who)

    def forget_passes(self) -> None:
        """Count the passes up to now to what has been: they are not the training's."""
        self._thread.state.passes = _passes()

    def remove(self) -> None:
        self._handle.remove()
        _compiled_hooks.pop(self._number, None)


class _State:
    """What a thread's last end of a step has left."""

    __slots__ = ("in_backward", "passes", "stepped")

    def __init__(self) -> None:
        # Who has stepped since: optimizers, and compiled steps by their number.
        self.stepped: list[weakref.ref[Optimizer] | int] = []
        self.in_backward = False  # it was inside a backward pass
        self.passes: tuple[int, int] | None = None  # how many there had been


class _Thread(threading.local):
    def __init__(self) -> None:
        self.state = _State()


def _passes() -> tuple[int, int]:
    """Return numbers that rise with each forward and each backward pass of this thread.

    The first counts the nodes of autograd's graphs; the second misses passes where losses are not
    kept.
    """
    return torch._C._autograd._get_sequence_nr(), losses.passes.backward


_current_graph_task_id = torch._C._current_graph_task_id
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
