"""The rules, held against runs of which we know what is wrong with them."""

import statistics
import time

import numpy as np
import pytest
from watch.alarms.alarm_cases import judged, kinds, reading, runaway

from scaledot.watch.alarms import Judge, overridden


def test_a_run_that_collapses_is_warned_of_and_then_must_be_acted_on():
    every = judged(reading(s, **runaway(s)) for s in range(100))
    alarms = [alarm for alarm in every if alarm.grade != "note"]
    assert kinds(alarms[:2]) == [("collapse", "warn"), ("collapse", "act")]
    warned = alarms[0]
    assert warned.step < 60
    assert warned.since <= warned.step
    assert (warned.layer, warned.head, warned.heads) == ("layer", None, (0, 1, 2))
    assert 3 / warned.step < warned.rate < 3 / (warned.step / 2)  # a third of the past counts


def test_a_steady_run_raises_nothing_whatever_its_level():
    """Pretrained models hold scores of hundreds; healthy runs cross 100."""
    noise = np.random.default_rng(0).normal(1, 0.1, (400, 3))
    steady = (reading(s, max_logit=300 * noise[s], passes=0.1) for s in range(400))
    assert judged(steady) == []


def test_crossing_100_while_growing_is_a_note_and_no_more():
    def twin(step: int) -> float:
        return 160 * step / (step + 60)  # fast, then flattening: the healthy twin of the demo

    alarms = judged(
        reading(s, max_logit=[twin(s), twin(s), 20], passes=[0.1, 0.2, 0.5]) for s in range(400)
    )
    assert set(kinds(alarms)) <= {("growth", "note")}


def test_a_single_head_that_closes_is_no_illness():
    one = [lambda s: [runaway(s)["max_logit"], 5, 5], lambda s: [runaway(s)["passes"], 0.7, 0.7]]
    alarms = judged(reading(s, max_logit=one[0](s), passes=one[1](s)) for s in range(80))
    assert {kind for kind, _ in kinds(alarms)} == {"growth"}


def test_one_hot_heads_that_rest_are_no_illness():
    assert judged(reading(s, max_logit=40, passes=[0.01, 0.02, 0.6]) for s in range(300)) == []


def test_the_model_all_saturated_is_told_from_the_first_steps():
    alarms = judged(reading(s, max_logit=20, passes=0.02) for s in range(30))
    assert kinds(alarms) == [("saturation", "warn")]
    assert alarms[0].step == 2
    assert alarms[0].value == 1.0


def test_a_sink_is_given_its_name_and_counts_as_nothing_else():
    alarms = judged(reading(s, sink=0.9, **runaway(s)) for s in range(60))
    assert "collapse" not in {alarm.kind for alarm in alarms}
    sinks = [alarm for alarm in alarms if alarm.kind == "sink"]
    assert len(sinks) == 1
    assert sinks[0].grade == "note"
    assert "no illness" in sinks[0].words


def test_rows_that_are_broken_are_told_at_once_and_by_head():
    alarms = judged([reading(7), reading(8, nonfinite=[0, 4, 0])])
    assert kinds(alarms) == [("broken", "act")]
    assert (alarms[0].step, alarms[0].head, alarms[0].value, alarms[0].since) == (8, 1, 4, 8)


def test_nan_and_infinite_scores_do_not_poison_what_is_known_of_a_head():
    def scores(step: int) -> float:
        return {20: np.nan, 21: np.inf, 22: -np.inf}.get(step, runaway(step)["max_logit"])

    with np.errstate(all="raise"):
        alarms = judged(
            reading(s, max_logit=scores(s), passes=runaway(s)["passes"]) for s in range(60)
        )
    assert ("collapse", "warn") in kinds(alarms)


@pytest.mark.parametrize("steps", [1, 10])
def test_fading_waits_for_warm_up_and_then_for_twice_of_it(steps):
    alarms = judged(reading(steps * n, entropy_ratio=0.99) for n in range(0, 500, 1))
    assert kinds(alarms) == [("fading", "note"), ("fading", "warn")]
    assert [alarm.step for alarm in alarms] == [200, 400]


def test_evaluation_is_not_judged():
    assert judged(reading(s, phase="eval", nonfinite=3) for s in range(20)) == []


def test_an_alarm_is_raised_once_and_again_only_after_it_has_ended():
    sick = [reading(s, nonfinite=2) for s in range(5)]
    short = [reading(s) for s in range(5, 15)]
    again = [reading(s, nonfinite=2) for s in range(15, 20)]
    long = [reading(s) for s in range(20, 60)]
    last = [reading(s, nonfinite=2) for s in range(60, 65)]
    judge = Judge()
    assert [a.step for a in judged([*sick, *short, *again], judge)] == [0]
    assert [a.kind for a in judge.standing] == ["broken"]
    assert judged(long, judge) == []
    assert judge.standing == []
    assert [a.step for a in judged(last, judge)] == [60]


def test_the_same_curve_over_ten_times_the_steps_alarms_ten_times_later():
    """Or a reading earlier: over ten steps two readings persist as three consecutive ones do."""
    fast = judged(reading(s, **runaway(s)) for s in range(100))
    slow = judged(reading(10 * s, **runaway(s)) for s in range(100))
    assert kinds(fast) == kinds(slow)
    assert all(0 <= a.step * 10 - b.step <= 10 for a, b in zip(fast, slow, strict=True))


@pytest.mark.parametrize("every", [2, 5, 10, 20, 30])
def test_a_rarer_cadence_tells_the_same_a_few_readings_later(every):
    """Persistence and growth are counted in steps: eight readings were once asked for."""
    dense = judged(reading(s, **runaway(s / 3)) for s in range(300))
    sparse = judged(reading(s, **runaway(s / 3)) for s in range(0, 300, every))
    for grade in ("warn", "act"):
        first, later = (
            next(a.step for a in found if (a.kind, a.grade) == ("collapse", grade))
            for found in (dense, sparse)
        )
        assert first - every <= later <= first + 2 * every


def test_readings_that_grow_rarer_see_the_same_growth():
    """The early pace: every step, then every thirtieth of the steps so far."""
    due, step = [], 0
    while step < 600:
        due.append(step)
        step += 1 + step // 33
    dense = judged(reading(s, **runaway(s / 6)) for s in range(600))
    sparse = judged(reading(s, **runaway(s / 6)) for s in due)
    assert kinds(dense) == kinds(sparse)
    assert all(abs(a.step - b.step) <= 40 for a, b in zip(dense, sparse, strict=True))


def test_an_alarm_ends_after_as_many_steps_whatever_the_cadence():
    def raised(every: int) -> int:
        sick = lambda s: 2 if s < 10 or s > 400 else 0  # noqa: E731
        return len(judged(reading(s, nonfinite=sick(s)) for s in range(0, 500, every)))

    assert raised(1) == raised(5) == raised(50) == 2


def test_layers_given_one_by_one_raise_the_same_alarms():
    steps = [[reading(s, layer=name, **runaway(s)) for name in "abc"] for s in range(100)]
    together, apart = Judge(), Judge()
    a = [alarm for step in steps for alarm in together.read_step(step)]
    b = [alarm for step in steps for one in step for alarm in apart.read(one)]
    assert sorted((x.kind, x.grade, x.layer) for x in a) == sorted(
        (x.kind, x.grade, x.layer) for x in b
    )
    assert all(abs(x.step - y.step) <= 1 for x, y in zip(a, b, strict=True))


def test_a_layer_is_named_and_its_healthy_neighbour_is_not():
    steps = ([reading(s, "sick", 4, **runaway(s)), reading(s, "well", 7)] for s in range(60))
    alarms = judged(one for step in steps for one in step)
    assert {alarm.layer for alarm in alarms if alarm.grade == "warn"} == {"sick"}
    assert not any(alarm.grade == "act" for alarm in alarms)  # 4 of 11 heads


def test_layers_of_one_head_each_are_several_heads():
    steps = ([reading(s, f"l{n}", 1, **runaway(s)) for n in range(5)] for s in range(60))
    alarms = judged(one for step in steps for one in step)
    assert {a.layer for a in alarms if a.kind == "collapse"} == {f"l{n}" for n in range(5)}


def test_a_layer_that_changes_its_heads_begins_anew():
    judge = Judge()
    judged((reading(s, heads=3, **runaway(s)) for s in range(30)), judge)
    later = judged((reading(s, heads=5) for s in range(30, 60)), judge)
    assert later == []


def test_thresholds_can_be_set_and_kinds_switched_off():
    sick = [reading(s, **runaway(s)) for s in range(70)]
    off = Judge(overridden(["collapse=off", "growth=off"]))
    assert not {"collapse", "growth"} & {kind for kind, _ in kinds(judged(sick, off))}
    early = Judge(overridden({"collapse.score": 10, "collapse.projected": 100}))
    assert judged(sick, early)[0].step < judged(sick)[0].step


@pytest.mark.nightly
def test_a_step_of_a_thousand_heads_costs_little():
    rng = np.random.default_rng(0)
    steps = [
        [
            reading(s, f"l{n}", 32, max_logit=rng.uniform(1, 90, 32), passes=rng.uniform(0, 1, 32))
            for n in range(32)
        ]
        for s in range(60)
    ]
    judge, took = Judge(), []
    for step in steps:
        began = time.process_time()
        judge.read_step(step)
        took.append(time.process_time() - began)
    assert statistics.median(took) < 0.01
