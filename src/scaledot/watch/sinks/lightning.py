"""A callback for Lightning's `Trainer`.

from scaledot.watch.sinks import LightningCallback
lightning.Trainer(..., callbacks=[LightningCallback(store="run.vitals")])
"""

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from scaledot.watch.reading import LOSS
from scaledot.watch.sinks.attachment import Attachment
from scaledot.watch.sinks.extra import required

WHAT = "the callback for Lightning's Trainer"


def _callback_class() -> Any:
    """Lightning comes under two names."""
    old = find_spec("lightning") is None and find_spec("pytorch_lightning") is not None
    return required("pytorch_lightning" if old else "lightning.pytorch", "lightning", WHAT).Callback


_Base: Any = _callback_class()


class LightningCallback(_Base):
    """Watches from `on_train_start` to the end of the training or its failure, on rank 0 only.

    The arguments are those of `scaledot.Watch`, and `watch` is it while the training lasts. The
    loss is what `training_step` returns, its mean over accumulated batches: of every step that is
    read, and every `log_every_n_steps` steps.
    """

    def __init__(
        self,
        store: Any = None,
        sinks: Iterable[Any] = (),
        every: int | None = None,
        budget: float = 0.01,
        replace: bool = False,
    ) -> None:
        super().__init__()
        self._attached = Attachment(store, sinks, every, budget, replace)
        self._loss: Tensor | None = None  # of the step that is running
        self._read = False  # is the step that is running read by the watch?
        self._ended = 0  # steps

    @property
    def watch(self) -> Any:
        return self._attached.watch

    def remove(self) -> None:
        self._loss = None
        self._attached.end()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            self._loss, self._ended = None, 0
            self._attached.begin(pl_module, trainer.global_step)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self._read = self.watch is not None and self.watch.cadence.due

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._attached.stepped_with(optimizer)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.watch is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):
            self._add(loss.detach(), pl_module.automatic_optimization)
        if self.watch.step_number == self._ended:
            return  # more batches are accumulated before the optimizer steps
        self._ended = self.watch.step_number
        if self._read or self._ended % max(1, trainer.log_every_n_steps) == 0:
            self._attached.numbers(**{LOSS: self._loss})
        self._loss = None

    def _add(self, loss: Tensor, automatic: bool) -> None:
        """Lightning has divided by the number of accumulated batches: their sum is the mean."""
        self._loss = loss if self._loss is None or not automatic else self._loss + loss

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.remove()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.remove()
