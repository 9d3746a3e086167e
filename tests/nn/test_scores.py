"""What each score and each option computes, against the plain formula."""

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import scaledot
from scaledot.nn import MultiHeadAttention

BATCH, QUERIES, KEYS, HEADS, WIDTH = 2, 5, 7, 6, 5
D_MODEL = HEADS * WIDTH


def fresh(d_model=256, num_heads=4, **options) -> Any:
    return MultiHeadAttention(d_model, num_heads, **options)


def make(**options) -> Any:
    """Every parameter drawn anew, so that none is at a value that hides it."""
    module = fresh(D_MODEL, HEADS, dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.4)
    return module


def sources():
    query = torch.randn(BATCH, QUERIES, D_MODEL, dtype=torch.float64)
    return query, torch.randn(BATCH, KEYS, D_MODEL, dtype=torch.float64)


def split(module, tokens, projection, heads):
    return projection(tokens).unflatten(-1, (heads, WIDTH)).transpose(1, 2)


def projected(module, query, key):
    """q, k, v as [batch, heads, tokens, width], key heads repeated to query heads."""
    q = split(module, query, module.q_proj, HEADS)
    groups = module.num_kv_heads
    k = split(module, key, module.k_proj, groups).repeat_interleave(HEADS // groups, 1)
    v = split(module, key, module.v_proj, groups).repeat_interleave(HEADS // groups, 1)
    return q, k, v


def joined(module, weights, v):
    return module.out_proj((weights @ v).transpose(1, 2).flatten(2))


def assert_equal_to_rounding(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


def test_heads_computed_one_by_one_equal_the_module():
    module = make()
    query, key = sources()
    contexts = []
    for head in range(HEADS):
        own = slice(head * WIDTH, (head + 1) * WIDTH)
        q = query @ module.q_proj.weight[own].T + module.q_proj.bias[own]
        k = key @ module.k_proj.weight[own].T + module.k_proj.bias[own]
        v = key @ module.v_proj.weight[own].T + module.v_proj.bias[own]
        contexts.append(torch.softmax(q @ k.mT / math.sqrt(WIDTH), -1) @ v)
    assert_equal_to_rounding(module(query, key), module.out_proj(torch.cat(contexts, -1)))


@pytest.mark.parametrize("score", ["dot", "cosine", "additive"])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_grouped_heads_equal_repeated_ones(score, groups):
    grouped = make(num_kv_heads=groups, score=score)
    full = make(score=score)
    state = grouped.state_dict()
    for name in ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias"):
        heads = state[name].unflatten(0, (groups, WIDTH))
        state[name] = heads.repeat_interleave(HEADS // groups, 0).flatten(0, 1)
    full.load_state_dict(state)
    query, key = sources()
    assert_equal_to_rounding(grouped(query, key), full(query, key))
    assert_equal_to_rounding(grouped.vitals.entropy, full.vitals.entropy)
    assert_equal_to_rounding(grouped.vitals.k_rms, full.vitals.k_rms)


@pytest.mark.parametrize(
    ("scale", "number"),
    [
        (None, WIDTH**-0.5),
        ("sqrt_dk", WIDTH**-0.5),
        ("dk", 1 / WIDTH),
        ("none", 1.0),
        ("sqrt_dmodel", D_MODEL**-0.5),
        ("log_n", math.log(KEYS) / math.sqrt(WIDTH)),
        (0.3, 0.3),
    ],
)
def test_every_scale_rule_multiplies_the_dot_products(scale, number):
    module = make(scale=scale)
    query, key = sources()
    q, k, v = projected(module, query, key)
    expected = joined(module, torch.softmax(number * q @ k.mT, -1), v)
    assert_equal_to_rounding(module(query, key), expected)


def test_cosine_is_the_normalised_product_times_the_learned_temperature():
    module = make(score="cosine")
    query, key = sources()
    q, k, v = projected(module, query, key)
    cosines = F.cosine_similarity(q.unsqueeze(3), k.unsqueeze(2), dim=-1)
    weights = torch.softmax(module.log_temperature.exp()[:, None, None] * cosines, -1)
    assert_equal_to_rounding(module(query, key), joined(module, weights, v))
    module(query, key).sum().backward()
    assert module.log_temperature.grad.abs().min() > 0


def test_cosine_scores_are_bounded_by_the_temperature_whatever_the_size():
    module = make(score="cosine")
    query, key = sources()
    for size in (1e-3, 1.0, 1e6):
        module(size * query, size * key)
        assert (module.vitals.max_logit <= module.temperature * (1 + 1e-12)).all()
        assert (module.vitals.logit_std <= module.temperature).all()


def test_cosine_temperature_starts_at_sqrt_dk_and_brings_the_deviation_to_one():
    module = fresh(score="cosine")
    torch.testing.assert_close(module.temperature, torch.full((4,), 8.0))
    with torch.no_grad():
        module(torch.randn(2, 97, 256), torch.randn(2, 101, 256))
    assert module.vitals.logit_std.mean().item() == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize(
    ("scale", "temperature"),
    [("sqrt_dk", 8.0), ("dk", 1.0), ("none", 64.0), ("sqrt_dmodel", 4.0), (20, 20.0)],
)
def test_cosine_scale_is_where_the_temperature_starts(scale, temperature):
    module = fresh(score="cosine", scale=scale)
    torch.testing.assert_close(module.temperature, torch.full((4,), temperature))
    assert fresh().temperature is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_cosine_of_zero_vectors_is_zero_with_finite_gradients(dtype):
    module = fresh(D_MODEL, HEADS, score="cosine", bias=False, dtype=dtype)
    tokens = torch.randn(1, KEYS, D_MODEL, dtype=dtype)
    tokens[0, :3] = 0
    tokens.requires_grad_()
    out = module(tokens)
    mean = module.out_proj(module.v_proj(tokens)).mean(1)  # all scores equal: the mean of values
    rounding = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(out[:, 0], mean, rtol=rounding, atol=rounding)
    out.float().square().sum().backward()
    for tensor in (tokens, *module.parameters()):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()


def test_additive_equals_the_plain_formula_with_its_gradients():
    module = make(score="additive")
    query, key = sources()
    q, k, v = projected(module, query, key)
    bent = torch.tanh(q.unsqueeze(3) + k.unsqueeze(2))
    scores = (bent * module.additive_weight[:, None, None]).sum(-1)
    expected = joined(module, torch.softmax(scores, -1), v)
    out = module(query, key)
    assert_equal_to_rounding(out, expected)
    parameters = list(module.parameters())
    weights = torch.randn_like(out)
    found = torch.autograd.grad((out * weights).sum(), parameters)
    right = torch.autograd.grad((expected * weights).sum(), parameters)
    for one, other in zip(found, right, strict=True):
        assert_equal_to_rounding(one, other)


def test_qk_norm_divides_each_head_by_its_root_mean_square():
    module = make(qk_norm=True, num_kv_heads=2)
    query, key = sources()
    q, k, v = projected(module, query, key)
    q = q * (q.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * module.q_norm.weight
    k = k * (k.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * module.k_norm.weight
    expected = joined(module, torch.softmax(q @ k.mT / math.sqrt(WIDTH), -1), v)
    assert_equal_to_rounding(module(query, key), expected)


def test_sinks_start_at_zero_take_probability_and_learn():
    assert torch.equal(fresh(sinks=True).sinks, torch.zeros(4))
    module = make(sinks=True)
    query, key = sources()
    q, k, v = projected(module, query, key)
    scores = q @ k.mT / math.sqrt(WIDTH)
    sinks = module.sinks.view(1, HEADS, 1, 1).expand(BATCH, HEADS, QUERIES, 1)
    weights = torch.softmax(torch.cat([scores, sinks], -1), -1)
    assert_equal_to_rounding(module(query, key), joined(module, weights[..., :-1], v))
    assert_equal_to_rounding(module.vitals.off, weights[..., -1].mean(-1))
    module(query, key).sum().backward()
    assert module.sinks.grad.abs().min() > 0


def test_window_softcap_and_alignment_reach_the_function():
    module = make(window=(2, 1), softcap=0.7)
    query, key = sources()
    q, k, v = projected(module, query, key)
    for align in ("top_left", "bottom_right"):
        heads = scaledot.attention(q, k, v, window=(2, 1), softcap=0.7, causal_align=align)
        expected = module.out_proj(heads.transpose(1, 2).flatten(2))
        assert_equal_to_rounding(module(query, key, causal_align=align), expected)


@pytest.mark.parametrize(
    ("options", "deviation"),
    [
        ({}, 0.50),  # three projections drawn as one matrix
        ({"num_kv_heads": 2}, 0.50),
        ({"vdim": 257}, 1.00),
        ({"qk_norm": True}, 1.00),
        ({"score": "additive"}, 0.36),
    ],
)
def test_scores_start_with_the_stated_deviation(options, deviation):
    module = fresh(**options)
    query, key = (F.layer_norm(torch.randn(2, 101, 256), (256,)) for _ in range(2))
    with torch.no_grad():
        module(query, key, torch.randn(2, 101, module.vdim))
    assert module.vitals.logit_std.mean().item() == pytest.approx(deviation, abs=0.04)
