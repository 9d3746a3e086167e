"""Moments of rows that see every key: each row's mean, and m2 as a sum over the rows of a head."""

import pytest
import torch

from scaledot.backends.cuda import gram, summary, whole_moments
from scaledot.backends.cuda.statistics import PLANES, ROW_PLANES
from scaledot.backends.inputs import Inputs
from scaledot.measure import FLOAT_FIELDS
from scaledot.problem import Settings

SCALE = 0.25
MAX_LOGIT, COUNT, MEAN, M2 = map(ROW_PLANES.index, ("max_logit", "count", "mean", "m2"))
BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16


def drawn(heads, groups, queries, keys, width, dtype, device, batch=2):
    query = torch.randn(batch, heads, queries, width, device=device).to(dtype)
    common = 0.5 * torch.randn(width, device=device)
    key = (torch.randn(batch, groups, keys, width, device=device) + common).to(dtype)
    return query, key


def inputs_of(query, key, head_scale=None):
    nothing = dict.fromkeys(Inputs._fields)
    return Inputs(**nothing | {"query": query, "key": key, "head_scale": head_scale})


def settings_of(**given):
    return Settings(SCALE, False, 0.0, 0.0, None, None, False)._replace(**given)


def scores(query, key, factor=SCALE):
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    return query.double() @ key.double().transpose(-1, -2) * factor


def planes_of_the_pass(z):
    """What a forward kernel leaves of the scores: moments are NaN until they are filled in."""
    planes = torch.zeros(PLANES, *z.shape[:3], device=z.device)
    planes[MAX_LOGIT] = z.amax(-1)  # NaN where one of them is
    planes[COUNT] = z.shape[-1]
    planes[[MEAN, M2]] = float("nan")
    return planes


def check(planes, z):
    """Against float64, over the rows that count."""
    counted = planes[MAX_LOGIT].isfinite()
    mean = torch.where(counted, z.mean(-1), 0.0)
    m2 = torch.where(counted, z.var(-1, correction=0) * z.shape[-1], 0.0)
    assert planes[[MEAN, M2]].isfinite().all()
    close = 2e-6 * float(mean.abs().max())
    assert torch.allclose(planes[MEAN].double()[counted], mean[counted], rtol=0.0, atol=close)
    total = torch.where(counted, planes[M2], 0.0).double().sum(-1)
    torch.testing.assert_close(total, m2.sum(-1), rtol=2e-5, atol=0.0)


@pytest.mark.parametrize("width", [8, 40, 64, 104, 128, 136, 256])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
def test_every_width(width, dtype, device):
    query, key = drawn(2, 1, 131, 149, width, dtype, device, batch=1)
    z = scores(query, key)
    planes = planes_of_the_pass(z)
    whole_moments.add_all(planes, inputs_of(query, key), settings_of())
    check(planes, z)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (63, 64), (64, 65), (65, 63), (257, 521)])
@pytest.mark.parametrize(("heads", "groups"), [(3, 3), (6, 2)])
def test_every_length_and_shared_keys(heads, groups, queries, keys, device):
    query, key = drawn(heads, groups, queries, keys, 16, BFLOAT16, device)
    z = scores(query, key)
    planes = planes_of_the_pass(z)
    whole_moments.add_all(planes, inputs_of(query, key), settings_of())
    check(planes, z)


def test_more_chunks_than_are_on_their_way(device):
    """And their means drift, so most of the spread lies between them."""
    keys = whole_moments.SHORTEST * whole_moments.MERGE_STAGES + 300
    query, key = drawn(1, 1, 67, keys, 16, BFLOAT16, device, batch=1)
    key += torch.linspace(-20.0, 30.0, keys, device=device).to(BFLOAT16)[:, None]
    z = scores(query, key)
    planes = planes_of_the_pass(z)
    whole_moments.add_all(planes, inputs_of(query, key), settings_of())
    check(planes, z)


def test_a_scale_for_each_head_and_the_logarithm_of_the_count(device):
    query, key = drawn(4, 2, 70, 200, 16, BFLOAT16, device)
    head_scale = torch.rand(2, 4, device=device) + 0.5
    factor = head_scale.double()[..., None, None] * torch.log(torch.tensor(200.0).double())
    for entries in (head_scale, head_scale[:1]):
        z = scores(query, key, SCALE * factor[: len(entries)])
        planes = planes_of_the_pass(z)
        inputs = inputs_of(query, key, entries)
        whole_moments.add_all(planes, inputs, settings_of(log_n=True))
        check(planes, z)


@pytest.mark.parametrize(("dtype", "far"), [(BFLOAT16, 192.0), (FLOAT16, 1536.0)])
@pytest.mark.parametrize("width", [32, 256])
def test_a_large_common_part_of_the_keys_costs_no_digits(dtype, far, width, device):
    query, key = drawn(1, 1, 64, 150, width, dtype, device, batch=1)
    key = torch.randint(-8, 8, key.shape, device=device).to(dtype)
    moved = key + far
    assert torch.equal(moved - far, key)  # no digit is lost by moving them
    z = scores(query, moved)
    planes = planes_of_the_pass(z)
    whole_moments.add_all(planes, inputs_of(query, moved), settings_of())
    check(planes, z)


@pytest.mark.parametrize("width", [32, 256])
def test_one_entry_far_from_zero(width, device):
    """In one head alone: its chunks are centred, those of the other head read as they are."""
    query, key = drawn(2, 2, 200, 300, width, BFLOAT16, device, batch=1)
    key[:, 1, :, width - 3] = (192.0 + torch.randint(-8, 8, (300,), device=device)).to(BFLOAT16)
    z = scores(query, key)
    planes = planes_of_the_pass(z)
    whole_moments.add_all(planes, inputs_of(query, key), settings_of())
    check(planes, z)


@pytest.mark.parametrize("width", [64, 256])
def test_first_keys_that_lie_apart_from_the_others(width, device, monkeypatch):
    """As padding does: counted from a centre among them the others are rounded, all the same way.

    Taken off the matrix must be the sums of rounded keys; those of the keys miss it by 5 to 10 %.
    """
    monkeypatch.setattr(whole_moments, "_chunk", lambda *_: 1024)
    query, key = drawn(1, 1, 66, 1024, width, BFLOAT16, device, batch=1)
    key = (2**-8 * (1 + 0.01 * (torch.rand_like(key.float()) - 0.5))).to(BFLOAT16)
    key[:, :, :64] = -1.0
    z = scores(query, key)
    planes = planes_of_the_pass(z)
    whole_moments.add_all(planes, inputs_of(query, key), settings_of())
    total = planes[M2].double().sum(-1)
    expected = (z.var(-1, correction=0) * z.shape[-1]).sum(-1)
    torch.testing.assert_close(total, expected, rtol=1e-2, atol=0.0)


def test_float16_keys_at_both_ends_of_their_range(device):
    query, key = drawn(1, 1, 66, 512, 64, FLOAT16, device, batch=1)
    query[..., 0] *= 1e-4
    key[..., :64, 0], key[..., 64:, 0] = -40000.0, 40000.0
    z = scores(query, key)
    planes = planes_of_the_pass(z)
    whole_moments.add_all(planes, inputs_of(query, key), settings_of())
    check(planes, z)


@pytest.mark.parametrize("width", [64, 256])
def test_a_broken_row_breaks_no_other(width, device):
    query, key = drawn(2, 1, 150, 37, width, BFLOAT16, device, batch=1)
    query[:, :, 3, 1] = float("nan")
    query[0, 1, 70] = float("inf")
    query[0, 0, 140:] = float("nan")
    z = scores(query, key)
    planes = planes_of_the_pass(z)
    assert not planes[MAX_LOGIT].isfinite().all()
    whole_moments.add_all(planes, inputs_of(query, key), settings_of())
    check(planes, z)


def test_heads_in_which_no_row_counts(device):
    query, key = drawn(2, 2, 70, 90, 16, BFLOAT16, device)
    query[:, 1] = float("nan")
    z = scores(query, key)
    planes = planes_of_the_pass(z)
    whole_moments.add_all(planes, inputs_of(query, key), settings_of())
    check(planes, z)
    assert (planes[M2][:, 1] == 0.0).all()


@pytest.mark.parametrize("gap", [0, 8, 3])
def test_tensors_with_gaps(gap, device):
    """[B, T, H, D] as projections leave it; a gap of 3: rows not to be read 16 bytes at once."""
    query, key = (
        torch.randn(1, tokens, 3, 40 + gap, device=device).to(BFLOAT16)[..., :40].transpose(1, 2)
        for tokens in (67, 131)
    )
    z = scores(query, key)
    planes = planes_of_the_pass(z)
    whole_moments.add_all(planes, inputs_of(query, key), settings_of())
    check(planes, z)
    columns = query.mT.contiguous().mT  # entries of a row far from each other
    planes = planes_of_the_pass(z)
    whole_moments.add_all(planes, inputs_of(columns, key), settings_of())
    check(planes, z)


def test_vitals_are_those_of_each_rows_own_moments(device):
    query, key = drawn(4, 2, 281, 101, 32, BFLOAT16, device, batch=1)
    query[0, 2, 5] = float("nan")
    z = scores(query, key)
    inputs = inputs_of(query, key)
    own = planes_of_the_pass(z)
    own[MEAN], own[M2] = z.mean(-1), z.var(-1, correction=0) * z.shape[-1]
    shared = planes_of_the_pass(z)
    whole_moments.add_all(shared, inputs, settings_of())
    assert not torch.allclose(own[M2], shared[M2], rtol=0.1, equal_nan=True)
    expected, _ = summary.summarise(own, inputs)
    floats, _ = summary.summarise(shared, inputs)
    for name in ("logit_mean", "logit_std", "row_std"):
        field = FLOAT_FIELDS.index(name)
        torch.testing.assert_close(floats[field], expected[field], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(("keys", "width"), [(64, 16), (521, 16), (64, 136)])
@pytest.mark.parametrize("far", [0.0, 40.0])
def test_squares_of_the_keys_are_left(far, keys, width, device):
    """Of the keys as they are, however far from zero they are counted."""
    query, key = drawn(2, 1, 64, keys, width, BFLOAT16, device)
    key += far
    planes = planes_of_the_pass(scores(query, key))
    squares = whole_moments.add_all(planes, inputs_of(query, key), settings_of())
    expected = key.double().square().sum((-1, -2))
    total = squares.view(2, 1, -1).double().sum(-1)
    # Tensor cores cut their sums off.
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=0.0)


def test_programs_fill_the_machine_but_do_not_grow_too_short():
    for width in (64, 128, 256):
        plan = gram.plan_for(width)
        held = whole_moments.MULTIPROCESSORS * plan.programs
        assert whole_moments._chunk(2048 // width, 16384, plan) == 1024
        assert whole_moments._chunk(10**6, 16384, plan) == whole_moments.LONGEST
        assert whole_moments._chunk(1, 4096, plan) == whole_moments.SHORTEST
        half = whole_moments._chunk(1024 // width, 16384, plan)
        assert held / 2 < 1024 // width * 16384 // half <= held
