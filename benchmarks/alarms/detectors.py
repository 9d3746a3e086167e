"""Ways to tell a sick run while it trains: ours, and what people look at today.

Each is a curve over the steps, higher is worse; a threshold turns it into an alarm. So each has a
ROC, and one point of it that is its usual setting. None sees the future: the value at a step is
made of the steps up to it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from runs import Recorded

from scaledot.watch.alarms import Judge, overridden
from scaledot.watch.alarms.heads import Scale

# Our rule is swept over the score that a head is on its way to; the other thresholds stay.
PROJECTED = (100, 200, 300, 500, 700, 1000, 1500, 2000, 3000, 5000, 10_000, 30_000)
BEFORE = 20  # steps whose median a gradient norm is held against
MEAN = 5  # steps of a loss that are taken together


@dataclass(frozen=True)
class Detector:
    name: str
    words: str
    usual: float  # its threshold
    curve: Callable[[Recorded], np.ndarray]


def first_step(curve: np.ndarray, threshold: float) -> int | None:
    over = np.flatnonzero(curve >= threshold)
    return int(over[0]) if len(over) else None


def all_rules(run: Recorded, read: Iterable[int] | None = None) -> dict[str, int | None]:
    """The rules as they ship: the first step of an alarm of each grade or a graver one.

    read: the steps that are read; None: all of them.
    """
    judge, first = Judge(), dict.fromkeys(("warn", "act"))
    judge.scales.update(dict.fromkeys(run.layers, Scale(run.setup.factor, run.setup.d_k)))
    for step in range(len(run.losses)) if read is None else read:
        for alarm in judge.read_step(run.readings(step)):
            for grade in ("warn", "act") if alarm.grade == "act" else (alarm.grade,):
                if grade in first and first[grade] is None:
                    first[grade] = step
    return first


def _ours(run: Recorded) -> np.ndarray:
    """The largest of the thresholds at which `collapse` has warned by this step."""
    curve = np.zeros(len(run.losses))
    for threshold in PROJECTED:
        rules = overridden({"collapse.projected": threshold})
        judge = Judge(rules)
        for step in range(len(run.losses)):
            alarms = judge.read_step(run.readings(step))
            if any(alarm.kind == "collapse" for alarm in alarms):
                curve[step:] = threshold
                break
        else:
            break  # a higher threshold finds no more
    return curve


def _max_logit(run: Recorded) -> np.ndarray:
    return _worst(run.vital("max_logit").max(1))


def _entropy(run: Recorded) -> np.ndarray:
    """1 - entropy ratio of the layer with the least, mean over its heads."""
    heads = run.floats.shape[-1]
    ratio = run.vital("entropy_ratio").reshape(len(run.losses), -1, heads).mean(2)
    return _worst(1 - ratio.min(1))


def _gradient_norm(run: Recorded) -> np.ndarray:
    norms = np.nan_to_num(run.norms, nan=np.inf)
    curve = np.zeros(len(norms))
    for step in range(BEFORE, len(norms)):
        curve[step] = norms[step] / max(np.median(norms[step - BEFORE : step]), 1e-12)
    return _worst(curve)


def _loss(run: Recorded) -> np.ndarray:
    """How far the mean of a few steps is above the lowest such mean so far."""
    losses = np.nan_to_num(run.losses, nan=np.inf)
    means = np.array([losses[max(0, t + 1 - MEAN) : t + 1].mean() for t in range(len(losses))])
    return _worst(means - np.minimum.accumulate(means))


def _worst(curve: np.ndarray) -> np.ndarray:
    """So far. What is no number is as bad as can be."""
    return np.maximum.accumulate(np.nan_to_num(curve, nan=np.inf))


DETECTORS = (
    Detector("rules", "scaledot's rule `collapse`", 1000.0, _ours),
    Detector("max_logit", "max logit above 100", 100.0, _max_logit),
    Detector("entropy", "entropy ratio of a layer below 0.1", 0.9, _entropy),
    Detector("gradient_norm", "gradient norm 3 times its median", 3.0, _gradient_norm),
    Detector("loss", "loss 0.5 above its lowest", 0.5, _loss),
)
