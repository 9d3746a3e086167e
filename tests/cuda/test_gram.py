"""Moments of the logits from Gram matrices, against the logits themselves in float64."""

import math

import pytest
import torch

from scaledot.backends.cuda import gram


def in_full(query, key, scale):
    """What `head_moments` should say, from the whole matrix of logits."""
    repeats = query.shape[1] // key.shape[1]
    query, key = query.double(), key.double().repeat_interleave(repeats, 1)
    z = scale * query @ key.mT
    mean = z.mean((-1, -2))
    m2 = (z - mean[..., None, None]).square().sum((-1, -2))
    rows = z.var(-1, unbiased=False).sum(-1)
    return torch.stack([mean, m2, rows, *(t.square().sum((-1, -2)) for t in (query, key))])


def tolerance(device, dtype):
    """The interpreter cuts numbers off where it narrows them to bfloat16, a GPU rounds."""
    return 1.5e-2 if device == "cpu" and dtype == torch.bfloat16 else 2e-3


SHAPES = [(2, 4, 2, 300, 517, 16), (1, 2, 2, 70, 33, 24), (1, 1, 1, 600, 700, 128)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("batch", "heads", "groups", "queries", "keys", "width"), SHAPES)
def test_moments_are_those_of_the_logits(device, dtype, batch, heads, groups, queries, keys, width):
    query = torch.randn(batch, heads, queries, width, device=device).to(dtype)
    key = torch.randn(batch, groups, keys, width, device=device).to(dtype)
    scale = width**-0.5
    found = gram.head_moments(query, key, scale, None)
    exact = in_full(query, key, scale)
    spread = exact[1].div(queries * keys).sqrt().max().item()
    torch.testing.assert_close(found[0].double(), exact[0], rtol=0.0, atol=1e-4 * spread)
    torch.testing.assert_close(
        found[1:5].double(), exact[1:], rtol=tolerance(device, dtype), atol=0.0
    )


def test_a_common_part_of_the_keys_costs_no_digits(device):
    query = torch.randn(1, 2, 200, 32, device=device, dtype=torch.bfloat16)
    common = 40.0 * torch.randn(1, 2, 1, 32, device=device)
    key = (torch.randn(1, 2, 300, 32, device=device) + common).bfloat16()
    found = gram.head_moments(query, key, 1.0, None)
    exact = in_full(query, key, 1.0)
    assert (exact[0].abs() + exact[1].div(200 * 300).sqrt()).max() > 30  # it dominates
    torch.testing.assert_close(
        found[2].double(), exact[2], rtol=tolerance(device, torch.bfloat16), atol=0.0
    )


def test_rows_that_are_not_finite_are_left_out(device):
    query = torch.randn(1, 1, 150, 16, device=device, dtype=torch.bfloat16)
    key = torch.randn(1, 1, 90, 16, device=device, dtype=torch.bfloat16)
    clean = gram.head_moments(torch.cat([query[:, :, :70], query[:, :, 71:]], 2), key, 0.25, None)
    query[0, 0, 70, 3] = math.nan
    found = gram.head_moments(query, key, 0.25, None)
    assert found[5].item() == clean[5].item() == 149
    torch.testing.assert_close(found, clean, rtol=1e-3, atol=1e-3)


def test_each_head_has_its_own_scale(device):
    query, key = (torch.randn(2, 3, 40, 16, device=device) for _ in range(2))
    scale = torch.tensor([[0.5, 7.0, -2.0, 7.0, 0.0, 7.0]], device=device)[:, ::2]
    found = gram.head_moments(query, key, 1.0, scale)
    plain = gram.head_moments(query, key, 1.0, None)
    torch.testing.assert_close(found[0], plain[0] * scale)
    torch.testing.assert_close(found[1:3], plain[1:3] * scale.square())


def test_one_scale_may_stand_for_all_heads(device):
    query, key = (torch.randn(1, 3, 40, 16, device=device) for _ in range(2))
    scale = torch.tensor([0.25], device=device).expand(3).unsqueeze(0)
    found = gram.head_moments(query, key, 1.0, scale)
    torch.testing.assert_close(found, gram.head_moments(query, key, 0.25, None))
