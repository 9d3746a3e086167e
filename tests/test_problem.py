"""The record of a call: whatever the caller's rank, four dimensions inside."""

import numpy as np
import pytest
import torch

import scaledot
from scaledot.problem import Problem, Settings, describe


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(20_17)


def normal(*shape):
    return torch.randn(*shape)


def described(query, key, value, **keywords) -> Problem:
    return describe(normal(*query), normal(*key), normal(*value), **keywords)


@pytest.mark.parametrize(
    ("lead", "folded"),
    [
        ((), (1, 1)),
        ((3,), (1, 3)),
        ((2, 3), (2, 3)),
        ((5, 2, 3), (10, 3)),
        ((2, 5, 1, 3), (10, 3)),
        ((0, 3), (0, 3)),
        ((2, 0), (2, 0)),
    ],
)
def test_leading_dimensions_fold_into_batch_and_heads(lead, folded):
    problem = described((*lead, 7, 5), (*lead, 11, 5), (*lead, 11, 2))
    assert problem.query.shape == (*folded, 7, 5)
    assert problem.key.shape == (*folded, 11, 5)
    assert problem.value is not None
    assert problem.value.shape == (*folded, 11, 2)
    assert problem.lead == lead


def test_folding_keeps_the_order_of_batch_entries():
    query, key, value = (normal(5, 2, 3, 7, 4) for _ in range(3))
    problem = describe(query, key, value)
    assert torch.equal(problem.query.view(query.shape), query)


def test_four_dimensions_are_taken_as_they_are():
    query, key, value = normal(2, 3, 7, 5), normal(2, 3, 11, 5), normal(2, 3, 11, 2)
    problem = describe(query, key, value)
    assert problem.query is query
    assert problem.key is key
    assert problem.value is value


def test_leading_dimensions_broadcast_without_a_copy():
    key = normal(1, 3, 11, 5)
    problem = describe(normal(2, 3, 7, 5), key, normal(11, 5))
    assert problem.key.shape == (2, 3, 11, 5)
    assert problem.key.data_ptr() == key.data_ptr()
    assert problem.key.stride(0) == 0
    assert problem.value is not None
    assert problem.value.shape == (2, 3, 11, 5)


def test_grouped_heads_stay_grouped():
    problem = described((2, 6, 7, 5), (2, 3, 11, 5), (2, 3, 11, 5), enable_gqa=True)
    assert (problem.query.shape[1], problem.key.shape[1]) == (6, 3)
    assert problem.lead == (2, 6)


def test_key_and_value_with_other_numbers_of_heads_are_repeated_to_the_querys():
    key, value = normal(2, 3, 11, 5), normal(2, 2, 11, 5)
    problem = describe(normal(2, 6, 7, 5), key, value, enable_gqa=True)
    assert torch.equal(problem.key, key.repeat_interleave(2, 1))
    assert problem.value is not None
    assert torch.equal(problem.value, value.repeat_interleave(3, 1))


@pytest.mark.parametrize(
    ("shape", "kept"),
    [
        ((11,), (1, 1, 1, 11)),
        ((7, 1), (1, 1, 7, 1)),
        ((3, 7, 11), (1, 3, 7, 11)),
        ((2, 1, 1, 11), (2, 1, 1, 11)),
    ],
)
def test_mask_gets_four_dimensions_and_is_not_expanded(shape, kept):
    mask = torch.ones(shape, dtype=torch.bool)
    problem = described((2, 3, 7, 5), (2, 3, 11, 5), (2, 3, 11, 5), attn_mask=mask)
    assert problem.mask is not None
    assert problem.mask.shape == kept
    assert problem.mask.data_ptr() == mask.data_ptr()


@pytest.mark.parametrize(
    ("shape", "kept"),
    [
        ((5, 2, 3, 7, 11), (10, 3, 7, 11)),
        ((5, 1, 1, 7, 11), (10, 1, 7, 11)),
        ((2, 3, 7, 11), (10, 3, 7, 11)),
        ((1, 1, 3, 1, 11), (1, 3, 1, 11)),
        ((7, 11), (1, 1, 7, 11)),
    ],
)
def test_mask_folds_with_several_batch_dimensions(shape, kept):
    mask = normal(*shape)
    problem = described((5, 2, 3, 7, 4), (5, 2, 3, 11, 4), (5, 2, 3, 11, 4), attn_mask=mask)
    assert problem.mask is not None
    assert problem.mask.shape == kept
    wanted = mask.expand(5, 2, 3, 7, 11).reshape(10, 3, 7, 11)
    assert torch.equal(problem.mask.expand(10, 3, 7, 11), wanted)


def test_packed_tokens_become_one_batch_entry():
    ends = torch.tensor([0, 2, 7]), torch.tensor([0, 4, 11])
    problem = described((7, 3, 5), (11, 3, 5), (11, 3, 2), cu_seqlens=ends)
    assert problem.query.shape == (1, 3, 7, 5)
    assert problem.key.shape == (1, 3, 11, 5)
    assert problem.lead == (2, 3)


def test_settings_of_a_plain_call():
    problem = described((7, 4), (7, 4), (7, 4))
    assert problem.settings == Settings(0.5, False, 0.0, 0.0, None, None, False)
    assert problem[3:10] == (None,) * 7
    assert not problem.wants_vitals


@pytest.mark.parametrize(
    ("keywords", "ends"),
    [
        ({}, (None, None)),
        ({"is_causal": True}, (None, 0)),
        ({"window": (3, 2)}, (3, 2)),
        ({"window": (3, 2), "is_causal": True}, (3, 0)),
        ({"window": (None, 2)}, (None, 2)),
        ({"window": (0, None), "is_causal": True}, (0, 0)),
    ],
)
def test_causality_is_a_window_without_keys_to_the_right(keywords, ends):
    settings = described((7, 4), (7, 4), (7, 4), **keywords).settings
    assert (settings.left, settings.right) == ends


def test_scale_of_one_value_is_one_a_head_and_leaves_the_number_at_one():
    problem = described((2, 3, 7, 4), (2, 3, 7, 4), (2, 3, 7, 4), scale=torch.tensor(0.3))
    assert problem.settings.scale == 1.0
    assert problem.head_scale is not None
    assert torch.equal(problem.head_scale, torch.full((1, 3), 0.3))


def test_additive_score_has_scale_one_and_a_weight_for_each_head():
    weight = normal(4)
    problem = described((2, 3, 7, 4), (2, 3, 7, 4), (2, 3, 7, 4), weight=weight)
    assert problem.settings.scale == 1.0
    assert problem.weight is not None
    assert torch.equal(problem.weight, weight.expand(1, 3, 4))


def test_key_lengths_of_several_batch_dimensions_are_flattened():
    lengths = torch.arange(6).view(2, 3)
    problem = described((2, 3, 5, 7, 4), (2, 3, 5, 7, 4), (2, 3, 5, 7, 4), key_lengths=lengths)
    assert problem.key_lengths is not None
    assert problem.key_lengths.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_wrong_argument_is_named_with_what_to_give_instead():
    query = torch.randn(1, 2, 5, 4)
    with pytest.raises(TypeError, match=r"is_causal='no' must be True or False"):
        scaledot.attention(query, query, query, is_causal="no")
    with pytest.raises(TypeError, match=r"scale must be a number, the name of a rule \(sqrt_dk"):
        scaledot.attention(query, query, query, scale=[1.0])
    with pytest.raises(TypeError, match=r"backend_for\(\) got an unexpected keyword 'softcp'"):
        scaledot.backend_for(query, query, query, softcp=1.0)
    with pytest.raises(ValueError, match=r"a value has no place in vitals\(query, key"):
        scaledot.vitals(query, query, query)
    narrow = query.to(torch.float8_e4m3fn)
    with pytest.raises(TypeError, match=r"float8_e4m3fn; attention takes float64"):
        scaledot.attention(narrow, narrow, narrow)


@pytest.mark.parametrize("causal", [1, np.True_, torch.tensor(True)])
def test_is_causal_may_be_anything_that_is_true_or_false(causal):
    query = torch.randn(1, 2, 5, 4)
    expected = scaledot.attention(query, query, query, is_causal=True)
    assert torch.allclose(scaledot.attention(query, query, query, is_causal=causal), expected)
