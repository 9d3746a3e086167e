"""torch.nn.functional.scaled_dot_product_attention, however a model came by it."""

import sys
import threading
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from watched_models import assert_reads

import scaledot
from scaledot import Watch
from scaledot.watch.probes import sdpa


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bool_mask(queries, keys):
    mask = random(queries, keys, seed=9) > -0.3
    mask[2] = False  # a row that may see nothing
    return mask


CASES = {
    "plain": ((2, 3, 7, 5), (2, 3, 7, 5), {}),
    "causal": ((2, 3, 7, 5), (2, 3, 7, 5), {"is_causal": True}),
    "scaled": ((2, 3, 7, 5), (2, 3, 7, 5), {"scale": 0.7}),
    "grouped": ((2, 6, 7, 5), (2, 2, 7, 5), {"enable_gqa": True, "is_causal": True}),
    "cross": ((2, 3, 5, 4), (2, 3, 11, 4), {}),
    "hidden": ((2, 3, 7, 5), (2, 3, 11, 5), {"attn_mask": bool_mask(7, 11)}),
    "biased": ((2, 3, 7, 5), (2, 3, 11, 5), {"attn_mask": random(2, 1, 7, 11, seed=3)}),
    "one token": ((1, 2, 1, 3), (1, 2, 13, 3), {}),
    "no batch": ((3, 7, 5), (3, 7, 5), {"is_causal": True}),
    "two dimensions": ((7, 5), (7, 5), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_reading_equals_the_reference(case):
    query_shape, key_shape, keywords = CASES[case]
    query, key = 2 * random(*query_shape, seed=1), 2 * random(*key_shape, seed=2)
    with Watch(every=1, store=(readings := [])):
        F.scaled_dot_product_attention(query, key, key, **keywords)
    assert len(readings) == 1
    assert_reads(readings[0], query, key, **keywords)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_are_read_too(dtype):
    query, key = random(1, 2, 7, 4).to(dtype), random(1, 2, 7, 4, seed=1).to(dtype)
    with Watch(every=1, store=(readings := [])):
        F.scaled_dot_product_attention(query, key, key)
    assert_reads(readings[0], query, key)


def test_autocast_is_followed():
    query, key = random(1, 2, 7, 4), random(1, 2, 7, 4, seed=1)
    with Watch(every=1, store=(readings := [])), torch.autocast("cpu", torch.bfloat16):
        F.scaled_dot_product_attention(query, key, key)
    assert_reads(readings[0], query.bfloat16(), key.bfloat16())


def test_function_imported_by_name_before_the_watch_is_seen():
    script = types.ModuleType("a_script_of_a_user")
    script.sdpa = F.scaled_dot_product_attention
    before = script.sdpa
    sys.modules["a_script_of_a_user"] = script
    try:
        q = random(1, 2, 3, 4)
        with Watch(every=1, store=(readings := [])):
            script.sdpa(q, q, q)
            script.imported_meanwhile = F.scaled_dot_product_attention
        assert len(readings) == 1
        assert script.sdpa is before
        assert script.imported_meanwhile is before
    finally:
        del sys.modules["a_script_of_a_user"]


def test_function_kept_by_a_module_of_the_model_is_seen():
    class Kept(nn.Module):
        def __init__(self):
            super().__init__()
            self.attend = F.scaled_dot_product_attention

        def forward(self, x):
            return self.attend(x, x, x)

    model = nn.Sequential(Kept())
    before = model[0].attend
    with Watch(model, every=1, store=(readings := [])):
        model(random(1, 2, 3, 4))
    assert [reading.layer for reading in readings] == ["0"]
    assert model[0].attend is before


def test_keyword_arguments_in_any_order():
    q, k = random(1, 2, 3, 4), random(1, 2, 5, 4, seed=1)
    with Watch(every=1, store=(readings := [])):
        F.scaled_dot_product_attention(scale=0.3, value=k, key=k, query=q)
    assert_reads(readings[0], q, k, scale=0.3)


def test_other_threads_are_seen():
    q = random(1, 2, 3, 4)
    with Watch(every=1, store=(readings := [])):
        thread = threading.Thread(target=F.scaled_dot_product_attention, args=(q, q, q))
        thread.start()
        thread.join()
    assert len(readings) == 1


def test_errors_of_the_caller_are_torchs_own():
    q, k = random(1, 2, 3, 4), random(1, 2, 3, 5)
    with pytest.raises(RuntimeError) as plain:
        F.scaled_dot_product_attention(q, k, k)
    with Watch(every=1), pytest.raises(RuntimeError) as watched:
        F.scaled_dot_product_attention(q, k, k)
    assert str(watched.value) == str(plain.value)


def test_scripted_functions_still_compile():
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v)

    q = random(1, 2, 3, 4)
    expected = attend(q, q, q)
    with Watch(every=1), pytest.warns(DeprecationWarning, match="torch.jit.script"):
        scripted = torch.jit.script(attend)
    assert torch.equal(scripted(q, q, q), expected)


def test_symbolic_tracing_finds_torchs_function():
    class Attend(nn.Module):
        def forward(self, q):
            return F.scaled_dot_product_attention(q, q, q)

    with Watch(every=1):
        graph = torch.fx.symbolic_trace(Attend()).graph
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    assert targets == [F.scaled_dot_product_attention]


def test_what_cannot_be_measured_is_named_and_works():
    def attend(q):
        return F.scaled_dot_product_attention(q, q, q).sum()

    q = random(1, 2, 3, 4)
    expected = torch.func.grad(attend)(q)
    with Watch(every=1, store=(readings := [])) as watch:
        found = torch.func.grad(attend)(q)
    assert torch.equal(found, expected)
    assert not readings
    assert "not measured (it runs inside a transform of torch.func)" in str(watch.coverage())


@pytest.mark.parametrize("replace", [False, True])
def test_dispatch_modes_do_not_see_the_watch(replace):
    class Counting(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.called = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.called.append(str(function))
            return function(*args, **(kwargs or {}))

    q = random(1, 2, 8, 4)
    with Counting() as plain:
        if replace:
            scaledot.attention_with_vitals(q, q, q)
        else:
            F.scaled_dot_product_attention(q, q, q)
    with Watch(every=1, replace=replace, store=(readings := [])), Counting() as watched:
        F.scaled_dot_product_attention(q, q, q)
    assert readings
    assert watched.called == plain.called != []


def test_random_numbers_are_left_alone():
    q = random(1, 2, 7, 4)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with Watch(every=1, store=(readings := [])):
        F.scaled_dot_product_attention(q, q, q)
    assert readings
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.one_case
@pytest.mark.parametrize("shape", [(0, 3, 7, 5), (2, 0, 7, 5), (2, 3, 0, 5), (2, 3, 7, 0), (7, 0)])
@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("every", [1, None])
def test_calls_without_entries_are_served_as_ever(shape, scale, every):
    q = random(*shape)
    expected = F.scaled_dot_product_attention(q, q, q, scale=scale)
    with Watch(every=every, store=[]) as watch:
        for _ in range(4):
            assert torch.equal(F.scaled_dot_product_attention(q, q, q, scale=scale), expected)
            watch.step()


def test_a_fault_of_the_watch_is_named_and_the_call_is_served(monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("a fault of the watch")

    monkeypatch.setattr(sdpa, "Scores", broken)
    q = random(2, 3, 7, 5)
    expected = F.scaled_dot_product_attention(q, q, q)
    with Watch(every=1, store=[]) as watch:
        assert torch.equal(F.scaled_dot_product_attention(q, q, q), expected)
        watch.step()
    assert "a fault of the watch" in str(watch.coverage())
