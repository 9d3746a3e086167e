"""The CPU operators themselves: what they show of bad numbers, and what they give autograd."""

import math

import pytest
import torch

import scaledot


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
