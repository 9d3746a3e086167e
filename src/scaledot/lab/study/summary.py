"""What the sweep shows: each rule at its own best rate, median and range over the seeds."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scaledot.lab.study.rows import RaceRow, median


@dataclass(frozen=True)
class Best:
    """A rule at the rate that serves it best: most seeds at 90 %, then the fewest steps (median
    over seeds), then the lowest loss. Steps count only seeds that got there; None: none did."""

    rule: str
    d_k: int
    optimizer: str
    rate: float
    edge: bool  # the best rate is the lowest or the highest tried: the sweep may end too early
    seeds: int
    reached: int  # seeds that got to 90 %
    steps_median: float | None
    steps_low: int | None
    steps_high: int | None
    accuracy_median: float
    accuracy_low: float
    accuracy_high: float
    heldout_loss_median: float
    heldout_loss_low: float
    heldout_loss_high: float


def best_rates(rows: Iterable[RaceRow]) -> list[Best]:
    """One for every width, optimizer and rule, in the order they come in."""
    groups: dict[tuple[int, str, str], dict[float, list[RaceRow]]] = {}
    for row in rows:
        rates = groups.setdefault((row.d_k, row.optimizer, row.rule), {})
        rates.setdefault(row.rate, []).append(row)
    return [_best(rates) for rates in groups.values()]


def _best(rates: dict[float, list[RaceRow]]) -> Best:
    rate = min(rates, key=lambda rate: _merit(rates[rate]))
    rows = rates[rate]
    steps = _steps(rows)
    accuracy = sorted(row.accuracy for row in rows)
    loss = sorted(math.inf if math.isnan(row.heldout_loss) else row.heldout_loss for row in rows)
    return Best(
        rule=rows[0].rule,
        d_k=rows[0].d_k,
        optimizer=rows[0].optimizer,
        rate=rate,
        edge=rate in (min(rates), max(rates)),
        seeds=len(rows),
        reached=len(steps),
        steps_median=median(steps) if steps else None,
        steps_low=min(steps, default=None),
        steps_high=max(steps, default=None),
        accuracy_median=median(accuracy),
        accuracy_low=accuracy[0],
        accuracy_high=accuracy[-1],
        heldout_loss_median=median(loss),
        heldout_loss_low=loss[0],
        heldout_loss_high=loss[-1],
    )


def _merit(rows: Sequence[RaceRow]) -> tuple[float, float, float]:
    steps = _steps(rows)
    return -len(steps), median(steps) if steps else math.inf, median(row.loss for row in rows)


def _steps(rows: Iterable[RaceRow]) -> list[int]:
    return [row.steps_to_90 for row in rows if row.steps_to_90 is not None]


def as_text(found: Sequence[Best]) -> str:
    """A table: steps to 90 %, median [lowest, highest], over the seeds that got there."""
    lines = [
        f"{'d_k':>4} {'optimizer':9} {'rule':12} {'rate':>7} {'reached':>8} "
        f"{'steps to 90 %':>20} {'accuracy':>22} {'held-out loss':>26}"
    ]
    for row in found:
        steps = (
            f"{row.steps_median:.0f} [{row.steps_low}, {row.steps_high}]"
            if row.steps_median is not None
            else "never"
        )
        accuracy = f"{row.accuracy_median:.3f} [{row.accuracy_low:.3f}, {row.accuracy_high:.3f}]"
        loss = (
            f"{row.heldout_loss_median:.3g} "
            f"[{row.heldout_loss_low:.3g}, {row.heldout_loss_high:.3g}]"
        )
        rate = f"{row.rate:g}{'*' if row.edge else ''}"
        lines.append(
            f"{row.d_k:>4} {row.optimizer:9} {row.rule:12} {rate:>7} "
            f"{row.reached:>3} of {row.seeds:<2} {steps:>19} {accuracy:>22} {loss:>26}"
        )
    return "\n".join([*lines, "* the lowest or highest rate tried"])
