"""The figures that the lesson tells, from the study's rows:

python -m scaledot.lab.study.findings [benchmarks/results/race.csv]

writes findings.json beside this file, which ships with the package.
"""

import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scaledot.lab.experiments.lesson import as_json
from scaledot.lab.experiments.studied import Depth, HeldOut, Speeds, Spread, Study, Updates
from scaledot.lab.study import rows, spread, summary
from scaledot.lab.study.rows import DepthRow, HeldOutRow, RaceRow, UpdateRow

FILE = Path(__file__).with_name("findings.json")
CSV = Path("benchmarks/results/race.csv")

# What the lesson tells of two large tables.
HELDOUT_WIDTH, HELDOUT_POOL, HELDOUT_OPTIMIZER = 64, 1024, "adam"
UPDATES_WIDTH, UPDATES_STEP = 512, 20


class Results(NamedTuple):
    """The rows of every part of the study."""

    race: list[RaceRow]
    heldout: list[HeldOutRow]
    depth: list[DepthRow]
    updates: list[UpdateRow]


def read(csv: Path) -> Results:
    """race.csv and its neighbours."""
    return Results(
        race=rows.read(csv, RaceRow),
        heldout=rows.read(_beside(csv, "heldout"), HeldOutRow),
        depth=rows.read(_beside(csv, "depth"), DepthRow),
        updates=rows.read(_beside(csv, "updates"), UpdateRow),
    )


def _beside(csv: Path, part: str) -> Path:
    return csv.with_name(f"{csv.stem}_{part}{csv.suffix}")


def findings(results: Results) -> Study:
    race = results.race
    best = summary.best_rates(race)
    widths = {row.d_k for row in race}
    return Study(
        runs=len(race),
        seeds=len({row.seed for row in race}),
        device=race[0].device,
        torch=race[0].torch,
        narrow=_speeds(best, min(widths)),
        wide=_speeds(best, max(widths)),
        heldout=_heldout(results.heldout),
        depth=_depth(results.depth),
        updates=_updates(results.updates),
    )


def spread_of(values: Iterable[float]) -> Spread:
    """Median and range; a run that blew up (NaN) counts as infinite."""
    ordered = sorted(math.inf if math.isnan(value) else value for value in values)
    return Spread(rows.median(ordered), ordered[0], ordered[-1])


def _speeds(best: Sequence[summary.Best], d_k: int) -> Speeds:
    found: dict[str, dict[str, Spread]] = {}
    for row in best:
        if row.d_k == d_k and row.steps_median is not None:
            assert row.steps_low is not None
            assert row.steps_high is not None
            steps = Spread(row.steps_median, row.steps_low, row.steps_high)
            found.setdefault(row.optimizer, {})[row.rule] = steps
    slower = {
        optimizer: rules["none"].median / rules["sqrt_dk"].median
        for optimizer, rules in found.items()
    }
    return Speeds(d_k, found["sgd"], found["adam"], slower["sgd"], slower["adam"])


def _heldout(records: Sequence[HeldOutRow]) -> HeldOut:
    best = spread.at_best_rate(records, ("d_k", "pool", "optimizer", "rule"), "heldout_loss")
    by_run = {
        (row.d_k, row.pool, row.optimizer, row.seed, row.rule): row.heldout_loss
        for members in best.values()
        for row in members
    }
    pairs = [
        unscaled > by_run[(*run, "sqrt_dk")]
        for (*run, rule), unscaled in by_run.items()
        if rule == "none"
    ]
    asked = (HELDOUT_WIDTH, HELDOUT_POOL, HELDOUT_OPTIMIZER)
    told = [row for key, members in best.items() if key[:3] == asked for row in members]
    return HeldOut(
        pairs=len(pairs),
        worse=sum(pairs) / len(pairs),
        d_k=HELDOUT_WIDTH,
        pool=HELDOUT_POOL,
        train_loss=_by_rule(told, "train_loss"),
        heldout_loss=_by_rule(told, "heldout_loss"),
    )


def _depth(records: Sequence[DepthRow]) -> Depth:
    best = spread.at_best_rate(records, ("optimizer", "layers", "rule"), "loss")
    chosen = [row for members in best.values() for row in members]
    accuracy = {(row.optimizer, row.seed, row.rule, row.layers): row.accuracy for row in chosen}
    shallow, deep = min(row.layers for row in chosen), max(row.layers for row in chosen)

    def fall(optimizer: str, seed: int, rule: str) -> float:
        run = (optimizer, seed, rule)
        return accuracy[(*run, shallow)] - accuracy[(*run, deep)]

    runs = sorted({(row.optimizer, row.seed) for row in chosen})
    more = [fall(*run, "none") > fall(*run, "sqrt_dk") for run in runs]
    at = {
        (optimizer, layers): _by_rule(members, "accuracy")
        for (optimizer, layers), members in spread.grouped(chosen, ("optimizer", "layers")).items()
    }
    return Depth(
        d_k=chosen[0].d_k,
        shallow=shallow,
        deep=deep,
        pairs=len(more),
        more=sum(more) / len(more),
        shallow_sgd=at["sgd", shallow],
        deep_sgd=at["sgd", deep],
        shallow_adam=at["adam", shallow],
        deep_adam=at["adam", deep],
    )


def _updates(records: Sequence[UpdateRow]) -> Updates:
    told = [row for row in records if (row.d_k, row.step) == (UPDATES_WIDTH, UPDATES_STEP)]
    return Updates(
        d_k=UPDATES_WIDTH,
        step=UPDATES_STEP,
        rows=_by_rule(told, "rows_negligible"),
        weights=_by_rule(told, "query_weights_negligible"),
    )


def _by_rule(records: Sequence[Any], name: str) -> dict[str, Spread]:
    groups = spread.grouped(records, ("rule",))
    return {
        rule: spread_of(getattr(row, name) for row in members)
        for (rule,), members in groups.items()
    }


def as_text(found: Study) -> str:
    return json.dumps(as_json(found), indent=1) + "\n"


if __name__ == "__main__":
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else CSV
    FILE.write_text(as_text(findings(read(source))), encoding="utf-8")
