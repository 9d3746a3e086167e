"""Writes the tables of docs/race.md from the rows of the study; the words around them stay.

PYTHONPATH=src python docs/race_tables.py [benchmarks/results/race.csv]

Each table stands between <!-- name --> and <!-- end of name -->. A cell is the median over the
seeds and [lowest, highest]; * marks a best rate that is the lowest or the highest tried.
"""

import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from scaledot.lab.experiments.recall import OPTIMIZERS, RULES
from scaledot.lab.study import findings, spread, summary
from scaledot.lab.study.findings import Results, spread_of
from scaledot.lab.study.rows import DepthRow, HeldOutRow, RaceRow, UpdateRow

DOCS = pathlib.Path(__file__).parent
CSV, PAGE = DOCS.parent / "benchmarks" / "results" / "race.csv", DOCS / "race.md"

NAMES = {
    **{"none": "no scaling", "sqrt_dk": "sqrt(d_k)", "dk": "d_k", "sqrt_dmodel": "sqrt(d_model)"},
    **{"cosine": "cosine", "sgd": "SGD", "adam": "Adam"},
}
RATE_WIDTH = 64  # d_k of the table of rates
UPDATE_WIDTHS = (16, 64, 512)


def page(text: str, results: Results) -> str:
    """The page with every table made anew."""
    for name, table in tables(results).items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        if begin not in text or end not in text:
            raise ValueError(f"the page has no place for its table; write {begin} and {end} in it")
        between = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        made = f"{begin}\n{table}\n{end}"
        text = between.sub(lambda _, made=made: made, text)
    return text


def tables(results: Results) -> dict[str, str]:
    return {
        "steps": _steps(results.race),
        "accuracy": _accuracy(results.race),
        "rates": _rates(results.race),
        "depth": _depth(results.depth),
        "heldout": _heldout(results.heldout, "heldout_loss"),
        "training": _heldout(results.heldout, "train_loss"),
        "kept": _heldout(results.heldout, "kept_wrong"),
        "rows": _updates(results.updates, "rows_negligible"),
        "weights": _updates(results.updates, "query_weights_negligible"),
    }


def _steps(records: Sequence[RaceRow]) -> str:
    best = summary.best_rates(records)
    widths = sorted({row.d_k for row in best})
    lines = []
    for optimizer in OPTIMIZERS:
        of = {(row.rule, row.d_k): row for row in best if row.optimizer == optimizer}
        for rule in RULES:
            cells = [_steps_cell(of[rule, width]) for width in widths]
            lines.append([NAMES[optimizer], NAMES[rule], *cells])
        ratios = [_ratio(of["none", width], of["sqrt_dk", width]) for width in widths]
        lines.append([NAMES[optimizer], "no scaling / sqrt(d_k)", *ratios])
    return _table(["", "rule", *(f"d_k {width}" for width in widths)], lines)


def _steps_cell(row: summary.Best) -> str:
    if row.steps_median is None:
        return "never"
    missing = "" if row.reached == row.seeds else f" ({row.reached} of {row.seeds})"
    where = f"at {row.rate:g}{'*' if row.edge else ''}"
    return f"**{row.steps_median:g}** [{row.steps_low}, {row.steps_high}]{missing} {where}"


def _ratio(one: summary.Best, two: summary.Best) -> str:
    if one.steps_median is None or two.steps_median is None:
        return ""
    return f"{one.steps_median / two.steps_median:.1f}"


def _accuracy(records: Sequence[RaceRow]) -> str:
    best = summary.best_rates(records)
    widths = sorted({row.d_k for row in best})
    of = {(row.optimizer, row.rule, row.d_k): row for row in best}
    lines = []
    for optimizer in OPTIMIZERS:
        for rule in RULES:
            found = [of[optimizer, rule, width] for width in widths]
            cells = [
                f"{row.accuracy_median:.3f} [{row.accuracy_low:.3f}, {row.accuracy_high:.3f}]"
                for row in found
            ]
            lines.append([NAMES[optimizer], NAMES[rule], *cells])
    return _table(["", "rule", *(f"d_k {width}" for width in widths)], lines)


def _rates(records: Sequence[RaceRow]) -> str:
    """none beside sqrt_dk at the same rate, at one width."""
    chosen = [row for row in records if row.d_k == RATE_WIDTH and row.rule in ("none", "sqrt_dk")]
    of = spread.grouped(chosen, ("optimizer", "rate", "rule"))
    lines = []
    for optimizer, rate in dict.fromkeys((key[0], key[1]) for key in of):
        line = [NAMES[optimizer], f"{rate:g}"]
        for rule in ("none", "sqrt_dk"):
            members = of[optimizer, rate, rule]
            line += [_reached(members), _spread((row.accuracy for row in members), _three)]
        lines.append(line)
    columns = [
        f"{NAMES[rule]}: {what}"
        for rule in ("none", "sqrt_dk")
        for what in ("steps to 90 %", "accuracy at the end")
    ]
    return _table(["", "rate", *columns], lines)


def _reached(members: Sequence[RaceRow]) -> str:
    steps = [row.steps_to_90 for row in members if row.steps_to_90 is not None]
    if not steps:
        return "never"
    missing = "" if len(steps) == len(members) else f" ({len(steps)} of {len(members)})"
    return f"{_spread(steps, '{:g}'.format)}{missing}"


def _depth(records: Sequence[DepthRow]) -> str:
    best = spread.at_best_rate(records, ("optimizer", "layers", "rule"), "loss")
    tried = _tried(records)
    layers = sorted({row.layers for row in records})
    rules = [rule for rule in RULES if any(row.rule == rule for row in records)]
    lines = []
    for optimizer in OPTIMIZERS:
        for rule in rules:
            cells = []
            for number in layers:
                rate, members = _chosen(best, (optimizer, number, rule))
                accuracy = _spread((row.accuracy for row in members), _percent)
                cells.append(f"{accuracy} at {_rate(rate, tried[optimizer])}")
            lines.append([NAMES[optimizer], NAMES[rule], *cells])
    heads = [f"{number} layer{'s' if number > 1 else ''}" for number in layers]
    return _table(["", "rule", *heads], lines)


def _heldout(records: Sequence[HeldOutRow], shown: str) -> str:
    best = spread.at_best_rate(records, ("d_k", "pool", "optimizer", "rule"), "heldout_loss")
    tried = _tried(records)
    lines = []
    for d_k, pool, optimizer in dict.fromkeys(key[:3] for key in best):
        line = [str(pool), str(d_k), NAMES[optimizer]]
        for rule in RULES:
            rate, members = _chosen(best, (d_k, pool, optimizer, rule))
            cell = _spread((getattr(row, shown) for row in members), "{:.2g}".format)
            where = f" at {_rate(rate, tried[optimizer])}" if shown == "heldout_loss" else ""
            line.append(cell + where)
        lines.append(line)
    lines.sort(key=lambda line: (int(line[0]), int(line[1])))
    return _table(["pool", "d_k", "", *(NAMES[rule] for rule in RULES)], lines)


def _updates(records: Sequence[UpdateRow], shown: str) -> str:
    of = spread.grouped(records, ("rule", "step", "d_k"))
    steps = sorted({row.step for row in records})
    rules = [rule for rule in RULES if any(row.rule == rule for row in records)]
    lines = [
        [str(step), NAMES[rule]]
        + [
            _spread((getattr(row, shown) for row in of[rule, step, width]), _percent)
            for width in UPDATE_WIDTHS
        ]
        for step in steps
        for rule in rules
    ]
    return _table(["step", "rule", *(f"d_k {width}" for width in UPDATE_WIDTHS)], lines)


def _tried(records: Iterable[Any]) -> dict[str, set[float]]:
    tried: dict[str, set[float]] = {}
    for row in records:
        tried.setdefault(row.optimizer, set()).add(row.rate)
    return tried


def _chosen(best: spread.Groups, group: tuple[Any, ...]) -> tuple[float, list[Any]]:
    """The rate that was best for a group, and its runs."""
    (found,) = ((key[-1], members) for key, members in best.items() if key[:-1] == group)
    return found


def _rate(rate: float, tried: set[float]) -> str:
    return f"{rate:g}{'*' if rate in (min(tried), max(tried)) else ''}"


def _spread(values: Iterable[float], write: Callable[[float], str]) -> str:
    found = spread_of(values)
    return f"**{write(found.median)}** [{write(found.low)}, {write(found.high)}]"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share and share < 0.1 else f"{100 * share:.0f} %"


def _three(value: float) -> str:
    return f"{value:.3f}"


def _table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    source = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else CSV
    made = page(PAGE.read_text(encoding="utf-8"), findings.read(source))
    PAGE.write_text(made, encoding="utf-8")
