"""A fuzzer that cannot fail proves nothing: each check finds the fault it is there for."""

import math
from dataclasses import replace

import pytest
import torch

from fuzz import checks, engines, formula
from fuzz.cases import Case, draw, fit, smaller
from fuzz.checks import check
from fuzz.kinds import draw_of_kind
from fuzz.tensors import grad_of, make
from scaledot.backends.cpu import native

NUMBERS = torch.Generator().manual_seed(1)
PLAIN = Case(seed=3, queries=13, keys=17, mask="float", mask_shape=(13, 17), scale="heads")

FIXED = (  # of a kind of calls
    *("query_lead", "key_lead", "value_lead", "width", "value_width", "dtype", "gqa", "additive"),
    *("mask", "mask_type", "mask_layout", "is_causal", "causal_align", "int32", "softcap"),
    *("dropout", "layouts", "small_layout", "grad_layout", "only_wanted"),
)


def faults_of(case: Case, engine: str = "cpu-tiles") -> str:
    return "\n".join(check(case, engine).faults)


def test_the_text_of_a_case_makes_the_same_case():
    for index in range(300):
        case = draw(5, index)
        assert eval(str(case), {"Case": Case}) == case
        assert draw(5, index) == case


def test_cases_differ_and_reach_every_argument():
    cases = [draw(5, index) for index in range(3000)]
    assert len({str(case) for case in cases}) == len(cases)
    for name in ("mask", "window", "key_lengths", "softcap", "sinks", "scale", "packed", "bad"):
        given = sum(getattr(case, name) is not None for case in cases)
        assert given > 100, f"{name} is given in {given} of {len(cases)} cases"
    assert sum(case.dropout > 0 for case in cases) > 100
    assert sum(case.additive is not None for case in cases) > 100


@pytest.mark.parametrize("engine", engines.ENGINES)
def test_a_fitted_case_stays_one(engine):
    for index in range(200):
        case = fit(smaller(draw(6, index)), engine)
        assert fit(case, engine) == case


def test_a_forced_engine_serves(monkeypatch):
    ran, run = [], native.run
    monkeypatch.setattr(native, "run", lambda *args: ran.append(1) or run(*args))
    plain = Case(queries=13, keys=17)
    assert faults_of(plain, "cpu-tiles") == ""
    assert not ran
    assert faults_of(plain, "cpu-native") == ""
    assert ran or native.library() is None


class _Off(torch.autograd.Function):
    """Leaves the output and changes what comes back."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


@pytest.mark.parametrize("name", ["query", "key", "value", "mask", "scale"])
def test_a_wrong_gradient_is_found(name, monkeypatch):
    attend = engines.attention

    def wrong(call, backend, **changes):
        changed = {name: _Off.apply(call.tensors[name], 1 + 1e-4)} | changes
        return attend(call, backend, **changed)

    assert faults_of(PLAIN) == ""
    monkeypatch.setattr(engines, "attention", wrong)
    assert f"gradient of {name}: error" in faults_of(PLAIN)


def test_a_wrong_entry_of_the_output_is_found(monkeypatch):
    attend = engines.attention

    def wrong(call, backend, **changes):
        out = attend(call, backend, **changes)
        return torch.index_put(out, [torch.tensor(0)] * out.dim(), out.flatten()[0] + 1e-5)

    monkeypatch.setattr(engines, "attention", wrong)
    assert "output: error" in faults_of(PLAIN)


def test_a_wrong_vital_is_found(monkeypatch):
    measure = engines.attention_with_vitals

    def wrong(call, backend, **changes):
        out, vitals = measure(call, backend, **changes)
        vitals.entropy.mul_(1 + 1e-4)
        return out, vitals

    monkeypatch.setattr(engines, "attention_with_vitals", wrong)
    assert "vitals: entropy" in faults_of(PLAIN)


def test_a_leak_of_hidden_numbers_is_found(monkeypatch):
    attend = engines.attention
    hidden = Case(queries=5, keys=5, is_causal=True, bad=("value", "nan", "hidden"))

    def leaks(call, backend, **changes):
        out = attend(call, backend, **changes)
        return out + 0 * call.tensors["value"].sum()

    assert faults_of(hidden) == ""
    monkeypatch.setattr(engines, "attention", leaks)
    found = faults_of(hidden)
    assert "output: [" in found
    assert "is nan" in found


def test_results_that_differ_from_call_to_call_are_found(monkeypatch):
    attend = engines.attention_with_vitals

    def drifts(call, backend, **changes):
        out, vitals = attend(call, backend, **changes)
        return out + 1e-9 * torch.randn(out.shape, generator=NUMBERS), vitals

    monkeypatch.setattr(engines, "attention_with_vitals", drifts)
    assert "repeated output: differs" in faults_of(PLAIN)


def test_a_crash_is_a_fault(monkeypatch):
    def crashes(*_, **__):
        raise ZeroDivisionError("no")

    monkeypatch.setattr(engines, "vitals", crashes)
    assert "raised: ZeroDivisionError: no" in faults_of(PLAIN)


def test_weights_that_are_dropped_too_often_are_found(monkeypatch):
    attend = engines.attention

    def drops_more(call, backend, **changes):
        weights = attend(call, backend, **changes)
        return weights * (torch.rand(weights.shape, generator=NUMBERS) < 0.8)

    case = Case(queries=31, keys=37, dropout=0.5)
    assert faults_of(case) == ""
    monkeypatch.setattr(engines, "attention", drops_more)
    assert "dropout: kept" in faults_of(case)


def test_calls_of_a_kind_are_one_to_triton():
    """What it compiles for repeats: types, layouts, and powers of two in every length."""
    for index in range(64, 640):
        kind, case = draw(5, index % 64), draw_of_kind(5, index, 64)
        same = {name: getattr(kind, name) for name in FIXED}
        assert replace(case, **same) == case
        assert math.gcd(case.queries, 16) == math.gcd(kind.queries, 16)
        assert math.gcd(case.keys, 16) == math.gcd(kind.keys, 16)
        assert (case.keys == 1) == (kind.keys == 1)
        assert (case.queries == case.keys) >= (kind.queries == kind.keys)


def test_calls_of_a_kind_differ():
    cases = [draw_of_kind(5, index, 64) for index in range(640)]
    assert len({str(case) for case in cases}) == len(cases)
    assert len({(case.queries, case.keys) for case in cases}) > 150
    assert len({(case.level, case.common, case.bad) for case in cases}) > 30


def test_a_sum_that_should_be_zero_is_looked_at_more_than_once():
    """All keys are alike, so a query's gradient is one sum of dS, and one look may be lucky."""
    case = Case(
        seed=994523986,
        query_lead=(2, 2, 2),
        key_lead=(2, 2, 2),
        value_lead=(2, 2, 2),
        queries=1,
        keys=17,
        dtype="bfloat16",
        value_size=100.0,
        layouts=("expand-3", "expand-2", "padded"),
    )
    call = make(case, "cpu")
    tensors = formula.on_cpu(call.tensors)
    grad = grad_of(case, formula.output(call, tensors).bfloat16()).double()
    looks = checks._Looks(
        call, 3, "triton", lambda **rounding: formula.gradients(call, tensors, grad, **rounding)
    )
    exact = formula.gradients(call, tensors, grad)["query"]
    errors = [(look - exact).abs().amax((-1, -2)) for look in looks.take(14, "query")]
    assert errors[0].min() < 0.01
    assert torch.stack(errors).amax(0).min() > 0.05
