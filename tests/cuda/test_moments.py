"""Moments of whole blocks of keys from Gram matrices, joined with those of the keys left over."""

import pytest
import torch

from scaledot.backends.cuda import moments
from scaledot.backends.cuda.statistics import PLANES
from scaledot.backends.inputs import Inputs
from scaledot.problem import Settings

BLOCK, TILE = 128, 64  # keys, rows
MEAN, M2, COUNT, HERE = 7, 8, 6, 9
BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16


def scores(query, key, scale):
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    return query.double() @ key.double().transpose(-1, -2) * scale


def settle(planes, z, seen):
    """Count, mean and m2 of the scores that are seen."""
    count = seen.sum(-1).expand(z.shape[:3]).double()
    mean = (z * seen).sum(-1) / count.clamp(min=1)
    planes[COUNT], planes[MEAN] = count, mean
    planes[M2] = ((z - mean[..., None]) ** 2 * seen).sum(-1)


def drawn(heads, groups, queries, keys, width, device, dtype=BFLOAT16):
    query = torch.randn(2, heads, queries, width, device=device).to(dtype)
    common = 0.5 * torch.randn(width, device=device)
    key = (torch.randn(2, groups, keys, width, device=device) + common).to(dtype)
    return query, key


def inputs_of(query, key, head_scale=None):
    nothing = dict.fromkeys(Inputs._fields)
    return Inputs(**nothing | {"query": query, "key": key, "head_scale": head_scale})


def settings_of(**given):
    return Settings(0.25, False, 0.0, 0.0, None, None, False)._replace(**given)


def left_to_the_pass(queries, keys, ahead, device):
    """Which keys a row's pass sums, those behind its last whole block; and which it sees."""
    row, key = torch.arange(queries, device=device)[:, None], torch.arange(keys, device=device)
    seen_by_the_tile = (row // TILE * TILE + 1 + ahead).clamp(0, keys)
    return key >= seen_by_the_tile // BLOCK * BLOCK, key <= row + ahead


def planes_of_the_pass(query, key, ahead=0):
    """What the pass leaves of rows that end at the diagonal; and what they should become."""
    z = scores(query, key, 0.25)
    own, seen = left_to_the_pass(query.shape[2], key.shape[2], ahead, query.device)
    whole = z.new_empty(PLANES + 1, *query.shape[:3])
    settle(whole, z, seen)
    planes = torch.empty_like(whole)
    settle(planes, z, seen & own)
    planes[HERE], planes[COUNT] = planes[COUNT].clone(), whole[COUNT]
    return planes.float(), whole


@pytest.mark.parametrize(
    ("queries", "keys", "width", "dtype"),
    [
        (523, 523, 16, BFLOAT16),
        (523, 523, 40, FLOAT16),
        (300, 611, 16, FLOAT16),
        (129, 128, 64, BFLOAT16),
        (150, 260, 104, BFLOAT16),
        (99, 99, 16, FLOAT16),
    ],
)
def test_rows_that_end_at_the_diagonal(queries, keys, width, dtype, device):
    query, key = drawn(4, 2, queries, keys, width, device, dtype)
    planes, whole = planes_of_the_pass(query, key)
    moments.add_blocks(planes, inputs_of(query, key), settings_of(right=0), BLOCK, TILE)
    close(planes, whole)


@pytest.mark.parametrize("ahead", [-200, 70, 300])
def test_rows_of_a_program_may_see_unequally_many_blocks(ahead, device):
    """As where the diagonal ends at the last key: none for the first rows, then more and more."""
    query, key = drawn(2, 1, 700, 611, 16, device)
    planes, whole = planes_of_the_pass(query, key, ahead)
    moments.add_blocks(planes, inputs_of(query, key), settings_of(right=0), BLOCK, TILE)
    close(planes, whole)


def close(planes, whole):
    torch.testing.assert_close(planes[MEAN].double(), whole[MEAN], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(planes[M2].double(), whole[M2], rtol=2e-5, atol=1e-4)


def planes_of_nothing_yet(query, keys):
    """Rows that see whole blocks alone: the pass has summed none of them."""
    planes = torch.zeros(PLANES + 1, *query.shape[:3], device=query.device)
    planes[COUNT] = keys
    return planes


def test_a_scale_for_each_head_and_the_logarithm_of_the_count(device):
    keys = 2 * BLOCK
    query, key = drawn(4, 2, 70, keys, 16, device)
    head_scale = torch.rand(2, 4, device=device) + 0.5
    planes = planes_of_nothing_yet(query, keys)
    whole = planes.double()
    factor = head_scale.double()[..., None, None] * torch.log(torch.tensor(keys).double())
    every = torch.ones(1, keys, dtype=torch.bool, device=device)
    settle(whole, scores(query, key, 0.25) * factor, every)
    settings = settings_of(log_n=True)
    moments.add_blocks(planes, inputs_of(query, key, head_scale), settings, BLOCK, TILE)
    close(planes, whole)


@pytest.mark.parametrize(("dtype", "far"), [(BFLOAT16, 192.0), (FLOAT16, 1536.0)])
def test_a_large_common_part_of_the_keys_costs_no_digits(dtype, far, device):
    query, key = drawn(2, 2, 64, 3 * BLOCK, 32, device, dtype)
    key = torch.randint(-8, 8, key.shape, device=device).to(dtype)
    moved = key + far
    assert torch.equal(moved - far, key)  # no digit is lost by moving them
    planes = planes_of_nothing_yet(query, 3 * BLOCK)
    there = planes.clone()
    moments.add_blocks(planes, inputs_of(query, key), settings_of(), BLOCK, TILE)
    moments.add_blocks(there, inputs_of(query, moved), settings_of(), BLOCK, TILE)
    torch.testing.assert_close(there[M2], planes[M2], rtol=2e-5, atol=0.0)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(there[MEAN], planes[MEAN])


def test_a_matrix_is_multiplied_with_more_bits_than_a_bfloat16_has(device):
    """Two entries of a query that are all that counts: nothing averages the rounding out."""
    query, key = drawn(1, 1, 64, 2 * BLOCK, 16, device)
    query[...] = 0.0
    query[..., 3], query[..., 5] = 1.0, -1.0
    planes = planes_of_nothing_yet(query, 2 * BLOCK)
    moments.add_blocks(planes, inputs_of(query, key), settings_of(), BLOCK, TILE)
    expected = scores(query, key, 0.25).var(-1, correction=0) * 2 * BLOCK
    torch.testing.assert_close(planes[M2].double(), expected, rtol=2e-5, atol=0.0)


def test_float16_queries_keep_their_last_bits(device):
    """1 + 2^-10 is no bfloat16: without its last bits the spread would be off by 0.2 %."""
    query, key = drawn(1, 1, 64, 2 * BLOCK, 16, device, FLOAT16)
    query[...] = 1.0 + 2.0**-10
    planes = planes_of_nothing_yet(query, 2 * BLOCK)
    moments.add_blocks(planes, inputs_of(query, key), settings_of(), BLOCK, TILE)
    expected = scores(query, key, 0.25)
    torch.testing.assert_close(
        planes[M2].double(), expected.var(-1, correction=0) * 2 * BLOCK, rtol=2e-5, atol=0.0
    )
    torch.testing.assert_close(planes[MEAN].double(), expected.mean(-1), rtol=2e-6, atol=0.0)


def test_a_broken_key_breaks_only_rows_that_see_it(device):
    query, key = drawn(2, 2, 523, 523, 16, device)
    planes, whole = planes_of_the_pass(query, key)
    key[:, :, 300] = float("nan")
    moments.add_blocks(planes, inputs_of(query, key), settings_of(right=0), BLOCK, TILE)
    close(planes[..., :300], whole[..., :300])
    assert planes[M2][..., 448:].isnan().all()


def test_counts_that_have_lost_their_last_bits_name_the_right_block(device):
    """2^24 + 3 keys, of which all but the first block are summed: as a float32 one key too many."""
    query, key = drawn(2, 2, TILE, 2 * BLOCK, 16, device)
    planes = torch.zeros(PLANES + 1, *query.shape[:3], device=device)
    planes[COUNT], planes[HERE] = 2**24 + 3, 2**24 + 3 - BLOCK
    assert (planes[COUNT] - planes[HERE] == BLOCK + 1).all()
    z = scores(query, key[:, :, :BLOCK], 0.25)
    planes[MEAN] = z.mean(-1)  # so that only the block's own deviations are left
    whole = planes.double()
    whole[M2] = z.var(-1, correction=0) * BLOCK
    moments.add_blocks(planes, inputs_of(query, key), settings_of(right=0), BLOCK, TILE)
    close(planes, whole)


@pytest.mark.parametrize("keys", [2 * BLOCK, 2 * BLOCK + 7])
def test_squares_of_all_keys_are_left(keys, device):
    query, key = drawn(2, 1, 64, keys, 16, device)
    planes = planes_of_nothing_yet(query, 2 * BLOCK)
    squares = moments.add_blocks(planes, inputs_of(query, key), settings_of(), BLOCK, TILE)
    expected = key.double().square().sum((-1, -2))
    torch.testing.assert_close(squares.view(2, 1, -1).double().sum(-1), expected, rtol=3e-7, atol=0)
    lengths = torch.full((2,), 2 * BLOCK, dtype=torch.int32, device=device)
    padded = inputs_of(query, key)._replace(key_lengths=lengths)
    assert moments.add_blocks(planes, padded, settings_of(), BLOCK, TILE) is None
