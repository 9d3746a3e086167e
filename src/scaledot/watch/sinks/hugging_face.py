"""A callback for `transformers.Trainer`.

from scaledot.watch.sinks import TrainerCallback
Trainer(model, ..., callbacks=[TrainerCallback(store="run.vitals")])
"""

from collections.abc import Iterable
from typing import Any

from scaledot.watch.reading import LOSS
from scaledot.watch.sinks.attachment import Attachment
from scaledot.watch.sinks.extra import required

WHAT = "the callback for transformers' Trainer"
# Of what Trainer logs; its learning rate is already the next step's.
LOGGED = {"loss": LOSS, "grad_norm": "grad_norm", "eval_loss": "eval_loss"}

_Base: Any = required("transformers", "hf", WHAT).TrainerCallback


class TrainerCallback(_Base):
    """Watches from `on_train_begin` to `on_train_end`, on the first process only.

    The arguments are those of `scaledot.Watch`, and `watch` is it while the training lasts. Trainer
    tells no callback when a training fails: then call `remove`, or use the callback as a context.
    """

    def __init__(
        self,
        store: Any = None,
        sinks: Iterable[Any] = (),
        every: int | None = None,
        budget: float = 0.01,
        replace: bool = False,
    ) -> None:
        self._attached = Attachment(store, sinks, every, budget, replace)

    @property
    def watch(self) -> Any:
        return self._attached.watch

    def remove(self) -> None:
        self._attached.end()

    def __enter__(self) -> "TrainerCallback":
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any
    ) -> None:
        if state.is_world_process_zero:
            self._attached.begin(model, state.global_step)

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **rest: Any
    ) -> None:
        if optimizer is not None:
            self._attached.stepped_with(optimizer)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **rest: Any
    ) -> None:
        known = {LOGGED[name]: value for name, value in (logs or {}).items() if name in LOGGED}
        if known:
            self._attached.numbers(**known)

    def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.remove()
