"""Two blocks' outputs into one, against the formula."""

import pytest
import torch

from scaledot.backends.cuda.combine import combine


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 3, 131, 40), (1, 1, 1, 128), (1, 2, 17, 3), (0, 2, 5, 8)])
def test_the_shares_weigh_the_outputs(device, dtype, shape):
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    whole = torch.randn(*shape[:2], shape[2] + 9, shape[3], device=device, dtype=exact)
    before = whole.clone()
    acc = whole[:, :, 4:-5]  # rows of a larger tensor
    other = torch.randn(*shape, device=device).to(dtype).transpose(0, 1).contiguous()
    other = other.transpose(0, 1)
    share, other_share = torch.rand(2, *shape[:3], device=device, dtype=exact)
    expected = acc * share.unsqueeze(-1) + other.to(exact) * other_share.unsqueeze(-1)
    combine(acc, share, other, other_share)
    tolerance = 1e-15 if dtype == torch.float64 else 2e-7
    torch.testing.assert_close(acc, expected, rtol=4 * tolerance, atol=4 * tolerance)
    assert torch.equal(whole[:, :, :4], before[:, :, :4])
    assert torch.equal(whole[:, :, -5:], before[:, :, -5:])
