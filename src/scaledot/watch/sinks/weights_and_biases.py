"""Weights & Biases: heat maps and aggregates in the user's run, or in an offline run of ours.

Offline, nothing leaves the machine: the run lies in a folder, `wandb sync FOLDER` uploads it. A
run that the user has started is taken as it is, online or not.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scaledot.watch.reading import Scalar
from scaledot.watch.sinks.extra import required
from scaledot.watch.sinks.picture import VITALS, PictureSink
from scaledot.watch.sinks.whole import WholeStep

STEP = "scaledot/step"  # an axis of our own: the user's `run.log` counts its own steps


class WeightsAndBiases(PictureSink):
    """run: a run to write into; None: the active one, or a new offline run in `folder`."""

    def __init__(
        self,
        project: str = "scaledot",
        folder: str | os.PathLike[str] = ".",
        run: Any = None,
        vitals: Sequence[str] = VITALS,
        pictures: int = 1,
    ) -> None:
        required("PIL", "wandb", "the Weights & Biases sink")
        self._wandb = required("wandb", "wandb", "the Weights & Biases sink")
        self.run = run or self._wandb.run
        self._ours = self.run is None
        if self._ours:
            self.run = _offline_run(self._wandb, project, Path(folder))
        self.run.define_metric("scaledot*", step_metric=STEP)
        super().__init__(vitals, pictures)

    def _show(self, step: WholeStep, numbers: dict[str, float]) -> None:
        pictures = {
            tag: self._wandb.Image(picture.pixels, caption=picture.caption)
            for tag, picture in self._pictures(step).items()
        }
        self.run.log({STEP: step.step, **numbers, **pictures})

    def _number(self, scalar: Scalar) -> None:
        self.run.log({STEP: scalar.step, f"scaledot/{scalar.name}": scalar.value})

    def _push(self) -> None:
        pass  # its own process writes to the disk all the time

    def _close(self) -> None:
        if self._ours:
            self.run.finish()


def _offline_run(wandb: Any, project: str, folder: Path) -> Any:
    """Vitals only: no console, no code, no machine, no report of errors over the network."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    folder.mkdir(parents=True, exist_ok=True)
    settings = wandb.Settings(
        console="off",
        disable_code=True,
        disable_git=True,
        silent=True,
        x_disable_machine_info=True,
        x_disable_meta=True,
        x_disable_stats=True,
    )
    return wandb.init(
        project=project,
        dir=str(folder.absolute()),
        mode="offline",
        reinit="create_new",
        settings=settings,
    )
