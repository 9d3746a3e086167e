"""The merge of readings on the host: what `Vitals.over_batch` gives, in numpy."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from scaledot.measure import COUNT_FIELDS, FLOAT_FIELDS, Vitals
from scaledot.watch.over_batch import over_batch


def numbers(batch, heads=7, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    floats = (3 * rng.standard_normal((len(FLOAT_FIELDS), batch, heads))).astype(dtype)
    means = [FLOAT_FIELDS.index(name) for name in ("max_logit", "logit_mean")]
    others = [place for place in range(len(FLOAT_FIELDS)) if place not in means]
    floats[others] = np.abs(floats[others])
    counts = rng.integers(0, 1000, (len(COUNT_FIELDS), batch, heads))
    return floats, counts


def assert_as_torch_has_it(floats, counts, rtol=3e-7):
    found = over_batch(floats, counts)
    parts = torch.from_numpy(floats), torch.from_numpy(counts)
    expected = [part.numpy() for part in Vitals.unpacked(*parts).over_batch().packed()]
    assert found[0].dtype == floats.dtype
    np.testing.assert_allclose(found[0], expected[0], rtol=rtol)
    np.testing.assert_array_equal(found[1], expected[1])


@pytest.mark.parametrize("batch", [0, 1, 2, 5, 67])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_same_as_torch(batch, dtype):
    assert_as_torch_has_it(*numbers(batch, dtype=dtype))


def test_entries_without_rows_count_nowhere_whatever_they_hold():
    floats, counts = numbers(batch=5)
    counts[:, 1] = 0
    floats[1:, 1] = np.inf
    floats[1:, 1, 3:] = np.nan
    counts[:, :, 2] = 0  # a head that no entry has measured
    assert_as_torch_has_it(floats, counts)
    assert np.isfinite(over_batch(floats, counts)[0]).all()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_so(value):
    floats, counts = numbers(batch=3)
    counts += 1
    floats[FLOAT_FIELDS.index("logit_mean"), 1, 0] = value
    floats[FLOAT_FIELDS.index("entropy"), 2, 1] = value
    floats[FLOAT_FIELDS.index("q_rms"), 0, 2] = abs(value)
    assert_as_torch_has_it(floats, counts)


def test_the_largest_numbers_do_not_overflow():
    floats, counts = numbers(batch=3)
    counts += 2**40
    floats[1:] = np.finfo(np.float32).max / 2
    assert_as_torch_has_it(floats, counts)
    assert np.isfinite(over_batch(floats, counts)[0]).all()


def test_spreads_of_far_means_lose_nothing():
    """Two entries of spread 1e-3 around 1e4 and 1e4 + 1: differences of squares would be noise."""
    floats, counts = numbers(batch=2, heads=1)
    counts[:] = 10
    floats[FLOAT_FIELDS.index("logit_mean"), :, 0] = 1e4, 1e4
    floats[FLOAT_FIELDS.index("logit_std"), :, 0] = 1e-3
    assert over_batch(floats, counts)[0][FLOAT_FIELDS.index("logit_std"), 0] == np.float32(1e-3)
    floats[FLOAT_FIELDS.index("logit_mean"), :, 0] = 1e4, 1e4 + 1
    found = over_batch(floats, counts)[0][FLOAT_FIELDS.index("logit_std"), 0]
    assert found == pytest.approx((0.25 + 1e-6) ** 0.5, rel=1e-7)


def test_means_are_rounded_once():
    floats, counts = numbers(batch=6, heads=50)
    counts[:] = 7
    floats = np.abs(floats)
    entropy = FLOAT_FIELDS.index("entropy")
    found = over_batch(floats, counts)[0][entropy]
    for head in range(50):
        exact = sum(Fraction(float(value)) for value in floats[entropy, :, head]) / 6
        nearest = float(found[head])
        for other in (np.nextafter(found[head], np.float32(way)) for way in (-1e9, 1e9)):
            assert abs(Fraction(nearest) - exact) <= abs(Fraction(float(other)) - exact)
