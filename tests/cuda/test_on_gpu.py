"""What only a GPU can show: right, repeatable and within its own memory, in odd layouts too.

Without a GPU nothing of this runs, and the reason of the skip says so. The same calls run small and
interpreted in the other files of this folder.
"""

import oracle
import pytest
import torch

import scaledot

ON_GPU = torch.cuda.is_available()
HOPPER = ON_GPU and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not ON_GPU, reason="NOT TESTED: these need a GPU, there is none")
needs_hopper = pytest.mark.skipif(not HOPPER, reason="NOT TESTED: these need a Hopper GPU")
BACKENDS = ["triton", pytest.param("hopper", marks=needs_hopper)]
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def padded_rows(batch, heads, tokens, width, dtype, gap=5):
    """Of a buffer [batch, tokens, heads, width + gap]: strides that 16 bytes do not divide."""
    rows = torch.randn(batch, tokens, heads, width + gap, device="cuda").to(dtype)
    return rows[..., :width].transpose(1, 2)


def off_by_two_bytes(batch, heads, tokens, width, dtype):
    """Rows without gaps, the first of which begins one number behind an aligned address."""
    rows = torch.randn(batch * heads * tokens * width + 1, device="cuda").to(dtype)
    return rows[1:].view(batch, heads, tokens, width)


def plain_rows(batch, heads, tokens, width, dtype):
    return torch.randn(batch, heads, tokens, width, device="cuda").to(dtype)


LAYOUTS = [plain_rows, padded_rows, off_by_two_bytes]


def make(sizes, dtype, layout, seed=0):
    """query, key, value that ask for gradients, and a gradient of the output, none contiguous."""
    torch.manual_seed(seed)
    heads, groups, queries, keys, width, value_width = sizes
    tensors = (
        layout(1, heads, queries, width, dtype),
        layout(1, groups, keys, width, dtype),
        layout(1, groups, keys, value_width, dtype),
    )
    grad = layout(1, heads, queries, value_width, dtype)
    return [t.detach().requires_grad_() for t in tensors], grad


def exact_gradients(tensors, grad, **words):
    leaves = [t.detach().double().requires_grad_() for t in tensors]
    out = oracle.attend(*leaves, enable_gqa=True, **words)
    return out.detach(), torch.autograd.grad(out, leaves, grad.double())


def assert_gradients_agree(tensors, grad, backend="triton", **words):
    out = scaledot.attention(*tensors, enable_gqa=True, backend=backend, **words)
    found = torch.autograd.grad(out, tensors, grad)
    want, exact = exact_gradients(tensors, grad, **words)
    rounding = ROUNDING[out.dtype]
    for name, a, b in zip(("out", "dq", "dk", "dv"), (out, *found), (want, *exact), strict=True):
        bound = 16 * rounding * (b.abs().max().item() + 1)
        error = (a.double() - b).abs().max().item()
        assert error <= bound, f"{name}: {error:.3g} is above {bound:.3g}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_illegal_address_of_narrow_queries_and_odd_values(layout):
    tensors, grad = make((9, 3, 55, 80, 13, 59), torch.float16, layout)
    for _ in range(5):
        assert_gradients_agree(tensors, grad, scale=0.05)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_of_the_query_that_changed_with_each_call(layout):
    tensors, grad = make((9, 3, 51, 80, 11, 33), torch.bfloat16, layout)
    for _ in range(5):
        assert_gradients_agree(tensors, grad, is_causal=True)
