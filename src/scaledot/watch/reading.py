"""What travels from a probe to the store, the sinks and the viewers: plain records on the CPU.

A `Reading` is one layer's vitals in one step, a `Scalar` one number of a step (loss, learning
rate, step time, the watch's own cost), `RunAttributes` what is known of the run as a whole.
"""

import math
import sys
import time as clock
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, get_args

import numpy as np

from scaledot.fields import COUNT_FIELDS, FLOAT_FIELDS
from scaledot.watch.redact import redact

if TYPE_CHECKING:  # whoever looks at a run that was written needs no torch
    from torch import nn

    from scaledot.measure import Vitals

Phase = Literal["train", "eval"]
PHASES: tuple[Phase, ...] = get_args(Phase)

# The names under which the well-known series are kept; any other name may be used beside them.
LOSS = "loss"
LEARNING_RATE = "learning_rate"
STEP_TIME = "step_time"  # seconds from one optimizer step to the next
WATCH_COST = "watch_cost"  # share of the time so far that went into the watch
SERIES = (LOSS, LEARNING_RATE, STEP_TIME, WATCH_COST)
# Of a step whose readings are of a part of the batch: rows of a head, of all layers together. A
# step without them was read whole.
ROWS_READ = "rows_read"
ROWS_THERE = "rows_there"
SAMPLE = "sample"  # attribute of a segment: both of the last such step, as read and there
# Attributes of a segment: of how many backward calls a loss is the mean, and which remedies were
# at work, as `remedies.Installed.note` tells.
LOSS_CALLS = "loss_calls"
REMEDIES = "remedies"
DISK = "disk"  # when the disk last refused to write and numbers were lost: full, since, until
# The share and the interval that the cadence settles at, and seconds that were spent once, at the
# start: share, every, startup.
STEADY = "steady"
ALIVE = "alive"  # the step at the last sign of life between two readings

LONGEST_COMMAND = 2**14  # characters of a command line that are kept


@dataclass(frozen=True, eq=False)
class Reading:
    """The vitals of one layer's heads in one step.

    floats is [F, heads] float32 and counts [C, heads] int64, in the order of
    `measure.FLOAT_FIELDS` and `COUNT_FIELDS`. Arrays and CPU tensors are both taken, and copied:
    the buffer a reading came from may be filled again while the reading waits for the disk.
    """

    step: int
    phase: Phase
    time: float  # seconds since 1970
    layer: str  # path of the module, as in `model.named_modules()`
    floats: np.ndarray
    counts: np.ndarray

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise ValueError(f"phase is {self.phase!r}; it must be one of {', '.join(PHASES)}")
        if not math.isfinite(self.time):
            raise ValueError(f"time is {self.time}; it must be seconds since 1970: time.time()")
        object.__setattr__(self, "step", int(self.step))
        object.__setattr__(self, "floats", _copied(self.floats, np.float32))
        object.__setattr__(self, "counts", _copied(self.counts, np.int64))
        heads = self.floats.shape[-1] if self.floats.ndim else 0
        for name, array, fields in (
            ("floats", self.floats, FLOAT_FIELDS),
            ("counts", self.counts, COUNT_FIELDS),
        ):
            if array.shape != (len(fields), heads):
                raise ValueError(
                    f"{name} of layer {self.layer!r} has shape {list(array.shape)}; "
                    f"expected [{len(fields)}, heads], the same heads in floats and counts"
                )

    @staticmethod
    def of(
        vitals: "Vitals",
        *,
        step: int,
        layer: str,
        phase: Phase = "train",
        time: float | None = None,
    ) -> "Reading":
        """From vitals whose batch is merged: shape [heads], or [] for a single head."""
        if vitals.max_logit.dim() > 1:
            raise ValueError(
                f"vitals of layer {layer!r} have shape {list(vitals.shape)}; "
                "merge the batch first: vitals.over_batch()"
            )
        return Reading(
            step=step,
            phase=phase,
            time=clock.time() if time is None else time,
            layer=layer,
            floats=_stacked(vitals, FLOAT_FIELDS, "float32"),
            counts=_stacked(vitals, COUNT_FIELDS, "int64"),
        )

    @staticmethod
    def trusted(
        step: int, phase: Phase, time: float, layer: str, floats: np.ndarray, counts: np.ndarray
    ) -> "Reading":
        """Without a look at what is given and without a copy: arrays that nobody changes."""
        reading = object.__new__(Reading)
        vars(reading).update(
            step=step, phase=phase, time=time, layer=layer, floats=floats, counts=counts
        )
        return reading

    @property
    def heads(self) -> int:
        return self.floats.shape[-1]

    def value(self, name: str) -> np.ndarray:
        """One field of every head, [heads]; also `passes`, which is 1 - sum_p2."""
        if name in FLOAT_FIELDS:
            return self.floats[FLOAT_FIELDS.index(name)]
        if name in COUNT_FIELDS:
            return self.counts[COUNT_FIELDS.index(name)]
        if name == "passes":
            return np.where(self.value("rows") > 0, 1 - self.value("sum_p2"), np.float32(0))
        known = ", ".join((*FLOAT_FIELDS, "passes", *COUNT_FIELDS))
        raise ValueError(f"there is no vital {name!r}; there are {known}")

    def vitals(self) -> "Vitals":
        """The same numbers as `scaledot.Vitals` of shape [heads]."""
        import torch

        from scaledot.measure import Vitals

        named: dict[str, Any] = dict(
            zip(FLOAT_FIELDS, torch.from_numpy(self.floats.copy()), strict=True)
        )
        named |= dict(zip(COUNT_FIELDS, torch.from_numpy(self.counts.copy()), strict=True))
        return Vitals(**named)

    def merge(self, other: "Reading") -> "Reading":
        """Both readings as one, where a layer ran twice in a step on disjoint rows."""
        merged = self.vitals().merge(other.vitals())
        return Reading.of(
            merged, step=self.step, layer=self.layer, phase=self.phase, time=self.time
        )


class Scalar(NamedTuple):
    """One number of one step: a point of the series `name`."""

    step: int
    name: str
    value: float


class Sink(Protocol):
    """Where readings go. `write` gets whole steps and must not block or stop the training."""

    def write(self, readings: Sequence[Reading] = (), scalars: Sequence[Scalar] = ()) -> bool:
        """False where something was dropped."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class RunAttributes:
    """What is known of a run, or of its continuation. Nothing here names the machine or its user.

    `more` holds whatever else a reader should see, as JSON values: the coverage of the probes, the
    cadence, the budget.
    """

    command: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    model: str = ""
    started: float = 0.0  # seconds since 1970
    more: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def here(model: "nn.Module | None" = None, **more: Any) -> "RunAttributes":
        """Of the process that calls: its command, the versions it has loaded, the model."""
        return RunAttributes(
            command=_shortened(redact(sys.argv)),
            versions=loaded_versions(),
            model="" if model is None else summary(model),
            started=clock.time(),
            more=more,
        )


def _shortened(arguments: Sequence[str]) -> tuple[str, ...]:
    """Cut a command line at LONGEST_COMMAND: a `*` of the shell may make it megabytes long."""
    found, left = [], LONGEST_COMMAND
    for argument in arguments:
        if left < len(argument):
            return (*found, f"{argument[:left]}…")
        found.append(argument)
        left -= len(argument) + 1
    return tuple(found)


# Packages whose version may explain a run. Only those already imported are listed.
VERSIONED = ("torch", "numpy", "triton", "transformers", "diffusers", "timm", "lightning")


def loaded_versions() -> dict[str, str]:
    import scaledot  # late: the package imports this module

    versions = {
        "scaledot": scaledot.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
    }
    for name in VERSIONED:
        if name in sys.modules:
            version = getattr(sys.modules[name], "__version__", None)
            versions[name] = str(version or _installed(name))
    return versions


def summary(model: "nn.Module") -> str:
    """One line: class, number of parameters, their types."""
    parameters = list(model.parameters())
    number = sum(parameter.numel() for parameter in parameters)
    types = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters})
    return f"{type(model).__name__}, {_short(number)} parameters, {'/'.join(types) or 'no type'}"


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"


def _short(number: int) -> str:
    """124439808 -> 124.4M"""
    if number < 1000:
        return str(number)
    power = min(int(math.log10(number) // 3), 4)
    return f"{number / 1000**power:.1f}{' KMBT'[power]}"


def _stacked(vitals: "Vitals", names: tuple[str, ...], dtype: str) -> Any:
    import torch

    kept = getattr(torch, dtype)
    tensor = torch.stack([getattr(vitals, name).detach().to(kept) for name in names])
    return tensor.reshape(len(names), -1).cpu().numpy()


def _copied(values: Any, dtype: Any) -> np.ndarray:
    if hasattr(values, "detach"):  # a tensor
        values = values.detach().numpy()
    with np.errstate(over="ignore"):  # a float64 logit of 1e300 is kept as infinity
        return np.array(values, dtype=dtype, order="C")
