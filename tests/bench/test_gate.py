"""The gate lets the library through and stops whatever is wrong."""

import dataclasses
import math

import pytest
import torch

from scaledot.bench import cases, gate, ours
from scaledot.bench.cases import Contender
from scaledot.bench.gate import Subject
from scaledot.bench.workload import Answer, Workload

PLAIN = Workload(1, 3, 131, 16)
CAUSAL = Workload(1, 3, 131, 16, causal=True)
ADDITIVE = Workload(1, 3, 37, 16, additive=True)
BOTH = pytest.mark.parametrize("workload", [PLAIN, CAUSAL], ids=["all", "causal"])


def _red(attend, workload) -> set[str]:
    """The fields on which a contender fails."""
    checks = gate.examine(Subject(Contender("injected", attend), workload))
    assert checks
    return {check.field for check in checks if not check.holds}


@BOTH
@pytest.mark.parametrize("contender", [cases.ATTENTION, cases.WITH_VITALS, cases.VITALS])
def test_the_library_passes(contender, workload):
    assert _red(contender.attend, workload) == set()


def test_additive_attention_passes():
    assert _red(ours.additive_attention, ADDITIVE) == set()


def test_every_field_is_compared():
    checks = gate.examine(Subject(cases.WITH_VITALS, PLAIN))
    named = {
        field.name for field in dataclasses.fields(cases.WITH_VITALS.attend(PLAIN.make()).vitals)
    }
    weights = {"ratio_rows", "q_entries", "k_entries", "per_row"}
    assert {check.field for check in checks} == named - weights | {"out", "passes"}


@BOTH
def test_an_output_off_by_a_thousandth_is_red(workload):
    assert _red(lambda inputs: Answer(ours.attention(inputs).out * 1.001, None), workload) == {
        "out"
    }


def test_one_wrong_entry_is_red():
    def attend(inputs):
        out = ours.attention(inputs).out.clone()
        out[0, -1, -1, -1] += 1e-4
        return Answer(out, None)

    assert _red(attend, PLAIN) == {"out"}


def test_forgotten_causality_is_red():
    red = _red(lambda inputs: ours.attention_with_vitals(inputs._replace(causal=False)), CAUSAL)
    assert {"out", "entropy", "pairs", "sink"} <= red


def test_a_wrong_scale_is_red():
    red = _red(lambda inputs: ours.vitals(inputs._replace(query=inputs.query * 1.001)), PLAIN)
    assert {"max_logit", "logit_std", "row_std", "entropy", "sum_p2", "q_rms"} <= red


def test_a_wrong_weight_of_additive_attention_is_red():
    def attend(inputs):
        return ours.additive_attention(inputs._replace(weight=inputs.weight * 1.001))

    assert _red(attend, ADDITIVE) == {"out"}


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_what_is_not_finite_is_red(broken):
    def attend(inputs):
        return Answer(torch.full_like(ours.attention(inputs).out, broken), None)

    assert _red(attend, PLAIN) == {"out"}


def test_another_shape_is_red():
    assert _red(lambda inputs: Answer(ours.attention(inputs).out[..., :-1], None), PLAIN) == {"out"}


@BOTH
@pytest.mark.parametrize("field", [*gate.FLOATS, *gate.COUNTS])
def test_one_wrong_field_is_red(workload, field):
    def attend(inputs):
        answer = ours.attention_with_vitals(inputs)
        name = "sum_p2" if field == "passes" else field
        right = getattr(answer.vitals, name)
        wrong = right + 1 if field in gate.COUNTS else right * 1.0001 + 1e-4
        return answer._replace(vitals=dataclasses.replace(answer.vitals, **{name: wrong}))

    assert field in _red(attend, workload)


def test_a_dense_formula_in_blocks_is_the_formula(monkeypatch):
    inputs = CAUSAL.make()
    whole = gate._by_blocks(gate.peers.plain, inputs)
    monkeypatch.setattr(gate, "BLOCK_ELEMENTS", 3 * 131 * 10)
    blocks = gate._by_blocks(gate.peers.plain, inputs)
    torch.testing.assert_close(blocks.out, whole.out)
    for name in (*gate.FLOATS, *gate.COUNTS):
        torch.testing.assert_close(getattr(blocks.vitals, name), getattr(whole.vitals, name))


def test_cases_that_share_a_call_are_examined_once():
    every = cases.on_cpu()
    subjects = gate.subjects(every)
    assert len(set(subjects)) == len(subjects) < len(every)
    assert {subject.contender for subject in subjects} == {case.ours for case in every}
