"""Torch's own samples of scaled_dot_product_attention, both directions, against float64."""

from functools import cache

import oracle
import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

import scaledot
from conformance.agreement import assert_gradients_agree, assert_output_agrees, assert_vitals_agree

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
OPERATOR = next(op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")
NUMBER_OF_SAMPLES = 25


@cache
def samples(dtype):
    """(tensors, keywords) of every sample, gradients asked for."""
    found = list(OPERATOR.sample_inputs("cpu", dtype, requires_grad=True))
    assert len(found) == NUMBER_OF_SAMPLES
    return [((s.input, *s.args), dict(s.kwargs)) for s in found]


def attend_with_vitals(*tensors, **keywords):
    return scaledot.attention_with_vitals(*tensors, **keywords)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", range(NUMBER_OF_SAMPLES))
@pytest.mark.parametrize("function", [scaledot.attention, attend_with_vitals])
def test_sample_without_dropout(function, index, dtype):
    tensors, keywords = samples(dtype)[index]
    words = {name: x for name, x in keywords.items() if name != "dropout_p"}
    mask = words.pop("attn_mask", None)
    leaves = [
        t.detach().requires_grad_() for t in (*tensors, *([mask] if mask is not None else []))
    ]

    def attend(inputs, compute):
        query, key, value, *bias = inputs
        return oracle.attend(query, key, value, *bias, compute=compute, **words)

    query, key, value, *bias = leaves
    out = function(query, key, value, *bias, **words)
    assert_output_agrees(out, *tensors, attn_mask=mask, **words)
    reach = oracle.diagnose(query.detach(), key.detach(), attn_mask=mask, **words).output_reach
    assert_gradients_agree(out, leaves, attend, reach)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", range(NUMBER_OF_SAMPLES))
def test_vitals_of_sample(index, dtype):
    (query, key, _), keywords = samples(dtype)[index]
    words = {name: x for name, x in keywords.items() if name != "dropout_p"}
    expected = oracle.diagnose(query.detach(), key.detach(), **words)
    assert_vitals_agree(scaledot.vitals(query, key, **words, per_row=True), expected, per_row=True)


@pytest.mark.parametrize(
    "index", [i for i, (_, k) in enumerate(samples(torch.float64)) if k["dropout_p"]]
)
@pytest.mark.parametrize("function", [scaledot.attention, attend_with_vitals])
def test_sample_with_dropout_drops_and_rescales_weights(function, index):
    """The value has full rank, so the dropped weights can be read back from the output."""
    tensors, words = samples(torch.float64)[index]
    dropout_p, keywords = (
        words["dropout_p"],
        {name: x for name, x in words.items() if name != "dropout_p"},
    )
    out = function(*tensors, dropout_p=dropout_p, **keywords)
    query, key, value = (t.detach().requires_grad_() for t in tensors)
    identity = torch.eye(key.shape[-2]).double()
    weights = oracle.attend(query, key, identity, **keywords)
    used = out.detach() @ torch.linalg.pinv(value.detach())
    kept = (used / weights.detach().clamp(min=1e-300) > 0.5 / (1 - dropout_p)) & (
        weights.detach() > 0
    )
    torch.testing.assert_close(
        used, weights.detach() * kept / (1 - dropout_p), atol=1e-6, rtol=1e-6
    )
    seen = weights.detach() > 0
    share = kept[seen].double().mean().item()
    assert abs(share - (1 - dropout_p)) < 5 * (0.25 / seen.sum().item()) ** 0.5
    # The backward pass uses the same dropped weights.
    weight = torch.randn(out.shape).double()
    found = torch.autograd.grad((out * weight).sum(), tensors)
    exact = torch.autograd.grad(
        ((weights * kept / (1 - dropout_p)) @ value * weight).sum(), [query, key, value]
    )
    for got, want in zip(found, exact, strict=True):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)
