"""Readings with the numbers that a test is about."""

import numpy as np

from scaledot.measure import COUNT_FIELDS, FLOAT_FIELDS
from scaledot.watch.alarms import Judge
from scaledot.watch.reading import Reading

HEALTHY = {"max_logit": 5.0, "entropy_ratio": 0.6, "sum_p2": 0.3, "sink": 0.05}


def reading(step: int, layer: str = "layer", heads: int = 3, phase: str = "train", **vitals):
    """Healthy but for what is given: a number for all heads, or a list with one a head."""
    floats = np.zeros((len(FLOAT_FIELDS), heads), np.float32)
    counts = np.full((len(COUNT_FIELDS), heads), 77, np.int64)
    counts[COUNT_FIELDS.index("nonfinite")] = 0
    if "passes" in vitals:
        vitals["sum_p2"] = 1 - np.asarray(vitals.pop("passes"), np.float32)
    for name, value in {**HEALTHY, **vitals}.items():
        where, names = (floats, FLOAT_FIELDS) if name in FLOAT_FIELDS else (counts, COUNT_FIELDS)
        where[names.index(name)] = value
    return Reading(step, phase, 1.0, layer, floats, counts)


def judged(readings, judge: Judge | None = None):
    return (judge or Judge()).read_all(readings)


def kinds(alarms) -> list[tuple[str, str]]:
    return [(alarm.kind, alarm.grade) for alarm in alarms]


def runaway(step: int, power: float = 3.0) -> dict[str, float]:
    """Scores like step ** power, and a softmax that closes: the sick run of the demo."""
    return {"max_logit": (step / 10) ** power + 1, "passes": 1 / (1 + (step / 20) ** 2)}
