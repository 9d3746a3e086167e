"""A step as a few named numbers: least, mean and greatest head, of all layers and of each.

A chart for every head would be thousands, and viewers choke on them. Above `MOST_SERIES` charts
neighbouring layers share one: their least and greatest head still show.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from scaledot.watch.reading import Phase
from scaledot.watch.sinks.whole import WholeStep

MOST_SERIES = 300
FIGURES: dict[str, Callable[[np.ndarray], np.floating]] = {
    "min": np.min,
    "mean": np.mean,
    "max": np.max,
}


class Aggregates:
    """Names stay the same over a run: groups of layers are made at the first step of a phase."""

    def __init__(self, vitals: Sequence[str]) -> None:
        self.vitals = tuple(vitals)
        self._groups: dict[Phase, dict[str, str]] = {}

    def of(self, step: WholeStep) -> dict[str, float]:
        """{"scaledot_max_logit/all/max": 17.0, "scaledot_max_logit/blocks.0/max": 9.0, ...}"""
        groups = self._grouped(step)
        prefix = prefix_of(step.phase)
        named: dict[str, float] = {}
        for vital in self.vitals:
            for group, layers in (("all", list(step.layers)), *groups.items()):
                values = step.values(vital, layers)
                for figure, function in FIGURES.items():
                    if values.size:
                        named[f"{prefix}_{vital}/{group}/{figure}"] = float(function(values))
        broken = [reading.value("nonfinite").sum() for reading in step.layers.values()]
        named[f"{prefix}/nonfinite_rows"] = float(sum(broken))
        return named

    def _grouped(self, step: WholeStep) -> dict[str, list[str]]:
        group_of = self._groups.setdefault(step.phase, self._made_from(list(step.layers)))
        groups: dict[str, list[str]] = {}
        for layer in step.layers:
            groups.setdefault(group_of.get(layer, "later layers"), []).append(layer)
        return groups

    def _made_from(self, layers: list[str]) -> dict[str, str]:
        most = max(1, MOST_SERIES // (len(FIGURES) * max(1, len(self.vitals))))
        size = math.ceil(len(layers) / most) or 1
        groups = [layers[start : start + size] for start in range(0, len(layers), size)]
        return {layer: _label(group) for group in groups for layer in group}


def prefix_of(phase: Phase) -> str:
    return "scaledot" if phase == "train" else f"scaledot_{phase}"


def _label(group: list[str]) -> str:
    names = [name or "model" for name in (group[0], group[-1])]
    return names[0] if len(group) == 1 else f"{names[0]} to {names[1]}"
