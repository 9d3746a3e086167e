"""One forward pass under the watch, and the heads that it found."""

import time
from dataclasses import dataclass

import torch

from scaledot.fields import BANDS
from scaledot.watch.check.calls import Calls, Layer
from scaledot.watch.check.heads import Head
from scaledot.watch.check.offsets import OFFSETS, Offset
from scaledot.watch.check.subject import CannotRead, Subject
from scaledot.watch.coverage import Coverage
from scaledot.watch.evidence import enough_layers
from scaledot.watch.reading import Reading, summary
from scaledot.watch.watch import Watch

FIELDS = (*BANDS, "rows", "pairs")


@dataclass(frozen=True)
class Examination:
    subject: Subject
    model: str  # its class, size and types in words
    coverage: Coverage
    heads: tuple[Head, ...]  # in the order of the layers
    unplaced: dict[str, str]  # layers whose offsets are not known, and why
    seconds: float

    @property
    def enough(self) -> bool:
        """Whether at least half of what looks like attention was seen."""
        return enough_layers(len(self.coverage.watched), len(self.coverage.unseen))

    @property
    def healthy(self) -> bool:
        return self.enough and not any(head.outside for head in self.heads)


def examine(subject: Subject) -> Examination:
    began = time.perf_counter()
    readings, calls, coverage = _look(subject)
    if not readings:
        raise CannotRead(
            f"{_nothing(coverage)}; no head could be measured. A probe sees a model that calls "
            f"torch.nn.functional.scaled_dot_product_attention, nn.MultiheadAttention or scaledot"
        )
    _refuse_made_up(subject, coverage)
    heads: list[Head] = []
    unplaced: dict[str, str] = {}
    names = {reading.layer for reading in readings}
    for reading in readings:
        module = reading.layer.partition("#")[0]
        layer = calls.layers.get(module)
        if layer is not None and f"{module}#2" in names:
            layer = Layer(layer.d_k, layer.divisor, None, "it attends in more than one place")
        if layer is None or layer.weights is None:
            reason = layer.why_no_weights if layer else "its queries and keys were not seen"
            unplaced[reading.layer] = reason
        heads += _heads(reading, layer)
    seconds = time.perf_counter() - began
    about = summary(subject.model)
    return Examination(subject, about, coverage, tuple(heads), unplaced, seconds)


def _look(subject: Subject) -> tuple[list[Reading], Calls, Coverage]:
    model = subject.model
    model.eval()
    readings: list[Reading] = []
    with Calls(model) as calls, Watch(model, every=1, sinks=[readings]) as watch, torch.no_grad():
        calls.listen()
        try:
            model(*subject.positional, **subject.inputs)
        except (Exception, SystemExit) as error:
            raise CannotRead(
                f"the forward pass of {type(model).__name__} failed with {subject.about}: "
                f"{type(error).__name__}: {error}"
            ) from error
    # Layers of unequal batch are merged apart and come in another order than they ran.
    order = {name: number for number, (name, _) in enumerate(model.named_modules())}
    readings.sort(key=lambda reading: order.get(reading.layer.partition("#")[0], len(order)))
    return readings, calls, watch.coverage()


def _heads(reading: Reading, layer: Layer | None) -> list[Head]:
    places = _places(layer, reading.heads)
    return [
        Head(
            reading.layer,
            head,
            {name: float(reading.value(name)[head]) for name in FIELDS},
            layer.d_k if layer else None,
            layer.divisor if layer else None,
            places[head],
        )
        for head in range(reading.heads)
    ]


def _places(layer: Layer | None, heads: int) -> list[Offset | None]:
    if layer is None or layer.weights is None:
        return [None] * heads
    weights, best = layer.weights.of_heads(heads).max(0)
    pairs = zip(best.tolist(), weights.tolist(), strict=True)
    return [Offset(OFFSETS[number], weight) for number, weight in pairs]


def _nothing(coverage: Coverage) -> str:
    if not coverage.unseen:
        return "the forward pass called no attention that scaledot knows"
    if coverage.reasons:
        return str(coverage)
    return (
        f"{', '.join(coverage.unseen)}: these look like attention, but they multiply their "
        f"matrices themselves, where no probe sees it"
    )


def _refuse_made_up(subject: Subject, coverage: Coverage) -> None:
    """Random weights have vitals too; showing them as the model's would be a lie."""
    random = [
        name
        for name in subject.made_up
        if any(name.startswith(f"{layer}.") for layer in coverage.watched)
    ]
    if random:
        raise CannotRead(
            f"the weights do not hold {', '.join(random[:3])}"
            f"{' and more' if len(random) > 3 else ''}: the file and config.json are not of the "
            f"same model; save it again with model.save_pretrained(FOLDER)"
        )
