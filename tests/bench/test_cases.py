"""The cases say what the project promises."""

import pytest

from scaledot.bench import cases

PROMISES = {
    "attention": "<= 1.05",
    "attention_with_vitals": "<= 1.5",
    "vitals": "<= 1",
    "against_plain": ">= 2.5",
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", ["1x8x1024x64", "1x8x4096x64", "1x4x4096x128"])
def test_every_shape_has_every_bar(shape, causal):
    found = {
        case.name: str(case.bar)
        for case in cases.on_cpu()
        if case.workload.shape == shape and case.workload.causal is causal and case.bar
    }
    assert found == PROMISES


def test_the_other_bars():
    found = {
        (case.name, case.workload.shape): str(case.bar)
        for case in cases.on_cpu()
        if case.name not in PROMISES and case.bar
    }
    assert found == {
        ("tiny_call", "1x1x8x8"): "<= 25",
        ("vitals_memory", "1x1x16384x64"): "<= 0.05",
        ("additive_attention", "1x4x1024x64"): "< 1",
        ("additive_memory", "1x4x1024x64"): "<= 0.05",
    }


def test_only_vitals_have_a_goal_beyond_the_bar():
    goals = {(case.name, str(case.goal)) for case in cases.on_cpu() if case.goal}
    assert goals == {("attention_with_vitals", "<= 1.2")}


def test_a_quick_try_has_the_same_names_and_judges_no_other_shape():
    full, quick = cases.on_cpu(), cases.on_cpu(quick=True)
    assert {case.name for case in quick} == {case.name for case in full}
    shapes = {(case.name, case.workload) for case in full}
    assert all((case.name, case.workload) in shapes for case in quick if case.bar)
    assert max(case.repeats for case in quick) <= 5
