"""`.vitals`: those of the last call, nobody's parameter, and off when asked."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import scaledot
from scaledot.nn import AdditiveAttention, MultiHeadAttention, measuring

HEADS, WIDTH = 3, 5


def make(**options) -> Any:
    return MultiHeadAttention(HEADS * WIDTH, HEADS, dtype=torch.float64, **options)


def tokens(batch=2, number=7):
    return torch.randn(batch, number, HEADS * WIDTH, dtype=torch.float64)


def heads(projection, given):
    return projection(given).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)


@pytest.mark.parametrize(
    ("options", "call"),
    [
        ({}, {}),
        ({"scale": "log_n", "softcap": 2.0}, {"is_causal": True}),
        ({"window": (2, 0)}, {"key_lengths": torch.tensor([7, 3])}),
    ],
)
def test_vitals_are_those_of_the_projected_query_and_key(options, call):
    module = make(**options)
    given = tokens()
    assert make().vitals is None
    module(given, **call)
    found = module.vitals.to_dict()
    q, k = heads(module.q_proj, given), heads(module.k_proj, given)
    expected = scaledot.vitals(q, k, **options, **call).to_dict()
    assert found.keys() == expected.keys()
    for name, numbers in expected.items():
        torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(numbers), msg=name)


def test_vitals_carry_no_graph_and_keep_no_activation():
    module = make()
    given = tokens().requires_grad_()
    module(given)
    saved_for_backward = weakref.ref(given)
    assert not module.vitals.max_logit.requires_grad
    del given
    gc.collect()
    assert saved_for_backward() is None
    assert not list(module.buffers())


def test_measuring_changes_nothing_of_output_and_gradients():
    module = make()
    given = tokens()
    outputs, gradients = [], []
    for measure in (True, False):
        module.measure = measure
        out = module(given)
        gradients.append(torch.autograd.grad(out.square().sum(), list(module.parameters())))
        outputs.append(out)
    torch.testing.assert_close(*outputs, rtol=1e-11, atol=1e-12)
    for measured, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(measured, plain, rtol=1e-11, atol=1e-12)


def test_a_call_without_measuring_leaves_no_stale_vitals():
    module = make()
    module(tokens())
    module.measure = False
    module(tokens())
    assert module.vitals is None
    assert "measure=False" in repr(module)
    assert make(measure=False).measure is False


def test_measuring_switches_a_whole_model_and_puts_it_back():
    model: Any = nn.ModuleList([make(), make(measure=False), AdditiveAttention(15, 15, 7)])
    with measuring(model, False):
        assert [module.measure for module in model] == [False, False, False]
    with measuring(model):
        assert [module.measure for module in model] == [True, True, True]
    with pytest.raises(ValueError, match="query has width"), measuring(model):
        model[0](torch.randn(1, 3, 7))
    assert [module.measure for module in model] == [True, False, True]


def test_per_sample_gradients_work_and_leave_no_vitals():
    module = make()
    parameters = dict(module.named_parameters())
    samples = tokens(batch=3)

    def loss(parameters, sample):
        return torch.func.functional_call(module, parameters, sample).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, samples)
    assert module.vitals is None
    for number, sample in enumerate(samples):
        right = torch.autograd.grad(module(sample).square().sum(), list(parameters.values()))
        for name, gradient in zip(parameters, right, strict=True):
            torch.testing.assert_close(found[name][number], gradient)
