"""From the rows of the study to rates: who was right how often, with the spread of a bootstrap."""

import csv
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

RESAMPLES = 2000
BAND = (5, 95)  # percent
GRID = np.linspace(0, 1, 101)  # false alarms at which a ROC is read

Row = dict[str, str]


@dataclass(frozen=True)
class Rate:
    """A share, and where 90 % of the resamples lie."""

    value: float
    low: float
    high: float
    found: int
    total: int


@dataclass(frozen=True)
class Lead:
    """Steps from the alarm to the damage, of the sick runs that were found and have both."""

    median: float | None
    least: int | None
    number: int


def read(path: Path) -> list[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def labelled(rows: list[Row], which: str) -> tuple[list[Row], list[Row]]:
    """Sick and healthy runs of the tuned or the judged ones."""
    mine = [row for row in rows if row["set"] == which]
    return [r for r in mine if r["label"] == "sick"], [r for r in mine if r["label"] == "healthy"]


def share(rows: list[Row], column: str, seed: int = 0) -> Rate:
    """Of these runs, those with an alarm in this column (`step_...`)."""
    hits = np.array([row[column] != "" for row in rows], float)
    if not len(hits):
        return Rate(float("nan"), float("nan"), float("nan"), 0, 0)
    draws = np.random.default_rng(seed).choice(hits, (RESAMPLES, len(hits))).mean(1)
    low, high = np.percentile(draws, BAND)
    return Rate(float(hits.mean()), float(low), float(high), int(hits.sum()), len(hits))


def lead(sick: list[Row], column: str) -> Lead:
    ahead = [
        int(row["damage_step"]) - int(row[column])
        for row in sick
        if row["damage_step"] and row[column]
    ]
    if not ahead:
        return Lead(None, None, 0)
    return Lead(float(median(ahead)), min(ahead), len(ahead))


def roc(sick: np.ndarray, healthy: np.ndarray) -> np.ndarray:
    """Share of sick runs found at each share of false alarms in GRID; ties count as both.

    Between two thresholds the curve is a straight line: a coin decides between them.
    """
    thresholds = np.unique(np.concatenate([sick, healthy]))[::-1]
    found = np.array([0.0, *((sick >= t).mean() for t in thresholds)])
    false = np.array([0.0, *((healthy >= t).mean() for t in thresholds)])
    curve = np.interp(GRID, false, found)
    for place in np.unique(false):  # of thresholds with equal false alarms the best counts
        at = np.isclose(GRID, place)
        curve[at] = found[false == place].max()
    return curve


@dataclass(frozen=True)
class Curve:
    """A ROC with its band, and the area below it."""

    found: np.ndarray
    low: np.ndarray
    high: np.ndarray
    area: float
    area_low: float
    area_high: float


def curve(sick: list[Row], healthy: list[Row], name: str, seed: int = 0) -> Curve:
    """Sick and healthy runs are drawn anew, each among their own."""
    a = np.array([float(row[f"score_{name}"]) for row in sick])
    b = np.array([float(row[f"score_{name}"]) for row in healthy])
    rng = np.random.default_rng(seed)
    draws = np.array(
        [roc(rng.choice(a, len(a)), rng.choice(b, len(b))) for _ in range(RESAMPLES // 4)]
    )
    areas = np.trapezoid(draws, GRID, axis=1)
    found = roc(a, b)
    low, high = np.percentile(draws, BAND, axis=0)
    area_low, area_high = np.percentile(areas, BAND)
    area = float(np.trapezoid(found, GRID))
    return Curve(found, low, high, area, float(area_low), float(area_high))
