"""Modules under torch.compile, torch.export, autocast, other types, and without data."""

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from scaledot.nn import AdditiveAttention, MultiHeadAttention

HEADS, WIDTH = 6, 5
D_MODEL = HEADS * WIDTH

MODULES: dict[str, Any] = {
    "dot": lambda **kind: MultiHeadAttention(D_MODEL, HEADS, **kind),
    "grouped": lambda **kind: MultiHeadAttention(
        D_MODEL, HEADS, 2, qk_norm=True, sinks=True, softcap=5.0, window=(3, None), **kind
    ),
    "cosine": lambda **kind: MultiHeadAttention(D_MODEL, HEADS, score="cosine", **kind),
    "additive": lambda **kind: MultiHeadAttention(D_MODEL, HEADS, score="additive", **kind),
    "Bahdanau": lambda **kind: AdditiveAttention(D_MODEL, D_MODEL, 7, **kind),
}


def inputs(dtype=torch.float32, number=7):
    return [torch.randn(2, number, D_MODEL, dtype=dtype) for _ in range(2)]


def gradients(module, out):
    return torch.autograd.grad(out.square().sum(), list(module.parameters()))


@pytest.mark.one_case
@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("name", MODULES)
def test_compiled_in_one_graph_equals_eager_with_gradients_and_vitals(name, fresh_dynamo):
    module = MODULES[name]()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for number in (7, 11):  # one graph for any number of tokens
        query, key = inputs(number=number)
        torch._dynamo.mark_dynamic(query, 1)
        torch._dynamo.mark_dynamic(key, 1)
        right = module(query, key, is_causal=True)
        expected = module.vitals
        out = compiled(query, key, is_causal=True)
        torch.testing.assert_close(out, right)
        assert module.vitals is not expected
        torch.testing.assert_close(module.vitals.entropy, expected.entropy)
        assert not module.vitals.entropy.requires_grad
        torch.testing.assert_close(gradients(module, out), gradients(module, right))


@pytest.mark.slow
@pytest.mark.compile
def test_compiled_module_stops_measuring_when_told(fresh_dynamo):
    module = MODULES["dot"]()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    query, key = inputs()
    compiled(query, key)
    assert module.vitals is not None
    module.measure = False
    compiled(query, key)
    assert module.vitals is None


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_exported_program_equals_the_module_and_leaves_it_alone(name, strict, fresh_dynamo):
    module = MODULES[name]().eval()
    query, key = inputs()
    program = torch.export.export(module, (query, key), strict=strict).module()
    assert module.vitals is None
    torch.testing.assert_close(program(query, key), module(query, key))


@pytest.mark.parametrize("name", MODULES)
def test_autocast_computes_in_bfloat16_and_learns_in_float32(name):
    module = MODULES[name]()
    query, key = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        out = module(query, key)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), module(query, key), rtol=0.03, atol=0.03)
    for parameter, gradient in zip(
        module.parameters(), gradients(module, out.float()), strict=True
    ):
        assert gradient.dtype == parameter.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODULES)
def test_modules_work_in_every_type(name, dtype):
    module = MODULES[name](dtype=dtype)
    query, key = inputs(dtype)
    out = module(query, key)
    assert out.dtype == dtype
    assert all(gradient.isfinite().all() for gradient in gradients(module, out))
    exact = module.double()(query.double(), key.double())
    rounding = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), exact, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("name", MODULES)
def test_modules_can_be_made_without_data(name):
    for module in (MODULES[name](device="meta"), _on_default_device(name, "meta")):
        assert all(parameter.is_meta for parameter in module.parameters())
        assert repr(module)
        module.to_empty(device="cpu").reset_parameters()
        query, key = inputs()
        assert module(query, key).isfinite().all()


@pytest.mark.parametrize("name", MODULES)
def test_modules_live_in_a_fake_mode(name):
    with FakeTensorMode():
        module = MODULES[name]()
        assert module(*inputs()).shape == (2, 7, D_MODEL)
        assert module.vitals.entropy.shape[0] == 2


def _on_default_device(name, device):
    with torch.device(device):
        return MODULES[name]()


def test_no_tokens_give_no_output():
    module = MODULES["dot"]()
    assert module(torch.randn(2, 0, D_MODEL)).shape == (2, 0, D_MODEL)
    nothing_to_see = module(torch.randn(2, 3, D_MODEL), torch.randn(2, 0, D_MODEL))
    torch.testing.assert_close(nothing_to_see, module.out_proj.bias.expand(2, 3, D_MODEL))
