"""The CPU operators themselves: what they refuse, and what they show."""

import math

import pytest
import torch
from torch.autograd import forward_ad

import scaledot


@pytest.mark.parametrize("words", [{}, {"softcap": 5.0}, {"is_causal": True}], ids=str)
def test_second_derivative_is_refused_in_words(words):
    query, key, value = (torch.randn(1, 2, 7, 5, requires_grad=True) for _ in range(3))
    out = scaledot.attention(query, key, value, backend="cpu", **words)
    (grad,) = torch.autograd.grad(out.sin().sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize("sink", [math.nan, math.inf])
@pytest.mark.parametrize("words", [{}, {"softcap": 5.0}], ids=["compiled", "tiles"])
def test_sink_that_is_not_a_number_shows_in_its_head_alone(sink, words):
    call = [torch.randn(1, 2, 7, 5) for _ in range(3)]
    out, vitals = scaledot.attention_with_vitals(*call, sinks=torch.tensor([sink, 0.0]), **words)
    assert out[:, 0].isnan().all()
    assert torch.isfinite(out[:, 1]).all()
    assert vitals.nonfinite.tolist() == [[7, 0]]


def test_sink_of_minus_infinity_is_no_sink():
    call = [torch.randn(1, 2, 7, 5) for _ in range(3)]
    out, vitals = scaledot.attention_with_vitals(*call, sinks=torch.full((2,), -math.inf))
    torch.testing.assert_close(out, scaledot.attention(*call))
    assert vitals.off.tolist() == [[0.0, 0.0]]
    assert vitals.nonfinite.tolist() == [[0, 0]]


def test_only_the_output_passes_through_autograd():
    """For every further output of a node, backward makes a tensor of zeros."""
    call = [torch.randn(1, 2, 7, 5, requires_grad=True) for _ in range(3)]
    out, vitals = scaledot.attention_with_vitals(*call, per_row=True)
    assert len(out.grad_fn._input_metadata) == 1
    assert not vitals.entropy.requires_grad
    assert not vitals.per_row.lse.requires_grad


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch's own, once
@pytest.mark.parametrize("grad_enabled", [True, False])
def test_forward_mode_is_refused_and_not_forgotten(grad_enabled):
    query, key, value, tangent = torch.randn(4, 1, 2, 7, 5).unbind()
    with torch.set_grad_enabled(grad_enabled), forward_ad.dual_level():
        dual = forward_ad.make_dual(query, tangent)
        with pytest.raises(NotImplementedError, match="jvp"):
            scaledot.attention_with_vitals(dual, key, value)
        out, _ = scaledot.attention_with_vitals(query, key, value)  # no tangent, no harm
    torch.testing.assert_close(out, scaledot.attention_with_vitals(query, key, value)[0])
