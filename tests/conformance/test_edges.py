"""Calls at the edges: scores that vanish, windows that reach farther than integers, garbage behind
what is seen, numbers that only some types hold."""

import math
import os
import sys

import oracle
import pytest
import torch

import scaledot
from conformance.agreement import assert_output_agrees, assert_vitals_agree


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(20_17)


def normal(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype)


@pytest.mark.parametrize("size", [1e-11, 1e-12, 1e-16, 1e-22])
def test_a_dead_head_has_a_spread_of_next_to_nothing(size):
    """Squares of its deviations are below float32, their mean's square is not."""
    vitals = scaledot.vitals(normal(1, 4, 8, 8) * size, normal(1, 4, 50, 8) * size)
    assert (vitals.row_std <= 100 * size * size).all()
    assert (vitals.logit_std <= 100 * size * size).all()
    assert (vitals.nonfinite == 0).all()


@pytest.mark.parametrize("far", [sys.maxsize, 2**63, 2**64, 10**40])
@pytest.mark.parametrize("window", [(None, 1), (1, None), (1, 1)])
@pytest.mark.parametrize("words", [{}, {"softcap": 5.0}, {"is_causal": True}])
def test_a_window_may_reach_as_far_as_it_likes(far, window, words):
    query, key, value = normal(1, 2, 9, 4), normal(1, 2, 40, 4), normal(1, 2, 40, 4)
    sides = tuple(None if side is None else far for side in window)
    out, vitals = scaledot.attention_with_vitals(query, key, value, window=sides, **words)
    assert_output_agrees([out], query, key, value, **words)
    assert_vitals_agree(vitals, oracle.diagnose(query, key, **words))


@pytest.mark.parametrize("garbage", [1e6, 1e10, 1e14])
@pytest.mark.parametrize("words", [{}, {"softcap": 30.0}, {"dropout_p": 0.25}])
def test_what_no_row_sees_costs_no_digits(garbage, words):
    """A cache of keys that is not filled yet: finite, but anything."""
    query, key = normal(1, 2, 10, 8), normal(1, 2, 10, 8)
    filled = torch.cat([key, torch.full((1, 2, 50, 8), garbage)], 2)
    found = scaledot.attention_with_vitals(query, filled, filled, is_causal=True, **words)[1]
    expected = scaledot.attention_with_vitals(query, key, key, is_causal=True, **words)[1]
    for name in ("logit_mean", "logit_std", "row_std"):
        torch.testing.assert_close(
            getattr(found, name), getattr(expected, name), rtol=1e-5, atol=1e-6
        )


def test_a_broken_value_breaks_gradients_of_keys_that_its_row_sees():
    query, key, value = (normal(1, 1, 8, 4) for _ in range(3))
    value[0, 0, 5, 1] = math.nan
    leaves = [x.requires_grad_() for x in (query, key, value)]
    out = scaledot.attention(*leaves, window=(0, 0))[:, :, :5]
    grads = torch.autograd.grad(out.sum(), leaves)
    assert grads[0][0, 0].isnan().any(-1).tolist() == [False] * 5 + [True] + [False] * 2
    assert grads[1][0, 0].isnan().any(-1).tolist() == [False] * 5 + [True] + [False] * 2
    assert grads[2].isfinite().all()


@pytest.mark.parametrize("bias", [-1e39, torch.finfo(torch.float64).min])
def test_a_bias_that_float32_does_not_hold_hides_nothing(bias):
    """All keys alike: each row is the mean of the values."""
    query, key, value = (normal(1, 1, 6, 4) for _ in range(3))
    mask = torch.full((6, 6), bias, dtype=torch.float64)
    mask[:, 4:] = -math.inf
    out, vitals = scaledot.attention_with_vitals(query, key, value, attn_mask=mask)
    torch.testing.assert_close(out, value[:, :, :4].mean(2, keepdim=True).expand_as(out))
    assert vitals.nonfinite.tolist() == [[0]]


@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_whole_numbers_that_no_float_holds_are_refused(name):
    query = normal(1, 1, 3, 4)
    with pytest.raises(ValueError, match=f"{name} is a whole number too large"):
        scaledot.attention(query, query, query, **{name: 10**400})


@pytest.mark.parametrize("cap", [2e18, 1e39])
def test_a_cap_by_which_no_logit_can_be_divided_is_refused(cap):
    query = normal(1, 1, 3, 4)
    with pytest.raises(ValueError, match="leave it out for no cap"):
        scaledot.attention(query, query, query, softcap=cap)


def test_no_sequence_at_all():
    ends = torch.zeros(1, dtype=torch.int32)
    nothing = torch.zeros(0, 2, 4)
    out, vitals = scaledot.attention_varlen_with_vitals(nothing, nothing, nothing, ends, ends)
    assert out.shape == (0, 2, 4)
    assert vitals.shape == (0, 2)


@pytest.mark.parametrize("bias", [-1e9, torch.finfo(torch.float32).min / 4])
@pytest.mark.parametrize("sinks", [None, torch.full((2,), -1e9)], ids=["keys", "sink"])
def test_probabilities_far_from_zero_are_counted_from_the_largest(bias, sinks):
    """The bias swallows the scores: all keys alike, and the sink is one more of them, or all."""
    query, key, value = (normal(1, 2, 8, 4) for _ in range(3))
    mask = torch.full((8, 8), bias)
    words = {"sinks": sinks, "per_row": True}
    out, vitals = scaledot.attention_with_vitals(query, key, value, mask, **words)
    each = 1 / 8 if sinks is None else 1 / 9 if bias == -1e9 else 0.0
    torch.testing.assert_close(out, value.sum(2, keepdim=True).expand_as(out) * each)
    assert vitals.saturated.tolist() == [[0.0, 0.0]]
    for found in (vitals.top_p, vitals.sink, vitals.per_row.top_p):
        torch.testing.assert_close(found, torch.full_like(found, each))
    torch.testing.assert_close(vitals.off, torch.full_like(vitals.off, 1 - 8 * each))


@pytest.mark.parametrize("keys", [8, 1500])
@pytest.mark.parametrize("words", [{}, {"sinks": -1e9}, {"softcap": 5.0}, {"dropout_p": 1e-9}])
@pytest.mark.parametrize("bias", [-1e9, torch.finfo(torch.float32).min / 4])
def test_gradients_of_rows_far_from_zero(bias, words, keys):
    query, key, value = normal(1, 2, 8, 4), normal(1, 2, keys, 4), normal(1, 2, keys, 4)
    mask = torch.zeros(8, keys)
    mask[3:] = bias
    sinks = torch.full((2,), words["sinks"]) if "sinks" in words else torch.full((2,), -math.inf)
    leaves = [x.requires_grad_() for x in (query, key, value, mask, sinks)]
    words = {**words, "sinks": sinks}
    out = scaledot.attention(*leaves[:3], attn_mask=mask, **words)
    grads = torch.autograd.grad(out.square().sum(), leaves)
    words.pop("dropout_p", None)
    outcomes = plain_logits(query, key, mask, words.get("softcap"))
    outcomes = torch.cat([outcomes, sinks.view(2, 1, 1).expand(1, 2, 8, 1)], -1)
    plain = outcomes.softmax(-1)[..., :-1] @ value
    torch.testing.assert_close(out, plain)
    for found, expected in zip(
        grads, torch.autograd.grad(plain.square().sum(), leaves), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def plain_logits(query, key, mask, softcap):
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    return (softcap * (scores / softcap).tanh() if softcap else scores) + mask


@pytest.mark.parametrize("words", [{}, {"is_causal": True}, {"window": (2, 2)}], ids=str)
@pytest.mark.parametrize("size", [1e3, 1e6])
def test_weights_of_logits_far_from_zero_sum_to_one(size, words):
    query, key, value = (normal(1, 1, 8, 4) for _ in range(3))
    query[..., :2], key[..., :2] = size, size
    value.requires_grad_()
    out = scaledot.attention_with_vitals(query, key, value, scale=1.0, **words)[0]
    (grad,) = torch.autograd.grad(out.sum(), value)
    torch.testing.assert_close(grad.sum(2), torch.full((1, 1, 4), 8.0))


# A GPU sums squares in float32, so there the spread of larger ones is infinite.
BIASES = [-1e17, 1e18] if os.environ.get("SCALEDOT_TEST_DEVICE") == "cuda" else [-1e20, -1e30, 1e38]


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("words", [{}, {"softcap": 5.0}], ids=str)
def test_spread_of_a_bias_whose_square_is_large(bias, words):
    query, key, value = (normal(1, 2, 8, 4) for _ in range(3))
    mask = torch.zeros(8, 8)
    mask[:, 3] = bias
    vitals = scaledot.attention_with_vitals(query, key, value, mask, **words)[1]
    expected = torch.full((1, 2), math.sqrt(7) / 8 * abs(bias))
    torch.testing.assert_close(vitals.row_std, expected)
    torch.testing.assert_close(vitals.logit_std, expected)
    torch.testing.assert_close(vitals.logit_mean, torch.full((1, 2), bias / 8))
