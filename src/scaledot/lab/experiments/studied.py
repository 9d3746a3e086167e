"""What the study of the training race found, in the few figures that the lesson tells.

`scaledot.lab.study.findings` makes the file from the study's rows; nobody types a number into it.
"""

import functools
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Spread:
    """Over the seeds."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Speeds:
    """Steps to 90 % accuracy at one width, each rule at its own best rate."""

    d_k: int
    sgd: dict[str, Spread]  # by rule
    adam: dict[str, Spread]
    sgd_slower: float  # steps without scaling over steps with sqrt_dk, medians
    adam_slower: float


@dataclass(frozen=True)
class HeldOut:
    """Learning from a fixed pool of sequences, each rule at the rate of its lowest held-out loss.

    worse: of all pairs of runs of the same seed, width, pool and optimizer, the share in which the
    unscaled one has a higher held-out loss than sqrt_dk's. The losses are of one width and pool.
    """

    pairs: int
    worse: float
    d_k: int
    pool: int
    train_loss: dict[str, Spread]  # by rule, Adam
    heldout_loss: dict[str, Spread]


@dataclass(frozen=True)
class Depth:
    """Accuracy at the end, each rule at the rate of its lowest loss.

    more: of all pairs of seeds, the share in which accuracy falls by more from the shallowest to
    the deepest model without scaling than with sqrt_dk.
    """

    d_k: int
    shallow: int  # layers
    deep: int
    pairs: int
    more: float
    shallow_sgd: dict[str, Spread]  # by rule
    deep_sgd: dict[str, Spread]
    shallow_adam: dict[str, Spread]
    deep_adam: dict[str, Spread]


@dataclass(frozen=True)
class Updates:
    """Shares of gradients below 1 % of what is typical under sqrt_dk at its first step."""

    d_k: int
    step: int
    rows: dict[str, Spread]  # of dL/dq, by rule
    weights: dict[str, Spread]  # of dL/dW_q


@dataclass(frozen=True)
class Study:
    runs: int  # of the sweep
    seeds: int
    device: str
    torch: str
    narrow: Speeds
    wide: Speeds
    heldout: HeldOut
    depth: Depth
    updates: Updates


@functools.cache
def study() -> Study:
    """Of the file in the package."""
    file = resources.files("scaledot.lab.study").joinpath("findings.json")
    return from_json(json.loads(file.read_text(encoding="utf-8")))


def from_json(data: dict[str, Any]) -> Study:
    return Study(
        runs=data["runs"],
        seeds=data["seeds"],
        device=data["device"],
        torch=data["torch"],
        narrow=Speeds(**_spreads(data["narrow"])),
        wide=Speeds(**_spreads(data["wide"])),
        heldout=HeldOut(**_spreads(data["heldout"])),
        depth=Depth(**_spreads(data["depth"])),
        updates=Updates(**_spreads(data["updates"])),
    )


def _spreads(part: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {rule: Spread(**spread) for rule, spread in value.items()}
        if isinstance(value, dict)
        else value
        for name, value in part.items()
    }
