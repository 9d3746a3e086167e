"""How a twin's scores are held: QK-Clip (Kimi K2, arXiv 2507.20534), after every step.

On a CPU the reading of a step is there when the step ends, and a few lines do it. On a GPU it comes
steps later, because nobody waits for it; so there scaledot's own remedy does it, which makes the
factors of the step's own scores on the device.
"""

import logging
from typing import Any

import torch
from torch import nn

from scaledot.watch import Watch, remedies


class Clip:
    """limit None: nothing is held. by_remedy: by scaledot.watch.remedies."""

    def __init__(
        self, watch: Watch, model: nn.Module, limit: float | None, by_remedy: bool
    ) -> None:
        self._watch, self._model = watch, model
        self._limit = None if by_remedy else limit
        self._failed = _Failed()
        self._installed: Any = None
        if by_remedy and limit is not None:
            remedy = remedies.Remedy("qk-clip", limit)
            self._installed = remedies.install(watch, remedy, say=lambda line: None)

    def after_step(self) -> None:
        if self._limit is not None:
            _scale(self._model, self._watch, self._limit)

    def __enter__(self) -> "Clip":
        logging.getLogger("scaledot.watch").addHandler(self._failed)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """A remedy that fails in a run is logged, and training goes on; a label needs to know."""
        logging.getLogger("scaledot.watch").removeHandler(self._failed)
        if self._installed is None:
            return
        said = self._why_not_held()
        self._installed.remove()  # or it would look at every attention of this process
        if error is None and said:
            raise RuntimeError(f"the twin's scores were not held: {said}")

    def _why_not_held(self) -> str:
        if self._failed.lines or self._installed.refused:
            return "; ".join([*self._failed.lines, *self._installed.refused.values()])
        return "" if self._installed.layers else "no attention layer was found"


class _Failed(logging.Handler):
    """Errors of the watch, as lines."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _scale(model: nn.Module, watch: Watch, limit: float) -> None:
    """The rows of q and k of a head whose score passed the limit."""
    for (layer, phase), reading in watch.latest.items():
        if phase != "train":
            continue
        attention = model.get_submodule(layer)
        most = torch.from_numpy(reading.value("max_logit").copy())
        factor = torch.where(most > limit, (limit / most).sqrt(), torch.ones(()))
        with torch.no_grad():
            width = attention.qkv.weight.shape[1]
            rows = attention.qkv.weight.view(3, attention.heads, -1, width)
            rows[:2] *= factor[None, :, None, None]
