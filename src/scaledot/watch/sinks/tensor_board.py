"""TensorBoard: a heat map a vital under Images, aggregates under Scalars, the legend under Text."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scaledot.watch.reading import Scalar
from scaledot.watch.sinks.aggregate import prefix_of
from scaledot.watch.sinks.extra import required
from scaledot.watch.sinks.heat_map import legend
from scaledot.watch.sinks.picture import VITALS, PictureSink
from scaledot.watch.sinks.whole import WholeStep


class TensorBoard(PictureSink):
    """Writes an event file into `folder`; look at it with `tensorboard --logdir folder`."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        vitals: Sequence[str] = VITALS,
        pictures: int = 1,
    ) -> None:
        required("PIL", "tensorboard", "the TensorBoard sink")
        board = required("torch.utils.tensorboard", "tensorboard", "the TensorBoard sink")
        self.folder = Path(folder).absolute()
        self._writer: Any = board.SummaryWriter(str(self.folder))
        self._legends: dict[str, str] = {}
        super().__init__(vitals, pictures)

    def _show(self, step: WholeStep, numbers: dict[str, float]) -> None:
        for tag, value in numbers.items():
            self._writer.add_scalar(tag, value, step.step)
        for tag, picture in self._pictures(step).items():
            self._writer.add_image(tag, picture.pixels, step.step, dataformats="HWC")
        tag, words = f"{prefix_of(step.phase)}/legend", legend(step, self.vitals)
        if self._legends.get(tag) != words:
            self._legends[tag] = words
            self._writer.add_text(tag, words, step.step)

    def _number(self, scalar: Scalar) -> None:
        self._writer.add_scalar(f"scaledot/{scalar.name}", scalar.value, scalar.step)

    def _push(self) -> None:
        self._writer.flush()

    def _close(self) -> None:
        self._writer.close()
