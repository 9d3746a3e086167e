"""Sinks: where readings go besides the store, for the tools people already look at.

    Watch(model, store="run.vitals", sinks=[TensorBoard("runs/today"), JsonLines("run.jsonl")])

`JsonLines`, `Parquet`, `TensorBoard`, `WeightsAndBiases`, `Trackio` are sinks; `TrainerCallback`
(transformers) and `LightningCallback` carry a whole `Watch` into a training framework. The
libraries behind them are extras of scaledot, imported when they are needed.

A `Watch` closes its sinks when it is removed, unless it is made with close_sinks=False; then who
made them closes them. The callbacks keep theirs open for the next training.

A sink has `write(readings, scalars)`, `put(reading)`, `scalar(step, name, value)`, `flush()` and
`close()`; `background` says what all of them promise.
"""

from typing import TYPE_CHECKING, Any

from scaledot.watch.sinks.background import BackgroundSink
from scaledot.watch.sinks.json_lines import JsonLines
from scaledot.watch.sinks.parquet import Parquet
from scaledot.watch.sinks.tensor_board import TensorBoard
from scaledot.watch.sinks.trackio import Trackio
from scaledot.watch.sinks.weights_and_biases import WeightsAndBiases

if TYPE_CHECKING:
    from scaledot.watch.sinks.hugging_face import TrainerCallback
    from scaledot.watch.sinks.lightning import LightningCallback

__all__ = [
    "BackgroundSink",
    "JsonLines",
    "LightningCallback",
    "Parquet",
    "TensorBoard",
    "Trackio",
    "TrainerCallback",
    "WeightsAndBiases",
]


def __getattr__(name: str) -> Any:
    """The callbacks inherit from their frameworks, so naming them is what imports those."""
    if name == "TrainerCallback":
        from scaledot.watch.sinks.hugging_face import TrainerCallback

        return TrainerCallback
    if name == "LightningCallback":
        from scaledot.watch.sinks.lightning import LightningCallback

        return LightningCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
