"""What all lessons have in common: controls, claims, plain results, no side effects, quick."""

import dataclasses
import inspect
import json
import math
import time

import pytest
import torch

from scaledot.lab.experiments import LESSONS, Control, Lesson, as_json, race_steps
from scaledot.lab.experiments.lesson import KINDS, claim

SLIDER = 0.025  # seconds of one core that an answer may take,
MILLION = 0.006  # where this draws a million normal numbers; a busy or slower core has more of both
QUICK = [name for name in LESSONS if name != "race"]
SMALL_RACE = {"rules": "none", "d_k": 16, "steps": 50}


def run(name, **given):
    lesson = LESSONS[name]
    if name == "race":
        given = {**SMALL_RACE, **given}
    return lesson.run(**lesson.arguments(given))


def test_lessons_come_in_teaching_order():
    first = ["flow", "vectors", "variance", "saturation", "jacobian", "gradients", "divisors"]
    then = ["heads", "scores", "layernorm", "overflow", "assumption", "race"]
    assert list(LESSONS) == first + then


@pytest.mark.parametrize("name", LESSONS)
def test_controls_are_the_functions_arguments(name):
    lesson = LESSONS[name]
    parameters = inspect.signature(lesson.run).parameters
    assert {p.kind for p in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    assert {control.name: control.default for control in lesson.controls} == defaults
    assert lesson.run.__name__ == lesson.name == name


@pytest.mark.parametrize("name", LESSONS)
def test_defaults_pass_their_own_check(name):
    for control in LESSONS[name].controls:
        assert control.kind in KINDS
        assert control.check(control.default) == control.default
        for value in control.values:
            assert control.check(value) == value


@pytest.mark.parametrize("name", LESSONS)
def test_result_is_plain_json(name):
    result = run(name)
    assert dataclasses.is_dataclass(result)
    data = json.loads(json.dumps(as_json(result), allow_nan=False))
    assert list(data) == [field.name for field in dataclasses.fields(result)]
    assert data["claims"]
    keys = [found["key"] for found in data["claims"]]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("name", LESSONS)
def test_every_claim_is_named_in_the_results_docstring(name):
    result = run(name, **({"measure": True} if name == "scores" else {}))
    for found in result.claims:
        assert f"`{found.key}`" in type(result).__doc__


@pytest.mark.parametrize("name", LESSONS)
def test_no_lesson_touches_torchs_generator(name):
    before = torch.get_rng_state()
    run(name)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", LESSONS)
def test_same_seed_same_numbers_another_seed_others(name):
    assert as_json(run(name)) == as_json(run(name))  # as text: a NaN equals itself
    if any(control.name == "seed" for control in LESSONS[name].controls):
        assert as_json(run(name)) != as_json(run(name, seed=1))


def extremes(lesson):
    """Each control at each end, the others at their defaults."""
    for control in lesson.controls:
        if control.name in ("measure", "seed"):
            continue
        if control.kind in ("choice", "steps"):
            values = control.values if control.kind == "choice" else control.values[::-1][:1]
        elif control.kind == "range":
            values = (control.low, control.high)
        elif control.kind == "toggle":
            values = (not control.default,)
        elif control.kind == "numbers":
            continue  # two lists must match: see below
        else:
            values = ("a b c d e f g h i j k l",)
        for value in values:
            yield {control.name: value}


CASES = [(name, given) for name in QUICK for given in ({}, *extremes(LESSONS[name]))]
CASES += [
    ("vectors", {"q": [1.5] * 64, "k": [-2.0] * 64}),
    ("saturation", {"scores": [1e6, -1e6] * 8}),
    ("jacobian", {"scores": [1e6, -1e6] * 8}),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "given"), CASES, ids=str)
def test_answers_within_a_sliders_time(name, given):
    lesson = LESSONS[name]
    arguments = lesson.arguments(given)
    assert_quick(lambda _: lesson.run(**arguments))


@pytest.mark.parametrize(("name", "given"), CASES, ids=str)
def test_answers_are_json(name, given):
    lesson = LESSONS[name]
    json.dumps(as_json(lesson.run(**lesson.arguments(given))), allow_nan=False)


@pytest.mark.nightly
def test_a_fresh_sentence_model_is_within_a_sliders_time():
    """Its weights are drawn once for a seed and kept: that one time may take twice as long."""
    lesson = LESSONS["flow"]
    assert_quick(
        lambda turn: lesson.run(**lesson.arguments({"d_model": 1024, "seed": 10 + turn})),
        2 * SLIDER,
    )


def assert_quick(answer, limit=SLIDER):
    """The best of six turns, the yardstick measured in the same turns; the first warms up."""
    draw = torch.Generator()
    answers, yardsticks = [], []
    for turn in range(6):
        answers.append(seconds(lambda turn=turn: answer(turn)))
        yardsticks.append(seconds(lambda: torch.randn(2**20, generator=draw)))
    assert min(answers) < limit * max(1.0, min(yardsticks) / MILLION)


def seconds(call):
    began = time.thread_time()  # of this thread: what others do in their turns does not count
    call()
    return time.thread_time() - began


# Controls


@pytest.mark.parametrize(
    ("control", "value", "clean"),
    [
        (Control("d", "steps", 1, values=(1, 2, 4)), 2.0, 2),
        (Control("c", "choice", "a", values=("a", "b")), "b", "b"),
        (Control("r", "range", 1.0, low=0.5, high=2.0, step=0.5), 2, 2.0),
        (Control("s", "range", 0, low=0, high=9, step=1), 3.0, 3),
        (Control("t", "toggle", False), True, True),
        (Control("w", "text", "x", length=3), "abc", "abc"),
        (Control("n", "numbers", (1.0,), length=2), [1, 2.5], (1.0, 2.5)),
    ],
)
def test_control_cleans_what_it_allows(control, value, clean):
    found = control.check(value)
    assert found == clean
    assert type(found) is type(clean)


@pytest.mark.parametrize(
    ("control", "value"),
    [
        (Control("d", "steps", 1, values=(1, 2, 4)), 3),
        (Control("d", "steps", 1, values=(1, 2, 4)), True),
        (Control("d", "steps", 1, values=(1, 2, 4)), "2"),
        (Control("c", "choice", "a", values=("a", "b")), "c"),
        (Control("c", "choice", "a", values=("a", "b")), ["a"]),
        (Control("r", "range", 1.0, low=0.5, high=2.0, step=0.5), 2.5),
        (Control("r", "range", 1.0, low=0.5, high=2.0, step=0.5), math.nan),
        (Control("r", "range", 1.0, low=0.5, high=2.0, step=0.5), None),
        (Control("s", "range", 0, low=0, high=9, step=1), 0.5),
        (Control("s", "range", 0, low=0, high=9, step=1), 10**400),
        (Control("t", "toggle", False), 1),
        (Control("w", "text", "x", length=3), "abcd"),
        (Control("w", "text", "x", length=3), "  "),
        (Control("w", "text", "x", length=3), 7),
        (Control("n", "numbers", (1.0,), length=2), [1, 2, 3]),
        (Control("n", "numbers", (1.0,), length=2), []),
        (Control("n", "numbers", (1.0,), length=2), [math.inf]),
        (Control("n", "numbers", (1.0,), length=2), ["1"]),
        (Control("n", "numbers", (1.0,), length=2), "12"),
        (Control("n", "numbers", (1.0,), length=2), [1e7]),
    ],
)
def test_control_refuses_the_rest_by_name(control, value):
    with pytest.raises(ValueError, match=f"^{control.name} must .*got "):
        control.check(value)


def test_a_refused_seed_is_told_the_largest_in_full():
    with pytest.raises(ValueError, match="seed must be a number from 0 to 2147483647; got -1"):
        LESSONS["variance"].arguments({"seed": -1})


def test_unknown_argument_lists_the_known():
    with pytest.raises(ValueError, match=r"variance has no argument dk; it has d_k, scaled"):
        LESSONS["variance"].arguments({"dk": 3})


def test_arguments_are_complete_and_checked():
    lesson = LESSONS["variance"]
    assert lesson.arguments({"d_k": 16.0}) == {**lesson.arguments(), "d_k": 16}


# Claims and JSON


def test_claim_agrees_within_its_tolerance_only():
    assert claim("k", folklore=1.0, measured=1.04, tolerance=0.05).agrees
    assert not claim("k", folklore=1.0, measured=1.06, tolerance=0.05).agrees
    assert not claim("k", folklore=(1.0, 2.0), measured=(1.0, 3.0), tolerance=0.5).agrees
    assert not claim("k", folklore=(1.0, 2.0), measured=(1.0,), tolerance=0.5).agrees
    assert not claim("k", folklore=1.0, measured=math.nan, tolerance=9.0).agrees
    assert claim("k", folklore="over", measured="over").agrees
    assert not claim("k", folklore="over", measured="under").agrees


def test_claim_without_folklore_sets_the_theory_against_the_measurement():
    assert claim("k", folklore=None, measured=1.0, theory=1.0, tolerance=0.1).agrees
    assert not claim("k", folklore=None, measured=2.0, theory=1.0, tolerance=0.1).agrees


def test_claim_needs_something_to_compare_and_a_tolerance():
    with pytest.raises(ValueError, match="give a folklore or a theory"):
        claim("k", folklore=None, measured=1.0)
    with pytest.raises(ValueError, match="need a tolerance"):
        claim("k", folklore=1.0, measured=1.0)


def test_json_has_words_for_numbers_it_lacks():
    assert as_json((math.nan, math.inf, -math.inf, 1.5)) == ["nan", "inf", "-inf", 1.5]
    assert as_json({"a": (1, None, True, "x")}) == {"a": [1, None, True, "x"]}
    with pytest.raises(TypeError, match="Tensor has no place"):
        as_json(torch.ones(1))


def test_race_steps_are_the_races_curves():
    lesson: Lesson = LESSONS["race"]
    arguments = lesson.arguments({**SMALL_RACE, "rules": "all"})
    assert tuple(race_steps(**arguments)) == lesson.run(**arguments).curves
