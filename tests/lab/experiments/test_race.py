"""The race's task, its stacks of runs, and what a race shows."""

import math

import pytest
import torch
from torch.nn import functional as F

import scaledot
from scaledot.lab.experiments import recall
from scaledot.lab.experiments.race import LEARNED, TRAILING, first_at_goal, race
from scaledot.lab.experiments.race import steps as race_steps
from scaledot.lab.experiments.recall import BATCH, PAIRS, RULES, SYMBOLS, Descent, Run, Stack

near = pytest.approx


def test_sequences_hold_no_key_twice():
    batch = recall.draw(recall.data_of(0), 7)
    assert batch.keys.shape == batch.values.shape == (7, PAIRS)
    assert all(len(set(row)) == PAIRS for row in batch.keys.tolist())
    assert 0 <= int(batch.asked.min()) <= int(batch.asked.max()) < PAIRS


@pytest.mark.parametrize("rule", RULES)
def test_tables_of_symbols_are_attention_over_tokens(rule):
    run = Run(rule, 24, "sgd", 0.1, 5)
    stack, batch = Stack([run]), recall.draw(recall.data_of(5), 11)
    _, logits, z = stack.losses(batch)

    embeddings, w_q, w_k, w_v, w_c = recall.start(5, 24)
    tokens = (embeddings[batch.keys] + embeddings[batch.values + SYMBOLS]) / math.sqrt(2)
    question = embeddings[batch.keys.gather(1, batch.asked[:, None])]
    q, k, v = question @ w_q, tokens @ w_k, tokens @ w_v
    scale = rule
    if rule == "cosine":
        q, k, scale = F.normalize(q, dim=-1), F.normalize(k, dim=-1), math.sqrt(24)
    out, vitals = scaledot.attention_with_vitals(
        q, k, v, scale=scale, num_heads=recall.HEADS, per_row=True
    )
    torch.testing.assert_close(logits[0], out[:, 0] @ w_c, rtol=1e-4, atol=1e-4)
    lse = torch.logsumexp(z[0], -1)
    torch.testing.assert_close(lse, vitals.per_row.lse[:, 0], rtol=1e-4, atol=1e-4)

    measured = dict(zip(recall.MEASURES, stack.look(batch)[:, 0].tolist(), strict=True))
    assert measured["entropy_ratio"] == near(float(vitals.entropy_ratio.mean()), rel=1e-3)
    assert measured["saturated"] == near(float(vitals.saturated.mean()), abs=1e-6)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_descent_is_torchs(optimizer):
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(2, 3, 5, generator=generator)
    rates = (0.1, 0.02)
    ours = weights.clone()
    descent = Descent([ours], [Run("none", 1, optimizer, rate, 0) for rate in rates])
    theirs = [weights[place].clone().requires_grad_() for place in range(2)]
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer]
    torchs = [kind([weight], lr=rate) for weight, rate in zip(theirs, rates, strict=True)]
    for _ in range(4):
        gradient = torch.randn(2, 3, 5, generator=generator)
        descent.step([gradient])
        for place in range(2):
            theirs[place].grad = gradient[place].clone()
            torchs[place].step()
    torch.testing.assert_close(ours, torch.stack([weight.detach() for weight in theirs]))


def test_a_run_in_a_stack_of_strangers_is_the_run_alone():
    """Rules, rates, optimizers and seeds beside it change nothing: 40 steps, each its loss."""
    alone = [
        step.runners[0]
        for step in race_steps(rules="sqrt_dk", d_k=32, optimizer="adam", rate=0.003, steps=40,
                               seed=3)
    ]  # fmt: skip
    runs = [
        Run("none", 32, "sgd", 3.0, 1),
        Run("sqrt_dk", 32, "adam", 0.003, 3),
        Run("cosine", 32, "adam", 0.1, 3),
        Run("dk", 32, "sgd", 0.3, 1),
    ]
    stack = Stack(runs)
    streams = {seed: recall.data_of(seed) for seed in (1, 3)}
    for step in range(40):
        drawn = {seed: recall.draw(stream) for seed, stream in streams.items()}
        measured = stack.step(recall.together([drawn[run.seed] for run in runs]))[:, 1]
        single = [getattr(alone[step], name) for name in recall.MEASURES]
        assert measured.tolist() == near(single, rel=1e-4, abs=1e-4)


def test_a_stack_holds_one_width():
    with pytest.raises(ValueError, match=r"one d_k; got \[16, 32\]"):
        Stack([Run("none", 16, "sgd", 0.1, 0), Run("none", 32, "sgd", 0.1, 0)])


def test_only_the_cosine_learns_a_temperature():
    stack = Stack([Run(rule, 16, "adam", 0.01, 0) for rule in RULES])
    before = stack.parameters[-1].detach().clone()
    stack.step(recall.draw(recall.data_of(0)))
    moved = (stack.parameters[-1].detach() != before).tolist()
    assert moved == [rule == "cosine" for rule in RULES]
    assert before[RULES.index("cosine")].exp().item() == near(4.0)  # sqrt(16)


def test_a_run_that_blows_up_answers_nothing():
    stack = Stack([Run("none", 16, "sgd", 1e30, 0)])
    data = recall.data_of(0)
    for _ in range(4):
        measured = stack.step(recall.draw(data))
    loss, accuracy = measured[0, 0].item(), measured[1, 0].item()
    assert not math.isfinite(loss)
    assert accuracy == 0


def test_first_at_goal_waits_for_the_mean():
    assert first_at_goal([0.9] * TRAILING) == TRAILING
    assert first_at_goal([0.0] + [0.9] * TRAILING) == TRAILING + 1
    assert first_at_goal([1.0] * (TRAILING - 1)) is None
    assert first_at_goal([0.89] * 100) is None


def test_unscaled_sticks_where_sqrt_dk_learns_everything():
    result = race()  # SGD 0.3 at d_k = 64
    by_rule = {finish.rule: finish for finish in result.finishes}
    assert by_rule["sqrt_dk"].accuracy == 1.0
    assert by_rule["sqrt_dk"].steps_to_90 < by_rule["sqrt_dmodel"].steps_to_90
    assert 0.8 < by_rule["none"].accuracy < 0.999
    assert by_rule["none"].loss > 5 * by_rule["sqrt_dk"].loss
    assert by_rule["none"].saturated > 0.9
    assert len(result.curves) == 200
    assert result.batch == BATCH
    found = {row.key: row for row in result.claims}
    assert not found["impossible"].agrees  # it learns most of it
    assert not found["collapse"].agrees


def test_a_race_in_which_nobody_learned_says_nothing_of_scaling():
    broken = race(d_k=16, rate=3.0, steps=50)  # a learned cosine beside four broken runs
    assert math.isnan(broken.finishes[0].loss)
    assert broken.finishes[-1].accuracy > LEARNED
    wild = race(d_k=16, optimizer="adam", rate=3.0, steps=50)
    assert math.isfinite(wild.finishes[0].loss)
    for result in (broken, wild):
        undecided, *_ = result.claims
        assert (undecided.key, undecided.agrees) == ("undecided", None)
        assert not {"impossible", "collapse"} & {row.key for row in result.claims}


def test_unscaled_starts_saturated_and_the_others_do_not():
    start = next(iter(race_steps(d_k=512, steps=50)))
    by_rule = {runner.rule: runner for runner in start.runners}
    assert by_rule["none"].saturated > 0.5
    assert by_rule["none"].entropy_ratio < 0.1
    assert by_rule["none"].dead > 0.4
    assert by_rule["sqrt_dk"].saturated == 0
    assert by_rule["dk"].entropy_ratio > 0.99
    assert all(runner.loss > 3 for runner in start.runners)  # nobody knows anything yet
