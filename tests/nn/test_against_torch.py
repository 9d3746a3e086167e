"""MultiHeadAttention with nn.MultiheadAttention's state dict is nn.MultiheadAttention."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from scaledot.nn import MultiHeadAttention

BATCH, QUERIES, KEYS, HEADS, WIDTH = 3, 5, 7, 4, 11
D_MODEL = HEADS * WIDTH

CONFIGURATIONS = {
    "packed": {},
    "without bias": {"bias": False},
    "kdim": {"kdim": 13},
    "vdim": {"vdim": 17},
    "kdim, vdim": {"kdim": 13, "vdim": 17},
    "kdim, vdim, without bias": {"kdim": 13, "vdim": 17, "bias": False},
}


def twins(dtype=torch.float64, **options) -> Any:
    """torch's module with biases that matter, and ours with its state dict."""
    theirs = nn.MultiheadAttention(D_MODEL, HEADS, batch_first=True, dtype=dtype, **options)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    ours = MultiHeadAttention(D_MODEL, HEADS, dtype=dtype, **options)
    loaded = ours.load_state_dict(theirs.state_dict())
    assert not loaded.missing_keys
    assert not loaded.unexpected_keys
    return theirs, ours


def sources(module, dtype=torch.float64) -> Any:
    widths = (QUERIES, D_MODEL), (KEYS, module.kdim), (KEYS, module.vdim)
    return [torch.randn(BATCH, *shape, dtype=dtype, requires_grad=True) for shape in widths]


def masks():
    """The same masks in their words and in ours."""
    visible = torch.rand(QUERIES, KEYS) < 0.6
    visible[:, 2] = True
    lengths = torch.tensor([7, 3, 5])
    padding = torch.arange(KEYS) >= lengths[:, None]
    causal = torch.ones(QUERIES, KEYS, dtype=torch.bool).tril()
    bias = torch.randn(BATCH, HEADS, QUERIES, KEYS, dtype=torch.float64)
    return {
        "none": ({}, {}),
        "bool": ({"attn_mask": ~visible}, {"attn_mask": visible}),
        "bias": ({"attn_mask": bias[0, 0]}, {"attn_mask": bias[0, 0]}),
        "bias a head": ({"attn_mask": bias.flatten(0, 1)}, {"attn_mask": bias}),
        "causal": ({"attn_mask": ~causal, "is_causal": True}, {"is_causal": True}),
        "padding": ({"key_padding_mask": padding}, {"key_lengths": lengths}),
        "bool and padding": (
            {"attn_mask": ~visible, "key_padding_mask": padding},
            {"attn_mask": visible, "key_lengths": lengths},
        ),
    }


def assert_equal_to_rounding(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


def torch_gradients(theirs, *, like):
    """torch's gradients under our names: its packed ones cut in three by our own loading."""
    gradients = copy.deepcopy(like)
    named = dict(theirs.named_parameters())
    gradients.load_state_dict({name: parameter.grad for name, parameter in named.items()})
    return gradients.state_dict()


@pytest.mark.parametrize("mask", masks())
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_output_and_gradients_equal_torchs(name, mask):
    theirs, ours = twins(**CONFIGURATIONS[name])
    their_mask, our_mask = masks()[mask]
    our_inputs = sources(ours)
    their_inputs = copy.deepcopy(our_inputs)
    weights = torch.randn(BATCH, QUERIES, D_MODEL, dtype=torch.float64)
    expected, _ = theirs(*their_inputs, **their_mask)
    out = ours(*our_inputs, **our_mask)
    assert_equal_to_rounding(out, expected)
    (expected * weights).sum().backward()
    (out * weights).sum().backward()
    for our_input, their_input in zip(our_inputs, their_inputs, strict=True):
        assert_equal_to_rounding(our_input.grad, their_input.grad)
    their_gradients = torch_gradients(theirs, like=ours)
    for parameter_name, parameter in ours.named_parameters():
        assert_equal_to_rounding(parameter.grad, their_gradients[parameter_name])


@pytest.mark.parametrize("mask", ["none", "causal", "padding"])
def test_torchs_fast_path_gives_the_same(mask):
    theirs, ours = twins()
    theirs.eval()
    ours.eval()
    tokens = torch.randn(BATCH, KEYS, D_MODEL, dtype=torch.float64)
    lengths = torch.tensor([7, 3, 5])
    hidden = ~torch.ones(KEYS, KEYS, dtype=torch.bool).tril()
    their_mask, our_mask = {
        "none": ({}, {}),
        "causal": ({"attn_mask": hidden}, {"is_causal": True}),
        "padding": (
            {"key_padding_mask": torch.arange(KEYS) >= lengths[:, None]},
            {"key_lengths": lengths},
        ),
    }[mask]
    with torch.no_grad():
        expected, _ = theirs(tokens, tokens, tokens, need_weights=False, **their_mask)
        assert_equal_to_rounding(ours(tokens, **our_mask), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_in_small_types_is_at_most_twice_torchs(dtype):
    theirs, ours = twins(dtype)
    inputs = [tensor.detach() for tensor in sources(ours, dtype)]
    with torch.no_grad():
        found, same_type = ours(*inputs), theirs(*inputs)[0]
        exact, _ = copy.deepcopy(theirs).double()(*(tensor.double() for tensor in inputs))
    rounding = torch.finfo(dtype).eps * exact.abs().max()
    assert found.dtype == dtype
    error, their_error = (found - exact).abs().max(), (same_type - exact).abs().max()
    assert error <= 2 * (their_error + rounding)


def test_unbatched_tokens_equal_torchs():
    theirs, ours = twins()
    query, key, value = (tensor[0] for tensor in sources(ours))
    mask = torch.randn(HEADS, QUERIES, KEYS, dtype=torch.float64)
    expected, _ = theirs(query, key, value, attn_mask=mask)
    assert_equal_to_rounding(ours(query, key, value, attn_mask=mask), expected)
    assert ours.vitals.shape == (HEADS,)


def test_missing_key_and_value_are_query_and_key():
    theirs, ours = twins()
    tokens, memory, _ = sources(ours)
    assert_equal_to_rounding(ours(tokens), theirs(tokens, tokens, tokens)[0])
    assert_equal_to_rounding(ours(tokens, memory), theirs(tokens, memory, memory)[0])


def test_dropout_acts_in_training_only_and_keeps_the_mean():
    ours = twins()[1]
    tokens = torch.randn(1, KEYS, D_MODEL, dtype=torch.float64).expand(401, -1, -1)
    still = ours(tokens)
    ours.dropout = 0.3
    draws = ours(tokens)
    assert not torch.equal(draws[0], draws[1])
    spread = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - still[0]).abs() < 5 * spread).all()
    assert torch.equal(ours.eval()(tokens), still)
