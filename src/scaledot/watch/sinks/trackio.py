"""trackio: heat maps and aggregates in the user's run, or in a local run of ours.

Local runs lie in the folder TRACKIO_DIR; `trackio show` opens them.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from scaledot.watch.reading import Scalar
from scaledot.watch.sinks.extra import required
from scaledot.watch.sinks.picture import VITALS, PictureSink
from scaledot.watch.sinks.whole import WholeStep

REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")  # either makes trackio send


class Trackio(PictureSink):
    """run: a run to write into; None: the active one, or a new local run called `name`."""

    def __init__(
        self,
        project: str = "scaledot",
        name: str | None = None,
        run: Any = None,
        vitals: Sequence[str] = VITALS,
        pictures: int = 1,
    ) -> None:
        self._trackio = required("trackio", "trackio", "the trackio sink")
        active = required("trackio.context_vars", "trackio", "the trackio sink").current_run
        self.run = run or active.get()
        self._ours = self.run is None
        if self._ours:
            self.run = _local_run(self._trackio, project, name)
            active.set(None)  # the user's trackio.log must not land in our run
        super().__init__(vitals, pictures)

    def _show(self, step: WholeStep, numbers: dict[str, float]) -> None:
        pictures = {
            tag: self._trackio.Image(picture.pixels, caption=picture.caption)
            for tag, picture in self._pictures(step).items()
        }
        self.run.log({**numbers, **pictures}, step=step.step)

    def _number(self, scalar: Scalar) -> None:
        self.run.log({f"scaledot/{scalar.name}": scalar.value}, step=scalar.step)

    def _push(self) -> None:
        pass  # its own thread writes to the disk twice a second

    def _close(self) -> None:
        if self._ours:
            self.run.finish()


def _local_run(trackio: Any, project: str, name: str | None) -> Any:
    for variable in REMOTE:
        if os.environ.get(variable):
            raise ValueError(
                f"{variable} is set, so trackio would send the run away; unset it for a local "
                "run, or start the run yourself: Trackio(run=trackio.init(...))"
            )
    with _without_the_hub():
        return trackio.init(
            project=project, name=name, embed=False, auto_log_gpu=False, auto_log_cpu=False
        )


@contextmanager
def _without_the_hub() -> Iterator[None]:
    """trackio.init asks the Hugging Face Hub for the user's name wherever it finds a token."""
    constants = required("huggingface_hub.constants", "trackio", "the trackio sink")
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
