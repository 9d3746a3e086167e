"""What the page and the lesson say about the study is what its rows say."""

import dataclasses
import importlib.util
import json
import math
from pathlib import Path

import pytest

from scaledot.lab.experiments import studied
from scaledot.lab.experiments.race import race
from scaledot.lab.experiments.recall import RULES
from scaledot.lab.study import findings, spread, summary
from scaledot.lab.study.rows import median

ROOT = Path(__file__).parents[3]
CSV, PAGE = ROOT / "benchmarks/results/race.csv", ROOT / "docs/race.md"
SCALED = [rule for rule in RULES if rule != "none"]

pytestmark = pytest.mark.skipif(
    not (CSV.exists() and PAGE.exists()), reason="results and docs are not part of this copy"
)


@pytest.fixture(scope="module")
def results():
    return findings.read(CSV)


@pytest.fixture(scope="module")
def best(results):
    """Of each rule at its own best rate: {(optimizer, d_k): {rule: Best}}."""
    found: dict = {}
    for row in summary.best_rates(results.race):
        found.setdefault((row.optimizer, row.d_k), {})[row.rule] = row
    return found


@pytest.fixture(scope="module")
def pages():
    spec = importlib.util.spec_from_file_location("race_tables", ROOT / "docs" / "race_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_file_in_the_package_is_what_the_rows_give(results):
    text = findings.FILE.read_text(encoding="utf-8")
    assert text == findings.as_text(findings.findings(results)), (
        "run: python -m scaledot.lab.study.findings"
    )


def test_the_lesson_tells_the_file(results):
    told = race(rules="sqrt_dk", d_k=16, steps=50)
    assert told.study == findings.findings(results) == studied.study()
    assert {claim.key for claim in told.claims} == {"generalises", "deep", "few_weights"}


def test_a_change_of_a_row_changes_the_figures(results):
    slower = [
        dataclasses.replace(row, steps_to_90=None if row.steps_to_90 is None else 999)
        if (row.rule, row.d_k, row.optimizer) == ("none", 512, "sgd")
        else row
        for row in results.race
    ]
    changed = findings.findings(results._replace(race=slower))
    assert changed.wide.sgd["none"] == studied.Spread(999, 999, 999)
    assert changed.wide.sgd_slower == 999 / changed.wide.sgd["sqrt_dk"].median
    assert changed.wide.adam == studied.study().wide.adam


def test_a_study_survives_its_json(results):
    found = findings.findings(results)
    assert studied.from_json(json.loads(findings.as_text(found))) == found


def test_spread_counts_a_run_that_blew_up_as_infinite():
    assert findings.spread_of([2.0, math.nan, 1.0]) == studied.Spread(2.0, 1.0, math.inf)


def test_the_tables_of_the_page_are_those_of_the_rows(pages, results):
    text = PAGE.read_text(encoding="utf-8")
    assert text == pages.page(text, results), "run: python docs/race_tables.py"
    for name, table in pages.tables(results).items():
        assert f"<!-- {name} -->\n{table}\n<!-- end of {name} -->" in text


def test_a_page_without_a_place_for_a_table_is_refused(pages, results):
    with pytest.raises(ValueError, match="<!-- steps --> and <!-- end of steps -->"):
        pages.page("no tables here", results)


def test_the_summary_in_the_repository_is_that_of_the_rows(results, best):
    file = findings.rows.read(CSV.with_name("race_summary.csv"), summary.Best)
    steps = {(row.optimizer, row.d_k, row.rule): (row.rate, row.steps_median) for row in file}
    assert steps == {
        (*place, rule): (row.rate, row.steps_median)
        for place, rules in best.items()
        for rule, row in rules.items()
    }


# The sentences of docs/race.md, each from the rows.


def test_unscaled_is_slowest_at_every_width_and_never_impossible(best):
    assert len(best) == 12
    overlapping = []
    for place, rules in best.items():
        unscaled = rules["none"]
        assert unscaled.reached == unscaled.seeds == 5
        assert all(unscaled.steps_median > rules[rule].steps_median for rule in SCALED)
        if unscaled.steps_low <= max(rules[rule].steps_high for rule in SCALED):
            overlapping.append(place)
    assert overlapping == [("sgd", 16)]


def test_unscaled_falls_behind_as_heads_widen(best):
    factor = {
        place: r["none"].steps_median / r["sqrt_dk"].steps_median for place, r in best.items()
    }
    sgd = [factor["sgd", width] for width in (16, 32, 64, 128, 256, 512)]
    assert sgd == sorted(sgd)
    assert factor["adam", 512] > 2 * factor["adam", 16]
    assert (min(factor.values()), max(factor.values())) == pytest.approx((1.8, 6.8), abs=0.05)


def test_no_scaled_rule_is_ahead_everywhere(best):
    ahead = {place: min(SCALED, key=lambda rule: rules[rule].steps_median)
             for place, rules in best.items()}  # fmt: skip
    sgd = {width: rule for (optimizer, width), rule in ahead.items() if optimizer == "sgd"}
    assert sgd == {
        **{16: "cosine", 32: "sqrt_dk", 64: "cosine"},
        **dict.fromkeys((128, 256, 512), "sqrt_dmodel"),
    }
    assert ahead["adam", 512] == "dk"
    for width in (16, 32, 64, 128, 256):
        assert ahead["adam", width] == "sqrt_dmodel"
    for (optimizer, width), rules in best.items():
        others = [rules[rule] for rule in SCALED if rule != ahead[optimizer, width]]
        clear = all(row.steps_low > rules[ahead[optimizer, width]].steps_high for row in others)
        assert clear == (width == 512)
        if optimizer == "adam":
            assert max(SCALED, key=lambda rule: rules[rule].steps_median) == "sqrt_dk"


def test_dk_slows_down_with_width_under_sgd_alone(best):
    sgd = [best["sgd", width]["dk"] for width in (64, 128, 256, 512)]
    assert {row.rate for row in sgd} == {3.0}
    assert [row.steps_median for row in sgd] == [43, 54, 71, 100]
    adam = [best["adam", width]["dk"].steps_median for width in (16, 32, 64, 128, 256, 512)]
    assert (min(adam), max(adam)) == (32, 37)


def test_best_rates_move_as_the_page_says(best):
    rates = {
        (optimizer, rule): {rules[rule].rate for (o, _), rules in best.items() if o == optimizer}
        for optimizer in ("sgd", "adam")
        for rule in SCALED
    }
    assert [rule for rule in SCALED if len(rates["sgd", rule]) == 1] == ["sqrt_dk"]
    assert rates["sgd", "sqrt_dk"] == {1.0}
    assert rates["adam", "sqrt_dk"] == {0.03, 0.01}
    assert all(rates["adam", rule] == {0.03} for rule in SCALED if rule != "sqrt_dk")
    for rules in best.values():
        assert all(rules["none"].rate < rules[rule].rate for rule in SCALED)
    assert not any(row.edge for rules in best.values() for row in rules.values())


def test_depth_harms_none_with_both_optimizers_and_dk_with_sgd(results):
    found = spread.at_best_rate(results.depth, ("optimizer", "layers", "rule"), "loss")
    accuracy = {key[:3]: median(row.accuracy for row in rows) for key, rows in found.items()}
    for optimizer in ("sgd", "adam"):
        assert all(0.4 < accuracy[optimizer, layers, "none"] < 0.65 for layers in (1, 2))
        assert accuracy[optimizer, 4, "none"] < 0.2
        assert all(accuracy[optimizer, layers, "none"] < 0.1 for layers in (8, 12))
        assert all(accuracy[optimizer, n, "sqrt_dk"] > 0.99 for n in (1, 2, 4, 8, 12))
    assert all(accuracy["adam", layers, "dk"] > 0.99 for layers in (1, 2, 4, 8, 12))
    assert all(accuracy["sgd", layers, "dk"] > 0.99 for layers in (1, 2, 4))
    assert all(accuracy["sgd", layers, "dk"] < 0.2 for layers in (8, 12))


def test_unscaled_has_the_highest_loss_on_the_pool_and_off_it(results):
    found = spread.at_best_rate(
        results.heldout, ("d_k", "pool", "optimizer", "rule"), "heldout_loss"
    )
    cells: dict = {}
    for (d_k, pool, optimizer, rule, _), members in found.items():
        cells.setdefault((d_k, pool, optimizer), {})[rule] = members
    assert len(cells) == 12

    def highest(name: str) -> int:
        """In how many cells unscaled has the highest median."""
        return sum(
            max(rules, key=lambda rule: median(getattr(r, name) for r in rules[rule])) == "none"
            for rules in cells.values()
        )

    assert (highest("heldout_loss"), highest("train_loss"), highest("kept_wrong")) == (12, 12, 11)
    told = findings.findings(results).heldout
    assert (round(told.worse * told.pairs), told.pairs) == (56, 60)
    for (_, pool, _), rules in cells.items():
        if pool == 64:
            losses = [row.heldout_loss for members in rules.values() for row in members]
            assert min(losses) > math.log(32)


def test_rows_are_negligible_without_scaling_and_weights_are_not(results):
    groups = spread.grouped(results.updates, ("rule", "step", "d_k"))
    weights = {
        key: median(row.query_weights_negligible for row in rows) for key, rows in groups.items()
    }
    for rule, step, d_k in groups:
        if rule == "none":
            assert weights[rule, step, d_k] < weights["sqrt_dk", step, d_k]
        elif step <= 20:
            assert all(row.rows_negligible == 0 for row in groups[rule, step, d_k])
    start = {rule: share for (rule, step, d_k), share in weights.items() if (step, d_k) == (0, 512)}
    assert max(start, key=start.get) == "dk"
    told = findings.findings(results).updates
    assert told.rows["none"].low > 0.7
    assert told.weights["none"].high < 0.01
