"""The further claims in tables: median and range over the seeds.

Where rates were swept, a group shows the rate that serves it best: the lowest median loss.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from scaledot.lab.study.rows import DepthRow, HeldOutRow, UpdateRow, median

Groups = dict[tuple[Any, ...], list[Any]]


def heldout(rows: Sequence[HeldOutRow]) -> str:
    best = at_best_rate(rows, ("d_k", "pool", "optimizer", "rule"), "heldout_loss")
    shown = ("early_saturated", "kept_wrong", "train_loss", "heldout_loss", "gap")
    title = "Held-out: a fixed pool of sequences to learn from, others to be asked on"
    return table(title, ("d_k", "pool", "optimizer", "rule", "rate"), best, shown)


def depth(rows: Sequence[DepthRow]) -> str:
    best = at_best_rate(rows, ("optimizer", "layers", "rule"), "loss")
    title = "Depth: layers of attention"
    columns = ("optimizer", "layers", "rule", "rate")
    return table(title, columns, best, ("loss", "accuracy", "entropy_ratio", "saturated"))


def updates(rows: Sequence[UpdateRow]) -> str:
    by = ("d_k", "step", "rule")
    shown = ("rows_negligible", "query_weights_negligible", "key_weights_negligible")
    title = "Updates: share of gradients below 1 % of sqrt_dk's median at step 0"
    return table(title, by, grouped(rows, by), shown)


def grouped(rows: Iterable[Any], by: Sequence[str]) -> Groups:
    groups: Groups = {}
    for row in rows:
        groups.setdefault(tuple(getattr(row, name) for name in by), []).append(row)
    return groups


def at_best_rate(rows: Iterable[Any], by: Sequence[str], loss: str) -> Groups:
    """Grouped by `by` and the rate, of which only the best stays."""
    found: Groups = {}
    for group, members in grouped(rows, by).items():
        rates = grouped(members, ("rate",))
        best = min(rates, key=lambda rate: median(getattr(row, loss) for row in rates[rate]))
        found[(*group, *best)] = rates[best]
    return found


def table(title: str, columns: Sequence[str], groups: Groups, shown: Sequence[str]) -> str:
    lines = [" ".join([*(f"{name:>11}" for name in columns), *(f"{name:>27}" for name in shown)])]
    for group, rows in groups.items():
        named = [f"{value:>11g}" if isinstance(value, float) else f"{value:>11}" for value in group]
        lines.append(" ".join([*named, *(f"{_spread(rows, name):>27}" for name in shown)]))
    return "\n".join([title, *lines])


def _spread(rows: Sequence[Any], name: str) -> str:
    values = [getattr(row, name) for row in rows]
    values = sorted(math.inf if math.isnan(value) else value for value in values)
    return f"{median(values):.3g} [{values[0]:.3g}, {values[-1]:.3g}]"
