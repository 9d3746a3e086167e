"""One run as a row: whether it was sick, and at which step who would have said so."""

import csv
import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
from cadences import PACES, read_steps
from detectors import DETECTORS, all_rules, first_step
from grid import Family
from runs import Recorded, Setup, recorded, twins

SICK, HEALTHY = 0.1, 0.05  # nats that the best remedy gains; between them nothing is claimed
WORST_LOSS = 5.0  # stands for a loss that is no number: more than knowing nothing costs
MEAN = 20  # steps over which the losses of a run and its twin are compared
LEFT_OUT = ("clip", "task", "large", "device")  # of a set-up: the same for all rows of a file
TOLD = ("family", "rate", "seed", "gain", "label", "step_warn", "step_max_logit")

Row = dict[str, Any]


def row_of(family: Family, setup: Setup, folder: Path) -> Row:
    run = recorded(setup, folder)
    remedied = [(twin, recorded(twin, folder)) for twin in twins(setup) if _differs(run, twin)]
    twin, best = min(remedied, key=lambda pair: _loss(pair[1]), default=(setup, run))
    gain = _loss(run) - _loss(best)
    label = "sick" if gain >= SICK else "healthy" if gain < HEALTHY else "between"
    rules = all_rules(run)
    steps = {pace.name: read_steps(len(run.losses), pace) for pace in PACES}
    paced = {name: all_rules(run, read) for name, read in steps.items()}
    if not setup.large:
        sampled = recorded(setup, folder, sampled=True)
        paced |= {f"{name}_sampled": all_rules(sampled, read) for name, read in steps.items()}
    curves = {detector.name: detector.curve(run) for detector in DETECTORS}
    seconds = sum(one.seconds for one in (run, *(other for _, other in remedied)))
    return {
        "family": family.name,
        "set": "tuned" if family.tunes else "judged",
        **{
            name: value for name, value in dataclasses.asdict(setup).items() if name not in LEFT_OUT
        },
        "loss": round(_loss(run), 4),
        "remedy": _named(twin, setup),
        "remedied_loss": round(_loss(best), 4),
        "gain": round(gain, 4),
        "label": label,
        "damage_step": _or_empty(_damage(run, best) if label == "sick" else None),
        "step_warn": _or_empty(rules["warn"]),
        "step_act": _or_empty(rules["act"]),
        **{
            f"step_{grade}_{name}": _or_empty(first[grade])
            for name, first in paced.items()
            for grade in ("warn", "act")
        },
        **{
            f"step_{one.name}": _or_empty(first_step(curves[one.name], one.usual))
            for one in DETECTORS
        },
        **{f"score_{one.name}": f"{curves[one.name][-1]:.5g}" for one in DETECTORS},
        "trainings": 1 + len(remedied),
        "seconds": round(seconds, 1),
    }


def told(row: Row) -> str:
    """In a line."""
    return "  ".join(f"{key} {row[key]}" for key in TOLD)


def write(rows: list[Row], path: Path) -> None:
    """Whole or not at all: who is stopped meanwhile leaves the file before it."""
    scratch = path.with_suffix(f".{os.getpid()}.csv")
    with scratch.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    scratch.replace(path)


def _differs(run: Recorded, twin: Setup) -> bool:
    """A clip that no score reaches changes nothing."""
    return twin.clip is None or bool(np.nan_to_num(run.vital("max_logit")).max() > twin.clip)


def _loss(run: Recorded) -> float:
    return min(run.final, WORST_LOSS) if math.isfinite(run.final) else WORST_LOSS


def _damage(run: Recorded, twin: Recorded) -> int | None:
    """The step from which on the training loss stays SICK above the twin's; same batches."""
    gap = np.nan_to_num(run.losses, nan=WORST_LOSS) - np.nan_to_num(twin.losses, nan=WORST_LOSS)
    mean = np.convolve(gap, np.ones(MEAN) / MEAN, "valid")
    below = np.flatnonzero(mean < SICK)
    first = int(below[-1]) + 1 if len(below) else 0
    return first + MEAN - 1 if first < len(mean) else None


def _named(twin: Setup, setup: Setup) -> str:
    if twin == setup:
        return "none needed"
    return f"qk-clip:{twin.clip:g}" if twin.clip is not None else twin.scale


def _or_empty(step: int | None) -> int | str:
    return "" if step is None else step
