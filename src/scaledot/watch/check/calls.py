"""What the watch's readings leave out: each layer's d_k, its divisor, and its offsets.

A second listener beside the watch. Vitals are computed by one function from one record of the
call; while a `Calls` lives, that record is kept until the probe says to which module it belongs.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from scaledot import functional
from scaledot.measure import Vitals
from scaledot.problem import Problem
from scaledot.watch.check import offsets
from scaledot.watch.check.offsets import Weights
from scaledot.watch.names import Names
from scaledot.watch.probes import hub, place
from scaledot.watch.probes.patch import Attribute
from scaledot.watch.probes.seen import Seen


@dataclass(frozen=True)
class Layer:
    """None where it differs from head to head, or from call to call."""

    d_k: int | None
    divisor: float | None  # of the scores
    weights: Weights | None
    why_no_weights: str = ""


class Calls:
    """Listens as long as the `with` lasts. Enter it before the watch, for the watch measures."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.layers: dict[str, Layer] = {}  # by the module's path
        self._names = Names(model)
        self._latest: tuple[Problem, Tensor] | None = None
        self._record = Attribute(functional, "_with_vitals", self._recording())

    def __enter__(self) -> "Calls":
        self._record.make()
        return self

    def __exit__(self, *exception: Any) -> None:
        hub.leave(self)
        self._record.undo()

    def listen(self) -> None:
        """Once the watch listens: it is asked first, so the record of a call is there."""
        hub.listen(self)

    # What the probes call. -----------------------------------------------------------------------

    def wants(self) -> bool:
        return True

    def replaces(self) -> bool:
        return False

    def saw(self, seen: Seen) -> None:
        latest, self._latest = self._latest, None
        running = place.here().modules if seen.module is None else (seen.module,)
        found = self._names.find(running)
        if latest is None or found is None:
            return
        layer, known = _layer(*latest), self.layers.get(found[1])
        self.layers[found[1]] = layer if known is None else _both(known, layer)

    def cannot_see(self, kind: str, reason: str, module: nn.Module | None) -> None:
        pass  # the watch says so in its coverage

    # ---------------------------------------------------------------------------------------------

    def _recording(self) -> Any:
        original = functional._with_vitals

        def with_vitals(problem: Problem, backend: str | None) -> tuple[Tensor, Vitals]:
            out, vitals = original(problem._replace(per_row=True), backend)
            assert vitals.per_row is not None
            self._latest = problem, vitals.per_row.lse
            return out, vitals if problem.per_row else replace(vitals, per_row=None)

        return with_vitals


def _layer(problem: Problem, lse: Tensor) -> Layer:
    scale = problem.settings.scale
    plain = problem.head_scale is None and not problem.settings.log_n and scale != 0
    divisor = 1 / scale if plain else None
    reason = offsets.why_not(problem)
    weights = None if reason else offsets.weights_of(problem, lse)
    return Layer(problem.query.shape[-1], divisor, weights, reason)


def _both(one: Layer, two: Layer) -> Layer:
    """A module that was called twice."""
    d_k = one.d_k if one.d_k == two.d_k else None
    divisor = one.divisor if one.divisor == two.divisor else None
    if one.weights is None or two.weights is None:
        return Layer(d_k, divisor, None, one.why_no_weights or two.why_no_weights)
    if one.weights.total.shape != two.weights.total.shape:
        return Layer(d_k, divisor, None, "its calls have different numbers of heads")
    return Layer(d_k, divisor, one.weights.merge(two.weights))
