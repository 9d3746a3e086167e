"""Second derivatives, forward mode and gradients of vitals of calls that a GPU kernel serves."""

import pytest
import torch
from torch.autograd import forward_ad

import scaledot

# Forward mode brings one of torch's own warnings with it.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


def leaves(device):
    return [torch.randn(1, 2, 5, 8, device=device, requires_grad=True) for _ in range(3)]


def attend(tensors, **words):
    torch.manual_seed(0)
    return scaledot.attention(*tensors, is_causal=True, backend="triton", **words)


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_the_formula_drops_what_the_kernel_drops(device, dropout_p):
    tensors = leaves(device)
    out = attend(tensors, dropout_p=dropout_p)
    with forward_ad.dual_level():
        composed = attend(tensors, dropout_p=dropout_p)
    torch.testing.assert_close(out, composed, rtol=1e-5, atol=1e-5)

    def second(out):
        grads = torch.autograd.grad(out.sin().sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), tensors)

    torch.testing.assert_close(second(out), second(composed), rtol=1e-4, atol=1e-4)


def test_vitals_have_the_gradients_of_the_formula(device):
    query, key, value = leaves(device)

    def penalty(vitals):
        return torch.autograd.grad(vitals.entropy.sum() + vitals.passes.sum(), (query, key))

    with scaledot.measure.differentiable():
        measured = scaledot.attention_with_vitals(query, key, value, backend="triton")[1]
    with forward_ad.dual_level():
        composed = scaledot.vitals(query, key, backend="triton")
    torch.testing.assert_close(penalty(measured), penalty(composed), rtol=1e-5, atol=1e-6)
