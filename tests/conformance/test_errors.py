"""A wrong call raises one clear ValueError or TypeError that names the argument.

Each is a RuntimeError, too: that is what torch's own function raises.
"""

import math
import re

import pytest
import torch

import scaledot

Q, K, V = torch.randn(2, 6, 5, 8), torch.randn(2, 6, 7, 8), torch.randn(2, 6, 7, 4)


def attention(query=Q, key=K, value=V, **keywords):
    return scaledot.attention(query, key, value, **keywords)


def attention_with_vitals(query=Q, key=K, value=V, **keywords):
    return scaledot.attention_with_vitals(query, key, value, **keywords)


def vitals(query=Q, key=K, value=V, **keywords):
    if value is not V:
        pytest.skip("vitals takes no value")
    if "dropout_p" in keywords:
        pytest.skip("vitals knows no dropout")
    return scaledot.vitals(query, key, **keywords)


EVERY_FUNCTION = pytest.mark.parametrize("function", [attention, attention_with_vitals, vitals])

MISTAKES = {
    "width": ("key", {"key": torch.randn(2, 6, 7, 9)}),
    "keys_and_values": ("value", {"value": torch.randn(2, 6, 8, 4)}),
    "keys_and_fewer_values": ("value", {"value": torch.randn(2, 6, 6, 4)}),
    "batch": (
        "batch|query|key",
        {"key": torch.randn(3, 6, 7, 8), "value": torch.randn(3, 6, 7, 4)},
    ),
    "heads": ("key", {"key": torch.randn(2, 3, 7, 8), "value": torch.randn(2, 3, 7, 4)}),
    "value_heads": ("value", {"value": torch.randn(2, 3, 7, 4)}),
    "group": (
        "key",
        {"key": torch.randn(2, 4, 7, 8), "value": torch.randn(2, 4, 7, 4), "enable_gqa": True},
    ),
    "group_reversed": (
        "key",
        {"key": torch.randn(2, 12, 7, 8), "value": torch.randn(2, 12, 7, 4), "enable_gqa": True},
    ),
    "query_vector": ("query", {"query": torch.randn(8)}),
    "key_vector": ("key", {"key": torch.randn(8)}),
    "value_vector": ("value", {"value": torch.randn(8)}),
    "query_number": ("query", {"query": torch.randn(())}),
    "query_list": ("query", {"query": [[1.0, 2.0]]}),
    "key_none": ("key", {"key": None}),
    "value_none": ("value", {"value": None}),
    "key_type": ("key", {"key": K.double()}),
    "value_type": ("value", {"value": V.bfloat16()}),
    "query_type": ("query|key", {"query": Q.half()}),
    "integers": ("query", {"query": Q.long(), "key": K.long(), "value": V.long()}),
    "bools": ("query", {"query": Q > 0, "key": K > 0, "value": V > 0}),
    "complex": ("query", {"query": Q.cfloat(), "key": K.cfloat(), "value": V.cfloat()}),
    "key_device": ("key", {"key": K.to("meta")}),
    "value_device": ("value", {"value": V.to("meta")}),
    "mask_device": ("attn_mask", {"attn_mask": torch.ones(5, 7, device="meta")}),
    "sinks_device": ("sinks", {"sinks": torch.ones(6, device="meta")}),
    "scale_device": ("scale", {"scale": torch.ones(6, device="meta")}),
    "lengths_device": ("key_lengths", {"key_lengths": torch.tensor([1, 2], device="meta")}),
    "rule": ("scale", {"scale": "sqrt_d"}),
    "rule_empty": ("scale", {"scale": ""}),
    "rule_without_heads": ("num_heads", {"scale": "sqrt_dmodel"}),
    "num_heads_zero": ("num_heads", {"scale": "sqrt_dmodel", "num_heads": 0}),
    "num_heads_negative": ("num_heads", {"scale": "sqrt_dmodel", "num_heads": -3}),
    "scale_nan": ("scale", {"scale": math.nan}),
    "scale_inf": ("scale", {"scale": math.inf}),
    "scale_minus_inf": ("scale", {"scale": -math.inf}),
    "scale_list": ("scale", {"scale": [0.1] * 6}),
    "scale_shape": ("scale", {"scale": torch.ones(5)}),
    "scale_matrix": ("scale", {"scale": torch.ones(2, 6)}),
    "scale_integers": ("scale", {"scale": torch.ones(6, dtype=torch.int64)}),
    "softcap_zero": ("softcap", {"softcap": 0.0}),
    "softcap_negative": ("softcap", {"softcap": -1.0}),
    "softcap_nan": ("softcap", {"softcap": math.nan}),
    "softcap_inf": ("softcap", {"softcap": math.inf}),
    "softcap_text": ("softcap", {"softcap": "30"}),
    "dropout_negative": ("dropout_p", {"dropout_p": -0.1}),
    "dropout_above_one": ("dropout_p", {"dropout_p": 1.5}),
    "dropout_nan": ("dropout_p", {"dropout_p": math.nan}),
    "dropout_text": ("dropout_p", {"dropout_p": "0.1"}),
    "dropout_none": ("dropout_p", {"dropout_p": None}),
    "window_number": ("window", {"window": 3}),
    "window_three": ("window", {"window": (1, 2, 3)}),
    "window_one": ("window", {"window": (1,)}),
    "window_negative": ("window", {"window": (-1, 2)}),
    "window_float": ("window", {"window": (1.5, 2)}),
    "window_text": ("window", {"window": "12"}),
    "align": ("causal_align", {"causal_align": "upper_left", "is_causal": True}),
    "align_unused": ("causal_align", {"causal_align": "middle"}),
    "align_none": ("causal_align", {"causal_align": None}),
    "sinks_shape": ("sinks", {"sinks": torch.zeros(5)}),
    "sinks_matrix": ("sinks", {"sinks": torch.zeros(2, 6)}),
    "sinks_number": ("sinks", {"sinks": 0.3}),
    "sinks_scalar": ("sinks", {"sinks": torch.tensor(0.3)}),
    "sinks_integers": ("sinks", {"sinks": torch.zeros(6, dtype=torch.int64)}),
    "lengths_above": ("key_lengths", {"key_lengths": torch.tensor([3, 8])}),
    "lengths_negative": ("key_lengths", {"key_lengths": torch.tensor([-1, 3])}),
    "lengths_shape": ("key_lengths", {"key_lengths": torch.tensor([3, 3, 3])}),
    "lengths_matrix": ("key_lengths", {"key_lengths": torch.full((2, 6), 3)}),
    "lengths_scalar": ("key_lengths", {"key_lengths": torch.tensor(3)}),
    "lengths_float": ("key_lengths", {"key_lengths": torch.tensor([3.0, 2.0])}),
    "lengths_bool": ("key_lengths", {"key_lengths": torch.tensor([True, False])}),
    "lengths_list": ("key_lengths", {"key_lengths": [3, 2]}),
    "mask_keys": ("attn_mask", {"attn_mask": torch.ones(5, 6)}),
    "mask_queries": ("attn_mask", {"attn_mask": torch.ones(4, 7)}),
    "mask_heads": ("attn_mask", {"attn_mask": torch.ones(3, 5, 7)}),
    "mask_batch": ("attn_mask", {"attn_mask": torch.ones(3, 1, 5, 7)}),
    "mask_rank": ("attn_mask", {"attn_mask": torch.ones(2, 2, 6, 5, 7)}),
    "mask_empty": ("attn_mask", {"attn_mask": torch.ones(0)}),
    "mask_transposed": ("attn_mask", {"attn_mask": torch.ones(7, 5, dtype=torch.bool)}),
    "mask_integers": ("attn_mask", {"attn_mask": torch.ones(5, 7, dtype=torch.int64)}),
    "mask_bytes": ("attn_mask", {"attn_mask": torch.ones(5, 7, dtype=torch.uint8)}),
    "mask_complex": ("attn_mask", {"attn_mask": torch.ones(5, 7, dtype=torch.complex64)}),
    "mask_list": ("attn_mask", {"attn_mask": [[True] * 7] * 5}),
    "backend_unknown": ("backend", {"backend": "cuda_magic"}),
}


def assert_one_clear_error(about, run):
    with pytest.raises((ValueError, TypeError)) as caught:
        run()
    error = caught.value
    assert isinstance(error, ValueError) != isinstance(error, TypeError)
    assert isinstance(error, RuntimeError), "code that catches torch's errors catches ours, too"
    assert re.search(about, str(error)), f"{error!r} does not name {about}"
    assert error.__cause__ is None, "one error, not a chain"
    assert error.__context__ is None or error.__suppress_context__, "one error, not a chain"


@EVERY_FUNCTION
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_named(function, mistake):
    about, wrong = MISTAKES[mistake]
    if function is vitals and mistake in ("value_heads",):
        pytest.skip("vitals takes no value")
    if function is vitals and "value" in wrong and "key" in wrong:
        wrong = {name: x for name, x in wrong.items() if name != "value"}
    assert_one_clear_error(about, lambda: function(**wrong))


@EVERY_FUNCTION
@pytest.mark.parametrize("lead", [(), (6,)], ids=str)
def test_key_lengths_want_a_batch(function, lead):
    query, key, value = (torch.randn(*lead, *t.shape[-2:]) for t in (Q, K, V))
    words = {"key_lengths": torch.tensor([3]), **({} if function is vitals else {"value": value})}
    assert_one_clear_error("key_lengths", lambda: function(query, key, **words))


@EVERY_FUNCTION
def test_type_of_error_says_what_kind_of_mistake_it_was(function):
    for name in ("integers", "mask_integers", "lengths_float", "window_number", "sinks_number"):
        with pytest.raises(TypeError):
            function(
                **{
                    n: x
                    for n, x in MISTAKES[name][1].items()
                    if not (function is vitals and n == "value")
                }
            )
    for name in (
        "width",
        "heads",
        "rule",
        "softcap_zero",
        "lengths_above",
        "mask_keys",
        "backend_unknown",
    ):
        with pytest.raises(ValueError, match=r"key|scale|softcap|attn_mask|backend"):
            function(
                **{
                    n: x
                    for n, x in MISTAKES[name][1].items()
                    if not (function is vitals and n == "value")
                }
            )


def test_unknown_backend_lists_the_known_ones():
    with pytest.raises(ValueError, match="torch") as caught:
        attention(backend="cuda_magic")
    assert "cuda_magic" in str(caught.value)
    assert "cpu" in str(caught.value)


def test_forced_backend_that_cannot_serve_says_why():
    with pytest.raises(ValueError, match="softcap"):
        attention(softcap=2.0, backend="torch")


def test_missing_heads_argument_is_hinted_at():
    with pytest.raises(ValueError, match="enable_gqa"):
        attention(key=K[:, :3], value=V[:, :3])


def test_unknown_rule_lists_the_known_ones():
    with pytest.raises(ValueError, match="sqrt_dk") as caught:
        attention(scale="sqrt_d")
    assert "log_n" in str(caught.value)


def test_unknown_keyword_is_refused():
    with pytest.raises(TypeError):
        attention(window_size=(1, 1))
    with pytest.raises(TypeError):
        scaledot.vitals(Q, K, dropout_p=0.1)


def test_own_arguments_are_keywords_only():
    with pytest.raises(TypeError):
        scaledot.attention(Q, K, V, None, 0.0, False, None, False, (1, 1))


# --- packed --------------------------------------------------------------------------------------

PACKED = torch.randn(9, 6, 8), torch.randn(11, 6, 8), torch.randn(11, 6, 4)
ENDS_Q, ENDS_K = torch.tensor([0, 4, 9]), torch.tensor([0, 6, 11])

PACKED_MISTAKES = {
    "too_few_tokens": ("cu_seqlens_q", {"cu_seqlens_q": torch.tensor([0, 4, 8])}),
    "too_many_tokens": ("cu_seqlens_k", {"cu_seqlens_k": torch.tensor([0, 6, 12])}),
    "not_from_zero": ("cu_seqlens_q", {"cu_seqlens_q": torch.tensor([1, 4, 9])}),
    "decreasing": ("cu_seqlens_k", {"cu_seqlens_k": torch.tensor([0, 12, 11])}),
    "going_back": (
        "cu_seqlens_k",
        {"cu_seqlens_q": torch.tensor([0, 4, 5, 9]), "cu_seqlens_k": torch.tensor([0, 7, 6, 11])},
    ),
    "unequal_counts": ("cu_seqlens", {"cu_seqlens_q": torch.tensor([0, 2, 4, 9])}),
    "empty": ("cu_seqlens_q", {"cu_seqlens_q": torch.tensor([], dtype=torch.int64)}),
    "matrix": ("cu_seqlens_q", {"cu_seqlens_q": torch.tensor([[0, 4, 9]])}),
    "scalar": ("cu_seqlens_k", {"cu_seqlens_k": torch.tensor(11)}),
    "float": ("cu_seqlens_q", {"cu_seqlens_q": torch.tensor([0.0, 4.0, 9.0])}),
    "list": ("cu_seqlens_q", {"cu_seqlens_q": [0, 4, 9]}),
    "none": ("cu_seqlens_k", {"cu_seqlens_k": None}),
    "query_rank": ("query", {"query": torch.randn(1, 9, 6, 8)}),
    "key_rank": ("key", {"key": torch.randn(11, 8)}),
    "width": ("key", {"key": torch.randn(11, 6, 9)}),
    "heads": ("key", {"key": torch.randn(11, 3, 8), "value": torch.randn(11, 3, 4)}),
    "values": ("value", {"value": torch.randn(10, 6, 4)}),
    "types": ("key", {"key": torch.randn(11, 6, 8).double()}),
    "sinks": ("sinks", {"sinks": torch.zeros(9)}),
    "softcap": ("softcap", {"softcap": -1.0}),
    "scale": ("scale", {"scale": math.nan}),
    "rule": ("num_heads", {"scale": "sqrt_dmodel"}),
    "window": ("window", {"window": (1, -2)}),
    "align": ("causal_align", {"causal_align": "left"}),
    "backend": ("backend", {"backend": "cuda_magic"}),
    "dropout": ("dropout_p", {"dropout_p": 1.1}),
}


def packed(function, wrong):
    query, key, value = PACKED
    words = {
        "query": query,
        "key": key,
        "value": value,
        "cu_seqlens_q": ENDS_Q,
        "cu_seqlens_k": ENDS_K,
        **wrong,
    }
    if function is scaledot.vitals_varlen:
        words.pop("value")
    return function(**words)


PACKED_FUNCTIONS = [
    scaledot.attention_varlen,
    scaledot.attention_varlen_with_vitals,
    scaledot.vitals_varlen,
]


@pytest.mark.parametrize("function", PACKED_FUNCTIONS)
@pytest.mark.parametrize("mistake", PACKED_MISTAKES)
def test_packed_mistake_is_named(function, mistake):
    about, wrong = PACKED_MISTAKES[mistake]
    if function is scaledot.vitals_varlen and mistake in ("values", "dropout"):
        pytest.skip("vitals_varlen knows neither values nor dropout")
    assert_one_clear_error(about, lambda: packed(function, wrong))


@pytest.mark.parametrize("function", PACKED_FUNCTIONS)
def test_packed_call_without_mistake_works(function):
    packed(function, {})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_among_dense_ones_are_refused_in_words(layout):
    rows = [torch.randn(3, 2, 8), torch.randn(5, 2, 8)]
    nested, dense = torch.nested.nested_tensor(rows, layout=layout), torch.randn(2, 2, 5, 8)
    for call in (scaledot.attention, scaledot.attention_with_vitals):
        with pytest.raises(TypeError, match=r"key is a nested tensor; .*attention_varlen"):
            call(dense, nested, nested)
        with pytest.raises(TypeError, match=r"query is a nested tensor but key is not"):
            call(nested, dense, dense)
    with pytest.raises(TypeError, match=r"query is a nested tensor; "):
        scaledot.additive_attention(nested, nested, nested, torch.randn(8))


def test_sparse_tensors_are_refused_in_words():
    query, mask = torch.randn(3, 8), torch.eye(3).to_sparse()
    with pytest.raises(TypeError, match="key is a sparse tensor"):
        scaledot.attention(query, query.to_sparse(), query)
    with pytest.raises(TypeError, match="attn_mask is a sparse"):
        scaledot.attention(query, query, query, mask)
