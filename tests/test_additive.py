"""additive_attention: the plain formula weight . tanh(q + k), without its largest tensor."""

import math
import subprocess
import sys

import pytest
import torch

import scaledot
from scaledot import reference
from scaledot.measure import COUNT_FIELDS, FLOAT_FIELDS, ROW_FIELDS

HEADS = 2


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(20_17)


def tensors(queries=7, keys=13, width=5, value_width=3, dtype=torch.float64, grad=False):
    """query, key, value, weight (one a head)."""
    shapes = [(2, HEADS, queries, width), (2, HEADS, keys, width), (2, HEADS, keys, value_width)]
    made = [
        torch.randn(shape, dtype=torch.float64).to(dtype) for shape in (*shapes, (HEADS, width))
    ]
    return [tensor.requires_grad_(grad) for tensor in made]


def plain(query, key, value, weight):
    """Bahdanau's formula as the books write it."""
    bent = (query.unsqueeze(-2) + key.unsqueeze(-3)).tanh()  # [..., Q, K, width]
    return (bent @ weight[..., None, :, None]).squeeze(-1).softmax(-1) @ value


def gradients(out, inputs):
    numbers = torch.Generator().manual_seed(1)
    probe = torch.randn(out.shape, generator=numbers, dtype=torch.float64).to(out.dtype)
    return torch.autograd.grad((out * probe).sum(), inputs)


def assert_vitals_equal(vitals, expected, dtype=torch.float64, per_row=True):
    allowed = 64 * torch.finfo(dtype).eps
    for name in COUNT_FIELDS:
        assert torch.equal(getattr(vitals, name), getattr(expected, name)), name
    pairs = [(name, getattr(vitals, name), getattr(expected, name)) for name in FLOAT_FIELDS]
    if per_row:
        pairs += [
            (name, getattr(vitals.per_row, name), getattr(expected.per_row, name))
            for name in ROW_FIELDS
        ]
    for name, got, want in pairs:
        torch.testing.assert_close(
            got.double(),
            want,
            rtol=allowed,
            atol=allowed,
            equal_nan=True,
            msg=lambda m, name=name: f"{name}: {m}",
        )


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1), (7, 13, 5, 3), (63, 65, 17, 8), (64, 64, 8, 8), (65, 63, 3, 1)], ids=str
)
@pytest.mark.parametrize("shared_weight", [True, False])
def test_output_and_gradients_equal_the_plain_formula(sizes, shared_weight):
    *qkv, weight = tensors(*sizes, grad=True)
    if shared_weight:
        weight = weight[0].detach().requires_grad_()
    out = scaledot.additive_attention(*qkv, weight)
    expected = plain(*qkv, weight)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
    inputs = [*qkv, weight]
    for got, want in zip(gradients(out, inputs), gradients(expected, inputs), strict=True):
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


def test_many_key_tiles_equal_the_plain_formula():
    """1025 keys are more than a tile, and several pieces of rows."""
    *qkv, weight = tensors(131, 1025, 8, 4, grad=True)
    out, expected = scaledot.additive_attention(*qkv, weight), plain(*qkv, weight)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
    inputs = [*qkv, weight]
    for got, want in zip(gradients(out, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)


def test_gradcheck():
    inputs = tensors(3, 5, 2, 2, grad=True)
    assert torch.autograd.gradcheck(scaledot.additive_attention, inputs)


def test_gradcheck_with_mask_cap_sinks_and_scale():
    *qkv, weight = tensors(3, 5, 2, 2, grad=True)
    bias = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(HEADS, dtype=torch.float64, requires_grad=True)
    scale = torch.randn(HEADS, dtype=torch.float64, requires_grad=True)

    def call(query, key, value, weight, bias, sinks, scale):
        return scaledot.additive_attention(
            query, key, value, weight, bias, scale=scale, sinks=sinks, softcap=2.0, is_causal=True
        )

    assert torch.autograd.gradcheck(call, [*qkv, weight, bias, sinks, scale])


def masks(queries, keys):
    numbers = torch.Generator().manual_seed(3)
    seen = torch.rand(queries, keys, generator=numbers) < 0.7
    seen[1] = False  # a row that sees nothing
    bias = torch.randn(HEADS, queries, keys, generator=numbers, dtype=torch.float64)
    return {
        "plain": {},
        "bool_mask": {"attn_mask": seen},
        "bias": {"attn_mask": bias},
        "bias_minus_inf": {"attn_mask": bias.masked_fill(~seen, -math.inf)},
        "bias_lowest": {"attn_mask": bias.masked_fill(~seen, torch.finfo(torch.float64).min)},
        "causal": {"is_causal": True},
        "causal_bottom_right": {"is_causal": True, "causal_align": "bottom_right"},
        "window": {"window": (3, 1)},
        "window_bottom_right": {"window": (None, 2), "causal_align": "bottom_right"},
        "key_lengths": {"key_lengths": torch.tensor([keys - 3, 0])},
        "softcap": {"softcap": 0.7},
        "sinks": {"sinks": torch.tensor([0.3, -2.0], dtype=torch.float64)},
        "scale": {"scale": 0.3},
        "negative_scale": {"scale": -2.0},
        "scale_per_head": {"scale": torch.tensor([0.3, 2.0], dtype=torch.float64)},
        "log_n": {"scale": "log_n", "is_causal": True},
        "sqrt_dk": {"scale": "sqrt_dk"},
        "mask_and_causal": {"attn_mask": seen, "is_causal": True},
        "all": {
            "attn_mask": bias.masked_fill(~seen, -math.inf),
            "is_causal": True,
            "causal_align": "bottom_right",
            "window": (5, None),
            "softcap": 1.5,
            "sinks": torch.tensor([0.3, -2.0], dtype=torch.float64),
            "key_lengths": torch.tensor([keys, keys - 2]),
        },
    }


@pytest.mark.parametrize("sizes", [(7, 13), (65, 63), (5, 1031)], ids=str)
@pytest.mark.parametrize("name", masks(7, 13))
def test_every_argument_equals_the_reference(name, sizes):
    queries, keys = sizes
    *qkv, weight = tensors(queries, keys)
    keywords = masks(queries, keys)[name]
    expected, measured = reference.attention_with_vitals(
        *qkv, weight=weight, per_row=True, **keywords
    )
    out, vitals = scaledot.additive_attention_with_vitals(*qkv, weight, per_row=True, **keywords)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
    alone = scaledot.additive_attention(*qkv, weight, **keywords)
    torch.testing.assert_close(alone, expected, rtol=1e-12, atol=1e-13)
    assert_vitals_equal(vitals, measured)


@pytest.mark.parametrize("key_heads", [1, 2, 3])
def test_grouped_heads_equal_repeated_ones(key_heads):
    query, key, value = (
        torch.randn(2, heads, 7, 5, dtype=torch.float64, requires_grad=True)
        for heads in (6, key_heads, key_heads)
    )
    weight = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    out, vitals = scaledot.additive_attention_with_vitals(
        query, key, value, weight, enable_gqa=True
    )
    repeated = [t.repeat_interleave(6 // key_heads, 1) for t in (key, value)]
    expected = plain(query, *repeated, weight)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
    inputs = [query, key, value, weight]
    for got, want in zip(gradients(out, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
    measured = reference.attention_with_vitals(query, *repeated, weight=weight)[1]
    assert_vitals_equal(vitals, measured, per_row=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_types_are_summed_in_float32(dtype):
    *qkv, weight = tensors(63, 65, 17, 8, dtype=dtype, grad=True)
    out, vitals = scaledot.additive_attention_with_vitals(*qkv, weight, per_row=True)
    assert out.dtype == dtype
    expected, measured = reference.attention_with_vitals(*qkv, weight=weight, per_row=True)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=eps, atol=1e-5)
    assert vitals.entropy.dtype == torch.float32
    assert_vitals_equal(vitals, measured, torch.float32)
    inputs = [*qkv, weight]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    found, wanted = gradients(out, inputs), gradients(plain(*exact), exact)
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == dtype
        size = want.abs().max().item()
        torch.testing.assert_close(got.double(), want, rtol=4 * eps, atol=4 * eps * size)


def test_weight_of_another_rank_or_width_is_refused():
    query, key, value, _ = tensors()
    for shape in [(4,), (3, 5), (2, HEADS, 5)]:
        with pytest.raises(ValueError, match="weight has shape"):
            scaledot.additive_attention(query, key, value, torch.ones(shape, dtype=torch.float64))


def test_vitals_carry_no_graph():
    vitals = scaledot.additive_attention_with_vitals(*tensors(grad=True))[1]
    assert not any(getattr(vitals, name).requires_grad for name in FLOAT_FIELDS)


def test_nan_in_a_hidden_key_stays_there():
    query, key, value, weight = tensors()
    clean = scaledot.additive_attention(
        query, key, value, weight, key_lengths=torch.tensor([10, 10])
    )
    key[:, :, 10:], value[:, :, 10:] = math.nan, math.inf
    spoiled = scaledot.additive_attention(
        query, key, value, weight, key_lengths=torch.tensor([10, 10])
    )
    torch.testing.assert_close(spoiled, clean, rtol=1e-12, atol=1e-13)


SEEN = torch.ones(7, 13, dtype=torch.bool).tril(5)  # the last key by no row


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("which", ["query", "key", "both"])
def test_infinite_entries_have_the_gradients_of_the_formula(which, is_masked):
    """tanh is 1 there, or -1, and flat; of opposed ones that do not see each other, too."""
    mask = SEEN if is_masked else None
    query, key, value, weight = tensors()
    if which != "key":
        query[:, :, 2, 1] = math.inf
    if which != "query":
        key[:, :, 11, 1] = -math.inf if is_masked else math.inf  # row 2 does not see it then
    scale = torch.ones(HEADS, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (query, key, value, weight, scale)]
    out = scaledot.additive_attention(*leaves[:4], attn_mask=mask, scale=scale)
    seen = torch.ones(7, 13, dtype=torch.bool) if mask is None else mask
    total = (query.unsqueeze(-2) + key.unsqueeze(-3)).masked_fill(~seen[..., None], 0.0)
    scores = (total.tanh() * weight[:, None, None]).sum(-1) * scale[:, None, None]
    expected = scores.masked_fill(~seen, -math.inf).softmax(-1) @ value
    torch.testing.assert_close(out, expected)
    for got, want in zip(gradients(out, leaves), gradients(expected, leaves), strict=True):
        torch.testing.assert_close(got, want)


def test_nan_in_a_hidden_key_leaves_the_gradients_of_others_clean():
    query, key, value, weight = tensors()
    scale = torch.ones(HEADS, dtype=torch.float64)
    seen = torch.arange(13) < 10

    def found():
        leaves = [x.clone().requires_grad_() for x in (query, key, value, weight, scale)]
        out = scaledot.additive_attention(*leaves[:4], scale=leaves[4], attn_mask=seen)
        return gradients(out, leaves)

    clean = found()
    key[:, :, 10:], value[:, :, 10:] = math.nan, math.inf
    for got, want in zip(found(), clean, strict=True):
        torch.testing.assert_close(got, want)


# A process of its own: its peak is nobody else's. The short call before takes what torch allocates
# once.
SCRIPT = """
import resource
import torch, scaledot

TOKENS, WIDTH = 1024, 64
FULL = TOKENS * TOKENS * WIDTH * 4  # bytes of tanh(q + k) in float32

def run(tokens):
    inputs = [torch.randn(1, 1, tokens, WIDTH, requires_grad=True) for _ in range(3)]
    weight = torch.randn(WIDTH, requires_grad=True)
    out, vitals = scaledot.additive_attention_with_vitals(*inputs, weight)
    out.sum().backward()

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

run(128)
before = peak()
run(TOKENS)
print((peak() - before) / FULL)
"""


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss has other units there")
def test_forward_and_backward_stay_below_a_twentieth_of_the_full_tensor():
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) < 1 / 20
