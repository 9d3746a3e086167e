"""How much of a run has to be read before it is called healthy."""

import numpy as np
import pytest

from scaledot.watch.cadence import Cadence
from scaledot.watch.evidence import Evidence, Read, least


def _of(read, last: int) -> Evidence:
    return Read(np.array(read)).until(0, last)


@pytest.mark.parametrize(
    ("read", "last", "enough"),
    [
        (range(400), 399, True),
        (range(0, 400, 40), 399, True),  # a tenth of the steps apart
        (range(0, 400, 41), 399, False),
        ([0, 1, 307], 399, False),  # what a starved watch reads
        ([0, 1, *range(360, 400)], 399, False),  # many, and a gap in which all may happen
        (range(200), 399, False),  # nothing of the second half
        (range(100, 400), 399, False),  # nothing of the start
        (range(7), 6, False),  # all of a run that is too short for a trend
        (range(8), 7, True),
        ([0, 6, 12, 18], 18, True),  # four that lie apart suffice
        ([0, 5, 10, 15], 15, False),
        ([0], 0, False),
        (range(0, 10_000, 1000), 9_999, True),
    ],
)
def test_enough_are_as_many_as_a_trend_needs_without_a_wide_gap(read, last, enough):
    assert _of(read, last).enough is enough


def test_the_gap_counts_to_both_ends_of_the_run():
    assert _of([10, 20, 25], 30).gap == 10
    assert _of([3, 5], 30).gap == 25
    assert _of([30, 35], 40).gap == 30


def test_steps_that_come_one_by_one_count_as_those_known_before():
    steps = [0, 1, 2, 4, 8, 16, 40]
    read = Read(np.array(steps[:3]))
    for step in (*steps[2:], 16):  # one that came already is no news
        read.add(step)
    assert read.until(0, 50) == _of(steps, 50)


def test_the_layer_that_was_read_least_speaks_for_all():
    whole, some = _of(range(400), 399), _of([0, 200], 399)
    assert least([whole, some, whole]) == some
    assert least([]) == Evidence(0, 0, 0)


def test_what_is_said_names_the_gap_and_what_to_type():
    assert str(_of(range(0, 400, 10), 399)) == "40 of 400 steps were read, at most 10 apart"
    starved = _of([0, 1, 307], 399)
    assert starved.advice == "3 of 400 steps were read, at most 306 apart; --every 5 reads more"
    assert _of([0], 399).advice == "1 of 400 steps was read; --every 5 reads more"
    assert _of(range(5), 4).advice == "all 5 steps were read; a trend needs 8"
    assert str(_of([0], 0)) == "the only step was read"


@pytest.mark.parametrize("steps", [40, 300, 2000])
def test_what_is_advised_reads_enough(steps):
    every = _of([0], steps - 1).every
    assert every is not None
    assert _of(range(0, steps, every), steps - 1).enough


@pytest.mark.parametrize("steps", [100, 400, 2000])
def test_the_defaults_read_enough_unless_they_are_starved(steps):
    """Steps of 5 ms, of which a reading costs a fifth."""

    class Clock:
        now = 0.0

        def __call__(self) -> float:
            return self.now

    clock = Clock()
    cadence, read = Cadence(clock=clock), Read()
    for step in range(steps):
        clock.now += 0.005
        if cadence.due:
            read.add(step)
            clock.now += 0.001
            cadence.spend(0.001)
        cadence.close_step()
    assert read.until(0, steps - 1).enough
