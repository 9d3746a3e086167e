"""Moments of whole blocks of keys from Gram matrices, joined with those of the keys left over."""

import pytest
import torch

from scaledot.backends.cuda import moments
from scaledot.backends.cuda.statistics import PLANES
from scaledot.backends.inputs import Inputs
from scaledot.problem import Settings

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="a GPU multiplies float32 as TF32: there test_backends.py measures 16-bit moments",
)

BLOCK, TILE = 128, 64  # keys, rows
MEAN, M2, COUNT, HERE = 7, 8, 6, 9


def scores(query, key, scale):
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    return query.double() @ key.double().transpose(-1, -2) * scale


def settle(planes, z, seen):
    """Count, mean and m2 of the scores that are seen."""
    count = seen.sum(-1).expand(z.shape[:3]).double()
    mean = (z * seen).sum(-1) / count.clamp(min=1)
    planes[COUNT], planes[MEAN] = count, mean
    planes[M2] = ((z - mean[..., None]) ** 2 * seen).sum(-1)


def drawn(heads, groups, queries, keys, width, dtype=torch.float32):
    generator = torch.Generator().manual_seed(queries + 7 * keys)
    query = torch.randn(2, heads, queries, width, generator=generator).to(dtype)
    common = 3.0 * torch.randn(width, generator=generator)
    key = (torch.randn(2, groups, keys, width, generator=generator) + common).to(dtype)
    return query, key


def inputs_of(query, key, head_scale=None):
    nothing = dict.fromkeys(Inputs._fields)
    return Inputs(**nothing | {"query": query, "key": key, "head_scale": head_scale})


def settings_of(**given):
    return Settings(0.25, False, 0.0, 0.0, None, None, False)._replace(**given)


def left_to_the_pass(queries, keys):
    """Which keys a row's pass sums, those behind its last whole block; and which it sees."""
    row, key = torch.arange(queries)[:, None], torch.arange(keys)[None]
    seen_by_the_tile = (row // TILE * TILE + 1).clamp(max=keys)
    return key >= seen_by_the_tile // BLOCK * BLOCK, key <= row


def planes_of_the_pass(query, key):
    """What the pass leaves of rows that end at the diagonal; and what they should become."""
    z = scores(query, key, 0.25)
    own, seen = left_to_the_pass(query.shape[2], key.shape[2])
    whole = torch.empty(PLANES + 1, *query.shape[:3], dtype=torch.float64)
    settle(whole, z, seen)
    planes = torch.empty_like(whole)
    settle(planes, z, seen & own)
    planes[HERE], planes[COUNT] = planes[COUNT].clone(), whole[COUNT]
    return planes.float(), whole


@pytest.mark.parametrize(
    ("queries", "keys", "width"),
    [(523, 523, 16), (523, 523, 40), (300, 611, 16), (129, 128, 64), (100, 100, 16)],
)
def test_rows_that_end_at_the_diagonal(queries, keys, width):
    query, key = drawn(4, 2, queries, keys, width)
    planes, whole = planes_of_the_pass(query, key)
    settings = settings_of(right=0)
    moments.add_blocks(planes, inputs_of(query, key), settings, BLOCK, TILE)
    close(planes, whole)


def close(planes, whole):
    torch.testing.assert_close(planes[MEAN].double(), whole[MEAN], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(planes[M2].double(), whole[M2], rtol=1e-4, atol=1e-3)


def planes_of_nothing_yet(query, keys):
    """Rows that see whole blocks alone: the pass has summed none of them."""
    planes = torch.zeros(PLANES + 1, *query.shape[:3])
    planes[COUNT] = keys
    return planes


def test_a_scale_for_each_head_and_the_logarithm_of_the_count():
    keys = 2 * BLOCK
    query, key = drawn(4, 2, 70, keys, 16)
    head_scale = torch.rand(2, 4) + 0.5
    planes = planes_of_nothing_yet(query, keys)
    whole = planes.double()
    factor = head_scale.double()[..., None, None] * torch.log(torch.tensor(keys).double())
    settle(whole, scores(query, key, 0.25) * factor, torch.ones(1, keys, dtype=torch.bool))
    settings = settings_of(log_n=True)
    moments.add_blocks(planes, inputs_of(query, key, head_scale), settings, BLOCK, TILE)
    close(planes, whole)


def test_a_large_common_part_of_the_keys_costs_no_digits():
    query, key = drawn(2, 2, 64, 3 * BLOCK, 32)
    planes = planes_of_nothing_yet(query, 3 * BLOCK)
    far = planes.clone()
    moments.add_blocks(planes, inputs_of(query, key), settings_of(), BLOCK, TILE)
    moments.add_blocks(far, inputs_of(query, key + 512.0), settings_of(), BLOCK, TILE)
    torch.testing.assert_close(far[M2], planes[M2], rtol=2e-3, atol=0.0)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(far[MEAN], planes[MEAN])


def test_a_broken_key_breaks_only_rows_that_see_it():
    query, key = drawn(2, 2, 523, 523, 16)
    planes, whole = planes_of_the_pass(query, key)
    key[:, :, 300] = float("nan")
    settings = settings_of(right=0)
    moments.add_blocks(planes, inputs_of(query, key), settings, BLOCK, TILE)
    close(planes[..., :300], whole[..., :300])
    assert planes[M2][..., 448:].isnan().all()


def test_counts_that_have_lost_their_last_bits_name_the_right_block():
    """2^24 + 3 keys, of which all but the first block are summed: as a float32 one key too many."""
    query, key = drawn(2, 2, TILE, 2 * BLOCK, 16)
    planes = torch.zeros(PLANES + 1, *query.shape[:3])
    planes[COUNT], planes[HERE] = 2**24 + 3, 2**24 + 3 - BLOCK
    assert (planes[COUNT] - planes[HERE] == BLOCK + 1).all()
    z = scores(query, key[:, :, :BLOCK], 0.25)
    planes[MEAN] = z.mean(-1)  # so that only the block's own deviations are left
    whole = planes.double()
    whole[M2] = z.var(-1, correction=0) * BLOCK
    moments.add_blocks(planes, inputs_of(query, key), settings_of(right=0), BLOCK, TILE)
    close(planes, whole)
