"""The record of a call: whatever the caller's rank, four dimensions inside."""

import math
import warnings

import numpy as np
import pytest
import torch
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left

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


WHOLE_NUMBERS = [2.5, "8", math.nan, math.inf, [8], True, 3 + 0j, np.float64(3), torch.tensor(3)]


@pytest.mark.parametrize("num_heads", WHOLE_NUMBERS)
@pytest.mark.parametrize("scale", [None, "sqrt_dmodel"])
def test_num_heads_is_a_whole_number(num_heads, scale):
    query = torch.randn(1, 2, 5, 4)
    with pytest.raises(TypeError, match=r"num_heads=.* must be a whole number"):
        scaledot.attention(query, query, query, scale=scale, num_heads=num_heads)


def test_whole_numbers_of_numpy_are_whole_numbers():
    query = torch.randn(1, 2, 5, 4)
    expected = scaledot.attention(query, query, query, scale="sqrt_dmodel", num_heads=2)
    counted = scaledot.attention(query, query, query, scale="sqrt_dmodel", num_heads=np.int64(2))
    assert torch.equal(counted, expected)
    expected = scaledot.attention(query, query, query, window=(2, 0))
    assert torch.equal(
        scaledot.attention(query, query, query, window=(np.int64(2), np.int32(0))), expected
    )


NO_NUMBERS = [
    np.bool_(True),
    np.complex64(1),
    np.array([0.5]),
    np.array([0.5, 0.5]),
    torch.tensor(True),
    torch.tensor(0.5 + 0j),
    True,
    0.5 + 0j,
    "0.5",
    b"1",
    [0.5],
    object(),
]


@pytest.mark.parametrize("wrong", NO_NUMBERS)
@pytest.mark.parametrize("name", ["scale", "softcap", "dropout_p"])
def test_what_is_no_number_is_named(name, wrong):
    query = torch.randn(1, 2, 5, 4)
    with pytest.raises((TypeError, ValueError), match=rf"^{name}(=| is| must be)"):
        scaledot.attention(query, query, query, **{name: wrong})


@pytest.mark.parametrize("name", ["softcap", "dropout_p"])
@pytest.mark.parametrize("wrong", [torch.full((2, 2), 0.5), np.full((2, 2), 0.5)])
def test_a_wrong_tensor_is_named_by_its_shape_not_by_its_numbers(name, wrong):
    query = torch.randn(1, 2, 5, 4)
    with pytest.raises(TypeError, match=rf"^{name} must be a number, got .* of shape \[2, 2\]"):
        scaledot.attention(query, query, query, **{name: wrong})


@pytest.mark.parametrize("half", [np.float32(0.5), np.float64(0.5), np.array(0.5)])
@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_numbers_of_numpy_are_numbers(name, half):
    query = torch.randn(1, 2, 5, 4)
    expected = scaledot.attention(query, query, query, **{name: 0.5})
    assert torch.equal(scaledot.attention(query, query, query, **{name: half}), expected)


SIDES = [(math.nan, 0), (1.0, 0), (1 + 0j, 0), (True, 0), ("1", 0), (torch.tensor(1), 0)]


@pytest.mark.parametrize("window", [*SIDES, 5, "ab", {1: 2, 3: 4}, np.array([1, 0])])
def test_window_of_another_kind_is_named(window):
    query = torch.randn(1, 2, 5, 4)
    with pytest.raises(TypeError, match=r"^window="):
        scaledot.attention(query, query, query, window=window)


@pytest.mark.parametrize("name", ["is_causal", "enable_gqa"])
@pytest.mark.parametrize("wrong", [None, 2, "no", np.array([True, False]), torch.zeros(2)])
def test_flag_of_another_kind_is_named(name, wrong):
    query = torch.randn(1, 2, 5, 4)
    with pytest.raises(TypeError, match=rf"^{name}=.* must be True or False"):
        scaledot.attention(query, query, query, **{name: wrong})


def test_alignment_of_another_kind_is_named():
    query = torch.randn(1, 2, 5, 4)
    with pytest.raises(ValueError, match=r"^causal_align=.*use 'top_left' or 'bottom_right'"):
        scaledot.attention(query, query, query, causal_align=np.array(["top_left", "top_left"]))


@pytest.mark.parametrize("weight", [torch.zeros(0), torch.zeros(2, 0)])
def test_additive_scores_need_a_width(weight):
    query, value = torch.randn(1, 2, 5, 0), torch.randn(1, 2, 5, 4)
    with pytest.raises(ValueError, match=r"weight has width 0"):
        scaledot.additive_attention(query, query, value, weight)


# --- torch's CausalBias --------------------------------------------------------------------------


def causal_bias(variant, queries, keys) -> CausalBias:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of rows without keys; here they are zeros
        return variant(queries, keys)


VARIANTS = pytest.mark.parametrize("variant", [causal_upper_left, causal_lower_right])
LENGTHS = pytest.mark.parametrize(("queries", "keys"), [(5, 5), (5, 7), (7, 5), (1, 7), (70, 80)])


@VARIANTS
@LENGTHS
def test_causal_bias_means_its_triangle(variant, queries, keys):
    bias = causal_bias(variant, queries, keys)
    triangle = bias._materialize()
    query, key, value = (normal(2, 3, n, 4).requires_grad_() for n in (queries, keys, keys))
    expected = scaledot.attention(query, key, value, triangle)
    out, vitals = scaledot.attention_with_vitals(query, key, value, bias)
    alone = scaledot.vitals(query, key, bias)
    assert type(scaledot.attention(query, key, value, bias)) is torch.Tensor
    torch.testing.assert_close(scaledot.attention(query, key, value, bias), expected)
    torch.testing.assert_close(out, expected)
    measured = scaledot.vitals(query, key, triangle)
    for found in (vitals, alone):
        assert torch.equal(found.pairs, measured.pairs)
        torch.testing.assert_close(found.entropy, measured.entropy)
    leaves = (query, key, value)
    grads = torch.autograd.grad(scaledot.attention(*leaves, bias).square().sum(), leaves)
    torch.testing.assert_close(grads, torch.autograd.grad(expected.square().sum(), leaves))


@VARIANTS
@LENGTHS
def test_causal_bias_needs_no_mask_where_nothing_else_speaks_of_the_diagonal(
    variant, queries, keys
):
    query, key = normal(2, 3, queries, 4), normal(2, 3, keys, 4)
    problem = describe(query, key, key, causal_bias(variant, queries, keys))
    assert problem.mask is None
    assert problem.settings.right == 0
    lower = variant is causal_lower_right and queries != keys
    assert problem.settings.bottom_right == lower


@VARIANTS
@pytest.mark.parametrize(
    "options",
    [
        {"window": (2, 1)},
        {"window": (2, 1), "causal_align": "bottom_right"},
        {"causal_align": "bottom_right"},
        {"key_lengths": torch.tensor([3, 6])},
        {"key_lengths": torch.tensor([3, 6]), "window": (1, 1), "causal_align": "bottom_right"},
    ],
    ids=str,
)
def test_causal_bias_with_other_arguments_means_its_triangle_too(variant, options):
    bias = causal_bias(variant, 5, 7)
    query, key, value = normal(2, 3, 5, 4), normal(2, 3, 7, 4), normal(2, 3, 7, 4)
    expected = scaledot.attention(query, key, value, bias._materialize(), **options)
    torch.testing.assert_close(scaledot.attention(query, key, value, bias, **options), expected)


@VARIANTS
def test_causal_bias_of_other_lengths_and_beside_is_causal_is_named(variant):
    query = normal(2, 3, 5, 4)
    with pytest.raises(ValueError, match=r"CausalBias of shape \[4, 5\] but .* \[5, 5\]"):
        scaledot.attention(query, query, query, causal_bias(variant, 4, 5))
    with pytest.raises(ValueError, match=r"CausalBias should not be used with causal=True"):
        scaledot.attention(query, query, query, causal_bias(variant, 5, 5), is_causal=True)


@VARIANTS
def test_causal_bias_in_additive_scores_and_modules(variant):
    bias = causal_bias(variant, 5, 7)
    query, key, value, weight = (
        normal(2, 3, 5, 4),
        normal(2, 3, 7, 4),
        normal(2, 3, 7, 4),
        normal(4),
    )
    torch.testing.assert_close(
        scaledot.additive_attention(query, key, value, weight, bias),
        scaledot.additive_attention(query, key, value, weight, bias._materialize()),
    )
    for module in (
        scaledot.nn.MultiHeadAttention(4, 2),
        scaledot.nn.AdditiveAttention(4, 4, 3),
    ):
        rows, others = normal(2, 5, 4), normal(2, 7, 4)
        expected = module(rows, others, attn_mask=bias._materialize())
        torch.testing.assert_close(module(rows, others, attn_mask=bias), expected)


@VARIANTS
@pytest.mark.parametrize("keys", [5, 7])
def test_causal_bias_compiles(variant, keys):
    bias = causal_bias(variant, 5, keys)
    query, key = normal(2, 3, 5, 4).requires_grad_(), normal(2, 3, keys, 4)
    compiled = torch.compile(scaledot.attention, fullgraph=True, backend="aot_eager")
    out = compiled(query, key, key, bias)
    expected = scaledot.attention(query, key, key, bias._materialize())
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(
        torch.autograd.grad(out.square().sum(), query),
        torch.autograd.grad(expected.square().sum(), query),
    )
