"""AdditiveAttention is Bahdanau's formula with its own projections."""

from typing import Any

import pytest
import torch

import scaledot
from scaledot.nn import AdditiveAttention

BATCH, QUERIES, KEYS, QUERY_DIM, KEY_DIM, WIDTH, VALUE_DIM = 3, 5, 7, 11, 13, 17, 19


def make(**options) -> Any:
    return AdditiveAttention(QUERY_DIM, KEY_DIM, WIDTH, dtype=torch.float64, **options)


def sources():
    shapes = (QUERIES, QUERY_DIM), (KEYS, KEY_DIM), (KEYS, VALUE_DIM)
    return [torch.randn(BATCH, *shape, dtype=torch.float64) for shape in shapes]


def plain(module, query, key, value, visible):
    inner = module.q_proj(query).unsqueeze(-2) + module.k_proj(key).unsqueeze(-3)
    scores = torch.tanh(inner) @ module.weight
    return torch.softmax(scores.masked_fill(~visible, -torch.inf), -1) @ value


def assert_equal_to_rounding(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("bias", [False, True])
def test_output_and_gradients_equal_the_plain_formula(bias):
    module = make(bias=bias)
    query, key, value = sources()
    visible = torch.ones(BATCH, QUERIES, KEYS, dtype=torch.bool)
    out, expected = module(query, key, value), plain(module, query, key, value, visible)
    assert_equal_to_rounding(out, expected)
    parameters = list(module.parameters())
    weights = torch.randn_like(out)
    found = torch.autograd.grad((out * weights).sum(), parameters)
    right = torch.autograd.grad((expected * weights).sum(), parameters)
    for one, other in zip(found, right, strict=True):
        assert_equal_to_rounding(one, other)


def test_masks_hide_keys():
    module = make()
    query, key, value = sources()
    visible = torch.rand(BATCH, QUERIES, KEYS) < 0.6
    visible[..., 0] = True
    lengths = torch.tensor([7, 2, 5])
    within = (torch.arange(KEYS) < lengths[:, None]).unsqueeze(1)
    causal = torch.ones(QUERIES, KEYS, dtype=torch.bool).tril()
    calls = [
        ({"attn_mask": visible}, visible),
        ({"attn_mask": visible[0]}, visible[0]),
        ({"key_lengths": lengths}, within),
        ({"attn_mask": visible, "key_lengths": lengths}, visible & within),
        ({"is_causal": True}, causal),
    ]
    for keywords, allowed in calls:
        out = module(query, key, value, **keywords)
        assert_equal_to_rounding(out, plain(module, query, key, value, allowed))


def test_without_value_the_key_is_the_value_and_one_entry_needs_no_batch():
    module = make()
    query, key, _ = sources()
    assert_equal_to_rounding(module(query, key), module(query, key, key))
    assert module.vitals.shape == (BATCH, 1)
    assert_equal_to_rounding(module(query[0], key[0]), module(query, key)[0])


def test_scores_stay_below_the_norm_of_the_weight_whatever_the_size():
    module = make()
    query, key, value = sources()
    module(1e6 * query, 1e6 * key, value)
    bound = module.weight.abs().sum()
    assert (module.vitals.max_logit <= bound).all()
    assert (module.vitals.logit_mean - module.vitals.logit_std >= -2 * bound).all()


def test_vitals_equal_the_functions():
    module = make()
    query, key, value = sources()
    module(query, key, value)
    q, k = module.q_proj(query).unsqueeze(1), module.k_proj(key).unsqueeze(1)
    expected = scaledot.additive_attention_with_vitals(q, k, value.unsqueeze(1), module.weight)[1]
    for name, number in expected.to_dict().items():
        assert module.vitals.to_dict()[name] == number, name


def test_scores_start_with_the_stated_deviation():
    module: Any = AdditiveAttention(256, 256, 128)
    with torch.no_grad():
        module(torch.randn(2, 97, 256), torch.randn(2, 101, 256))
    assert module.vitals.logit_std.mean().item() == pytest.approx(0.4, abs=0.08)


def test_dropout_acts_in_training_only():
    module = make(dropout=0.5)
    query, key, value = sources()
    assert not torch.equal(module(query, key, value), module(query, key, value))
    module.eval()
    assert torch.equal(module(query, key, value), module(query, key, value))


def test_repr_names_the_sizes():
    assert "query_dim=11, key_dim=13, width=17" in repr(make())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 13, 17), r"query_dim=0 must be at least 1"),
        ((11, -1, 17), r"key_dim=-1 must be at least 1"),
        ((11, 13, 0), r"width=0 must be at least 1"),
    ],
)
def test_wrong_sizes_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        AdditiveAttention(*arguments)


def test_wrong_widths_are_named():
    query, key, value = sources()
    with pytest.raises(ValueError, match=r"query has width 13 but this module was made for 11"):
        make()(key, query, value)
    with pytest.raises(ValueError, match=r"dropout=2.0 must lie in \[0, 1\]"):
        make(dropout=2.0)
