"""Gradients where logits lie far from zero: as good as those of the plain formula in the same type.

The rows of the gradient of a softmax must sum to zero, or what all keys have in common comes back
multiplied by the size of the keys. One entry may be right by chance, so errors are compared as root
mean squares over several draws.
"""

import math

import oracle
import pytest
import torch

import scaledot

TRIANGLE = torch.ones(29, 29, dtype=torch.bool).tril()
HIDDEN = torch.zeros(29, 29).masked_fill(~TRIANGLE, -math.inf)

CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": TRIANGLE},
    "minus_inf": {"attn_mask": HIDDEN},
    "float": {"attn_mask": torch.linspace(-2, 3, 29 * 29).reshape(29, 29)},
    "window": {"window": (5, 3)},
    "softcap": {"softcap": 50.0},
    "scale": {"scale": torch.tensor([0.25, 0.125])},
    "sinks": {"sinks": torch.tensor([-0.5, 1.0])},
}


def common(size, *shape):
    """Rows that share a component, so that all logits are near -size."""
    query, key = torch.randn(shape), torch.randn(shape)
    direction = torch.nn.functional.normalize(torch.randn(shape[-1]), dim=0)
    step = math.sqrt(size * math.sqrt(shape[-1])) * direction
    return query + step, key - step


def spread(size, *shape):
    """Logits of both signs whose deviation is about size / 3: most rows see one key."""
    return (torch.randn(shape) * math.sqrt(size / 3) for _ in range(2))


def gradients(attend, leaves, weight, compute, words):
    leaves = [leaf.detach().to(compute).requires_grad_() for leaf in leaves]
    floats = {
        n: x for n, x in words.items() if isinstance(x, torch.Tensor) and x.is_floating_point()
    }
    extra = {n: x.detach().to(compute).requires_grad_() for n, x in floats.items()}
    out = attend(*leaves, **{**words, **extra})
    return torch.autograd.grad(out, [*leaves, *extra.values()], weight.to(compute))


def errors_of(draw, size, words, attend, keys=29, draws=6):
    """Root mean squares over the draws: of each gradient's error, of the plain formula's, and of
    one rounding of its largest entry."""
    errors = []
    for seed in range(draws):
        torch.manual_seed(seed)
        query, key = draw(size, 2, 2, max(keys, 29), 16)
        query, value = query[:, :, :29], torch.randn(2, 2, keys, 16)
        weight = torch.randn(2, 2, 29, 16)
        leaves = (query, key, value)

        def plain(*tensors, **rest):
            return oracle.attend(*tensors, compute=tensors[0].dtype, **rest)

        exact = gradients(plain, leaves, weight, torch.float64, words)
        same = gradients(plain, leaves, weight, torch.float32, words)
        found = gradients(attend, leaves, weight, torch.float32, words)
        rounding = [torch.finfo(torch.float32).eps * g.abs().amax() for g in exact]
        errors.append(
            [
                torch.stack([(f - e).square().mean(), (s - e).square().mean(), r.square()])
                for f, s, e, r in zip(found, same, exact, rounding, strict=True)
            ]
        )
    return torch.stack([torch.stack(each) for each in errors]).sum(0).sqrt()


def assert_as_good_as_the_plain_formula(*call, **sizes):
    for ours, formula, rounding in errors_of(*call, **sizes):
        bound = 3 * torch.hypot(formula, rounding)
        assert ours <= bound, f"error {ours:.3g}, of the plain formula {formula:.3g}"


def with_vitals(*tensors, **words):
    return scaledot.attention_with_vitals(*tensors, **words)[0]


@pytest.mark.parametrize("attend", [scaledot.attention, with_vitals])
@pytest.mark.parametrize("draw", [common, spread])
@pytest.mark.parametrize("size", [1e2, 2e4, 1e6])
@pytest.mark.parametrize("name", CALLS)
def test_gradients_far_from_zero(name, size, draw, attend):
    assert_as_good_as_the_plain_formula(draw, size, CALLS[name], attend)


@pytest.mark.parametrize("size", [10.0, 1e3, 1e5])
@pytest.mark.parametrize("name", ["plain", "scale", "sinks", "softcap"])
def test_gradients_far_from_zero_over_several_tiles_of_keys(name, size):
    assert_as_good_as_the_plain_formula(common, size, CALLS[name], with_vitals, keys=1061, draws=3)


@pytest.mark.parametrize("keys", [29, 1061])
@pytest.mark.parametrize("name", ["plain", "causal", "window"])
def test_gradients_far_from_zero_are_better_than_the_plain_formula(name, keys):
    """So that they are as good in each single call, not only in the mean of several."""
    for ours, formula, _ in errors_of(common, 2e4, CALLS[name], with_vitals, keys, 3):
        assert ours <= formula / 4, f"error {ours:.3g}, of the plain formula {formula:.3g}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_far_from_zero_in_16_bits(dtype):
    """Inputs that 16 bits hold exactly: the gradient's own rounding is all that may be added."""
    torch.manual_seed(3)
    query, key = (x.to(dtype) for x in common(1e3, 1, 2, 31, 16))
    value, weight = (torch.randn(1, 2, 31, 16).to(dtype) for _ in range(2))

    def plain(*tensors, **rest):
        return oracle.attend(*tensors, compute=tensors[0].dtype, **rest)

    words = {"attn_mask": TRIANGLE.new_ones(31, 31).tril()}
    exact = gradients(plain, (query, key, value), weight, torch.float64, words)
    single = gradients(plain, (query, key, value), weight, torch.float32, words)
    found = gradients(with_vitals, (query, key, value), weight, dtype, words)
    for f, s, e in zip(found, single, exact, strict=True):
        bound = 4 * (s - e).abs().amax() + 2 * torch.finfo(dtype).eps * e.abs().amax()
        assert (f - e).abs().amax() <= bound


def test_a_row_of_plain_logits_far_from_zero_does_not_go_to_the_kernel_of_torch():
    query, key = common(300.0, 1, 1, 17, 8)
    query.requires_grad_()
    choice = scaledot.backend_for(query, key, key, is_causal=True)
    assert choice.backend == "cpu"
    assert "far from 0" in choice.refused["torch"]
    assert scaledot.backend_for(query.detach(), key, key, is_causal=True).backend == "torch"
