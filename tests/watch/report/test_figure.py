"""Axes, ticks and the thinning of lines."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from scaledot.watch.report import figure
from scaledot.watch.report.figure import Axis, Line
from scaledot.watch.report.words import number

finite = st.floats(-1e6, 1e6).filter(lambda value: value == 0 or abs(value) > 1e-6)


@given(st.lists(finite, min_size=1, max_size=40))
def test_every_number_is_inside_its_axis_and_the_ticks_are_too(numbers):
    axis = figure.axis_of(np.array(numbers), log=False)
    assert axis is not None
    assert axis.low <= min(numbers) <= max(numbers) <= axis.high
    ticks = figure.ticks_of(axis)
    room = 1e-6 * (axis.high - axis.low)
    assert 1 <= len(ticks) <= 7
    assert all(axis.low - room <= tick <= axis.high + room for tick in ticks)


@given(st.lists(st.floats(1e-6, 1e9), min_size=1, max_size=40))
def test_a_logarithmic_axis_has_few_ticks_inside(numbers):
    axis = figure.axis_of(np.array(numbers), log=True)
    assert axis is not None
    ticks = figure.ticks_of(axis)
    assert 1 <= len(ticks) <= 6
    assert all(axis.low <= tick <= axis.high for tick in ticks)


@given(st.integers(0, 2**31), st.integers(1, 3000))
def test_a_thinned_line_keeps_its_peaks_in_their_order(seed, length):
    numbers = np.random.default_rng(seed).standard_normal(length)
    steps, kept = figure.thinned(np.arange(length), numbers, 100)
    assert len(kept) <= max(length if length <= 100 else 0, 100)
    assert (kept.min(), kept.max()) == (numbers.min(), numbers.max())
    assert (np.diff(steps) > 0).all()
    np.testing.assert_array_equal(kept, numbers[steps])


def test_a_line_is_interrupted_where_a_number_is_missing():
    line = Line("x", [0, 1, 2, 3], [1.0, math.nan, 2.0, 3.0])
    shapes = figure.shape(line, Axis(0, 3), Axis(1, 3))
    assert len(shapes) == 2
    assert 'points="0.0,160.0 0.0,160.0"' in shapes[0]
    assert 'points="400.0,80.0 600.0,0.0"' in shapes[1]


def test_nothing_to_draw_is_no_chart():
    assert figure.chart("Loss", [Line("x", [0], [math.nan])], Axis(0, 1)) is None
    assert figure.chart("Loss", [], Axis(0, 1)) is None


def test_numbers_are_short_and_whole_where_large():
    shown = [number(value) for value in (1723.4, 99.96, 23.44, 0.0144, 2.1e-5, math.nan, math.inf)]
    assert shown == ["1,723", "100", "23.4", "0.0144", "2.1e-05", "not known", "infinite"]
