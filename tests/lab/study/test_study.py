"""The study: every run of the sweep is a run of the live race; its tables say what the rows say."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch

from scaledot.lab.experiments import recall
from scaledot.lab.experiments.race import first_at_goal, race
from scaledot.lab.experiments.recall import RULES, Run, Stack
from scaledot.lab.study import __main__ as command
from scaledot.lab.study import depth, heldout, rows, summary, sweep, updates

near = pytest.approx

PLAN = sweep.Plan(
    widths=(16,), rates=(("sgd", (0.3, 1.0)), ("adam", (3e-3,))), seeds=(2, 3), steps=50
)


@pytest.fixture(scope="module")
def swept():
    return sweep.sweep(PLAN, "cpu")


def test_sweep_holds_every_combination_once(swept):
    pairs = [("sgd", 0.3), ("sgd", 1.0), ("adam", 3e-3)]
    expected = {
        Run(rule, 16, optimizer, rate, seed)
        for (optimizer, rate), rule, seed in product(pairs, RULES, (2, 3))
    }
    assert {row.run for row in swept} == expected
    assert len(swept) == len(expected)


def test_full_plan_is_what_the_study_promises():
    plan = sweep.Plan()
    assert plan.rules == ("none", "sqrt_dk", "dk", "sqrt_dmodel", "cosine")
    assert plan.widths == (16, 32, 64, 128, 256, 512)
    assert len(plan.seeds) >= 5
    for _, rates in plan.rates:
        assert len(rates) >= 6
        assert max(rates) / min(rates) >= 100


@pytest.mark.parametrize("seed", [2, 3])
def test_a_row_of_the_sweep_is_the_live_race(swept, seed):
    """Its own seed, the same 50 steps; the unscaled run is chaotic, so it is left out."""
    live = race(d_k=16, optimizer="adam", rate=3e-3, steps=50, seed=seed)
    by_run = {row.run: row for row in swept}
    for finish in live.finishes:
        if finish.rule == "none":
            continue
        row = by_run[Run(finish.rule, 16, "adam", 3e-3, seed)]
        assert row.loss == near(finish.loss, rel=1e-3)
        assert row.accuracy == near(finish.accuracy, abs=2e-3)
        assert row.entropy_ratio == near(finish.entropy_ratio, rel=1e-2)
        assert row.start_entropy_ratio == near(live.curves[0].runners[
            RULES.index(finish.rule)].entropy_ratio, rel=1e-4)  # fmt: skip


def test_steps_to_goal_is_the_races(swept):
    accuracy = torch.rand(60, 5, generator=torch.Generator().manual_seed(0)) * 0.2 + 0.8
    expected = [first_at_goal(column) for column in accuracy.T.tolist()]
    assert sweep.steps_to_goal(accuracy) == expected
    assert None not in expected or any(step is not None for step in expected)
    assert sweep.steps_to_goal(torch.zeros(60, 2)) == [None, None]
    assert sweep.steps_to_goal(torch.ones(5, 2)) == [None, None]


def test_rows_survive_their_file(swept, tmp_path):
    path = tmp_path / "deep" / "race.csv"
    changed = [replace(swept[0], steps_to_90=None, loss=math.inf), *swept[1:]]
    rows.write(path, changed)
    back = rows.read(path, rows.RaceRow)
    assert [row.run for row in back] == [row.run for row in swept]
    assert back[0].steps_to_90 is None
    assert back[0].loss == math.inf
    assert [row.accuracy for row in back] == near([row.accuracy for row in swept], rel=1e-5)


def test_median_counts_nan_as_worst():
    assert rows.median([3.0, 1.0, 2.0]) == 2
    assert rows.median([1.0, 2.0]) == 1.5
    assert rows.median([math.nan, 1.0, math.nan]) == math.inf


def made(rule, rate, seed, steps, loss=1.0):
    zeros = dict.fromkeys(
        ("entropy_ratio", "saturated", "dead", "start_entropy_ratio", "start_saturated"), 0.0
    )
    return rows.RaceRow(
        rule=rule, d_k=64, optimizer="sgd", rate=rate, seed=seed, steps=100, steps_to_90=steps,
        loss=loss, accuracy=0.5 if steps is None else 1.0, heldout_loss=loss,
        heldout_accuracy=0.5, device="cpu", torch="", **zeros,
    )  # fmt: skip


def test_best_rate_is_that_of_most_seeds_then_fewest_steps_then_least_loss():
    given = [
        *(made("none", 0.1, seed, steps) for seed, steps in enumerate((50, 52, 90))),
        *(made("none", 0.3, seed, steps) for seed, steps in enumerate((20, 20, None))),
        *(made("none", 1.0, seed, steps) for seed, steps in enumerate((60, 60, 60))),
        *(made("dk", 0.1, seed, None, loss=3.0) for seed in range(3)),
        *(made("dk", 0.3, seed, None, loss=loss) for seed, loss in enumerate((2.0, 1.0, math.nan))),
    ]
    none, dk = summary.best_rates(given)
    assert (none.rule, none.rate, none.edge, none.reached) == ("none", 0.1, True, 3)
    assert (none.steps_median, none.steps_low, none.steps_high) == (52, 50, 90)
    assert (dk.rate, dk.reached, dk.steps_median, dk.steps_low) == (0.3, 0, None, None)
    assert (dk.heldout_loss_median, dk.heldout_loss_high) == (2.0, math.inf)
    text = summary.as_text([none, dk])
    assert "52 [50, 90]" in text
    assert "never" in text


# "Commits too early and generalises worse"


def test_heldout_compares_the_pool_with_unseen_sequences():
    plan = heldout.Plan(
        rules=("none", "sqrt_dk"), widths=(64,), pools=(8, 256), rates=(("adam", (0.01,)),),
        seeds=(0, 1), steps=60,
    )  # fmt: skip
    found = heldout.heldout(plan, "cpu")
    assert len(found) == 8
    by = {(row.rule, row.pool, row.seed): row for row in found}
    for seed in (0, 1):
        small = by["sqrt_dk", 8, seed]
        assert small.train_accuracy == 1.0  # eight sequences are learned by heart
        assert small.heldout_accuracy < 0.5
        assert small.gap == near(small.heldout_loss - small.train_loss, abs=1e-5)
        assert small.gap > by["sqrt_dk", 256, seed].gap
        assert (
            by["none", 256, seed].start_saturated > 0.2 > by["sqrt_dk", 256, seed].start_saturated
        )
        row = by["none", 256, seed]
        assert 0 <= row.kept_wrong <= row.kept <= 1


# "Only a few weights are updated"


def test_row_gradients_are_autograds():
    runs = [Run("none", 16, "sgd", 0.3, 0), Run("sqrt_dk", 16, "sgd", 0.3, 1)]
    stack = Stack(runs)
    batch = recall.together([recall.draw(recall.data_of(run.seed), 5) for run in runs])
    found = updates.gradients(stack, batch)
    for place, run in enumerate(runs):
        embeddings, w_q, w_k, w_v, w_c = recall.start(run.seed, 16)
        one = batch.at(place)
        tokens = (embeddings[one.keys] + embeddings[one.values + 32]) / math.sqrt(2)
        q = (embeddings[one.keys.gather(1, one.asked[:, None])] @ w_q).requires_grad_()
        scale = 1.0 if run.rule == "none" else 0.25
        weights = torch.softmax(q @ (tokens @ w_k).mT * scale, -1)
        logits = (weights @ (tokens @ w_v))[:, 0] @ w_c
        answers = one.values.gather(1, one.asked[:, None])[:, 0]
        loss = torch.nn.functional.cross_entropy(logits, answers, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, q)
        expected = gradient[:, 0].square().mean(-1).sqrt()
        torch.testing.assert_close(found.rows[place], expected, rtol=1e-3, atol=1e-7)


def test_unscaled_rows_are_silent_at_the_start_and_scaled_ones_are_not():
    plan = updates.Plan(rules=("sqrt_dk", "none"), widths=(512,), seeds=(0,), at=(0, 3))
    found = {(row.rule, row.step): row for row in updates.updates(plan, "cpu")}
    assert len(found) == 4
    assert found["none", 0].rows_negligible > 0.3
    assert found["sqrt_dk", 0].rows_negligible < 0.05
    for row in found.values():
        assert 0 <= row.query_weights_negligible <= 1
        assert row.row_p99 > row.row_median


# "Harms deep models more"


def test_depth_trains_every_rule_at_every_depth():
    plan = depth.Plan(
        rules=("none", "sqrt_dk"), layers=(1, 3), rates=(("adam", (0.01,)),), seeds=(0,), steps=25
    )
    found = depth.depth(plan, "cpu")
    assert [(row.rule, row.layers) for row in found] == [
        ("none", 1), ("sqrt_dk", 1), ("none", 3), ("sqrt_dk", 3)
    ]  # fmt: skip
    assert all(math.isfinite(row.loss) and row.loss < 6 for row in found)


def test_a_deep_stack_is_its_runs_alone():
    runs = [Run("none", 16, "sgd", 0.1, 0), Run("sqrt_dk", 16, "adam", 0.01, 1)]
    both, alone = depth.DeepStack(runs, 2), depth.DeepStack(runs[1:], 2)
    streams = [recall.data_of(run.seed) for run in runs]
    for _ in range(5):
        batch = recall.together([recall.draw(stream) for stream in streams])
        together = both.step(batch)[:, 1]
        single = alone.step(batch.at(torch.tensor([1])))[:, 0]
        torch.testing.assert_close(together, single, rtol=1e-3, atol=1e-4)


def test_deep_layers_are_attention():
    """One layer, against scaledot.attention on the same tokens."""
    import scaledot

    run = Run("sqrt_dk", 16, "sgd", 0.1, 4)
    stack, batch = depth.DeepStack([run], 1), recall.draw(recall.data_of(4), 3)
    batch = recall.together([batch])
    logits, _ = stack.logits(batch)
    w_q, w_k, w_v, w_o, w_c = (weight[0].detach() for weight in stack.parameters)
    x = stack._tokens(batch)[0]
    normed = torch.nn.functional.layer_norm(x, (64,))
    out = scaledot.attention(normed @ w_q[0], normed @ w_k[0], normed @ w_v[0]) @ w_o[0]
    last = torch.nn.functional.layer_norm((x + out)[:, -1], (64,))
    torch.testing.assert_close(logits[0], last @ w_c, rtol=1e-4, atol=1e-4)


# The command


def test_command_writes_five_files(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "QUICK", replace(PLAN, rules=("none", "sqrt_dk"), steps=25))
    monkeypatch.setattr(heldout, "QUICK", replace(heldout.QUICK, steps=12))
    command.main(["--quick", "--out", str(tmp_path / "race.csv")])
    names = {path.name for path in tmp_path.iterdir()}
    parts = ("", "_summary", "_heldout", "_updates", "_depth")
    assert names == {f"race{part}.csv" for part in parts}
    assert len(rows.read(tmp_path / "race.csv", rows.RaceRow)) == 12
    assert rows.read(tmp_path / "race_summary.csv", summary.Best)
    assert "steps to 90 %" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_command_without_a_gpu_says_what_to_type():
    with pytest.raises(SystemExit, match="--device cpu --quick"):
        command.main(["--device", "cuda"])
