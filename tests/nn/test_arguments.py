"""Every mistake is named, with the way out; the repr tells what was built."""

import math
from typing import Any

import pytest
import torch

from scaledot.nn import MultiHeadAttention


def make(d_model: Any = 512, num_heads: Any = 8, **options: Any) -> Any:
    return MultiHeadAttention(d_model, num_heads, **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_heads": 7}, ValueError, r"d_model=512 is not divisible by num_heads=7; each head"),
        ({"num_kv_heads": 3}, ValueError, r"num_heads=8 is not divisible by num_kv_heads=3; each"),
        ({"num_heads": 0}, ValueError, r"num_heads=0 must be at least 1"),
        ({"num_kv_heads": 0.1}, TypeError, r"num_kv_heads=0.1 must be a whole number"),
        ({"kdim": 0}, ValueError, r"kdim=0 must be at least 1"),
        ({"score": "dott"}, ValueError, r"score='dott' is unknown; use one of dot, cosine, addit"),
        ({"scale": "sqrt"}, ValueError, r"scale='sqrt' is no scale rule; use one of sqrt_dk"),
        ({"scale": math.nan}, ValueError, r"scale=nan must be finite"),
        ({"scale": torch.ones(8)}, TypeError, r"scale must be a number or the name of a rule"),
        ({"score": "cosine", "scale": "log_n"}, ValueError, r"'log_n' is no temperature for .* 8"),
        ({"score": "cosine", "scale": -1.0}, ValueError, r"scale=-1.0 is no temperature"),
        ({"score": "cosine", "qk_norm": True}, ValueError, r"normalises twice; leave qk_norm out"),
        ({"dropout": 1.5}, ValueError, r"dropout=1.5 must lie in \[0, 1\]"),
        ({"dropout": math.nan}, ValueError, r"dropout=nan must lie in \[0, 1\]"),
        ({"softcap": -2.0}, ValueError, r"softcap=-2.0 must be a positive number"),
        ({"window": (3, -1)}, ValueError, r"window=\(3, -1\): a side cannot be negative"),
    ],
)
def test_wrong_constructor_arguments_are_named(options, error, message):
    with pytest.raises(error, match=message):
        make(**options)


def tensors(*shapes):
    return [torch.randn(shape) for shape in shapes]


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(2, 5, 16)], r"query has width 16 but this module was made for 15"),
        ([(5,)], r"query has shape \[5\]; it must be \[batch, tokens, width\] or"),
        ([(2, 5, 15)], r"key has width 15 but .* for 13 \(no key was given, so it is the query\)"),
        ([(2, 5, 15), (2, 7, 13)], r"value has width 13 but .* for 11 \(no value was given, so it"),
        ([(2, 5, 15), (7, 13), (7, 11)], r"key has shape \[7, 13\] but query \[2, 5, 15\]; give a"),
        ([(2, 5, 15), (3, 7, 13), (3, 7, 11)], r"batch dimensions of query, key and value do not"),
        ([(2, 5, 15), (2, 7, 13), (2, 6, 11)], r"each key needs exactly one value"),
    ],
)
def test_inputs_that_do_not_fit_are_named(shapes, message):
    with pytest.raises(ValueError, match=message):
        make(15, 3, kdim=13, vdim=11)(*tensors(*shapes))


def test_value_without_key_and_lists_are_refused():
    module = make(15, 3)
    with pytest.raises(ValueError, match=r"value was given without key; give both, or neither"):
        module(torch.randn(2, 5, 15), value=torch.randn(2, 5, 15))
    with pytest.raises(TypeError, match=r"query must be a tensor, got list"):
        module([[1.0] * 15])


def test_a_mask_that_may_be_a_head_s_or_a_batch_entry_s_is_refused():
    module = make(15, 3)
    with pytest.raises(ValueError, match=r"may mean one a batch entry or one a head; make it"):
        module(torch.randn(3, 5, 15), attn_mask=torch.ones(3, 5, 5, dtype=torch.bool))


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({}, "d_model=512, num_heads=8, d_k=64, scale=0.125 (sqrt_dk)"),
        ({"scale": "sqrt_dmodel"}, "d_k=64, scale=0.04419 (sqrt_dmodel)"),
        ({"scale": "log_n"}, "scale=0.125 ln(n) (log_n)"),
        ({"scale": 0.3}, "d_k=64, scale=0.3"),
        ({"num_kv_heads": 2}, "d_k=64, num_kv_heads=2"),
        ({"score": "cosine"}, "score='cosine', temperature=8 at the start, learned"),
        ({"score": "additive"}, "score='additive', scale=1 (none)"),
        (
            {"qk_norm": True, "dropout": 0.1, "window": (9, None), "softcap": 50.0, "sinks": True},
            "qk_norm=True, dropout=0.1, window=(9, None), softcap=50.0, sinks=True",
        ),
        ({"kdim": 13}, "kdim=13, vdim=512"),
    ],
)
def test_repr_tells_the_facts(options, facts):
    assert facts in repr(make(**options))
