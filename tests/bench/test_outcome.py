"""Ratios and verdicts, from samples made by hand."""

import pytest

from scaledot.bench import cases, outcome
from scaledot.bench.bars import Bar, Quantity
from scaledot.bench.cases import Case, Contender
from scaledot.bench.clock import Samples
from scaledot.bench.outcome import Outcome
from scaledot.bench.workload import Answer, Workload


def _case(quantity: Quantity, bar: Bar | None, **rest) -> Case:
    workload = Workload(1, 2, 7, 5)
    return Case("made_up", workload, cases.ATTENTION, cases.TORCH, quantity, bar, **rest)


OURS, PEER = Samples((30.0, 10.0, 20.0)), Samples((10.0, 10.0, 8.0))  # medians 20 and 10


@pytest.mark.parametrize(
    ("quantity", "bar", "measured", "holds"),
    [
        (Quantity.RATIO, Bar("<=", 2.0), 2.0, True),
        (Quantity.RATIO, Bar("<", 2.0), 2.0, False),
        (Quantity.RATIO, Bar("<=", 1.99), 2.0, False),
        (Quantity.SPEEDUP, Bar(">=", 0.5), 0.5, True),
        (Quantity.SPEEDUP, Bar(">=", 0.51), 0.5, False),
        (Quantity.EXTRA_MICROSECONDS, Bar("<=", 10_000), 10_000, True),
        (Quantity.EXTRA_MICROSECONDS, Bar("<=", 9_999), 10_000, False),
        (Quantity.RATIO, None, 2.0, None),
    ],
)
def test_the_verdict_follows_the_medians(quantity, bar, measured, holds):
    result = Outcome(_case(quantity, bar), OURS, PEER)
    assert result.measured == pytest.approx(measured)
    assert result.holds is holds


def test_the_paired_ratio_is_the_median_of_ratios():
    result = Outcome(_case(Quantity.RATIO, None), OURS, PEER)
    assert result.ratio == 2.0
    assert result.paired_ratio == 2.5  # of 3, 1 and 2.5


@pytest.mark.parametrize("text", ["<= 1.05", "< 1", ">= 2.5", "<= 0.05"])
def test_a_bar_is_read_as_it_is_written(text):
    assert str(Bar.parse(text)) == text


def test_an_unknown_comparison_is_refused():
    with pytest.raises(ValueError, match="'==' is no comparison"):
        Bar("==", 1.0)


def test_seconds_become_milliseconds_and_both_sides_are_read_in_turn():
    seen = []

    def contender(name):
        return Contender(name, lambda inputs: (seen.append(name), Answer(None, None))[1])

    def stopwatch(call, calls):
        call()
        return {"mine": 0.003, "theirs": 0.002}[seen[-1]]

    case = Case(
        "made_up",
        Workload(1, 2, 7, 5),
        contender("mine"),
        contender("theirs"),
        Quantity.RATIO,
        Bar("<=", 1.5),
        stopwatch=stopwatch,
    )
    result = outcome.measure(case, repeats=3)
    assert result.unit == "ms"
    assert result.ours.values == pytest.approx((3.0, 3.0, 3.0))
    assert result.peer.values == pytest.approx((2.0, 2.0, 2.0))
    assert seen[-6:] == ["theirs", "mine", "mine", "theirs", "theirs", "mine"]


def test_every_field_of_the_vitals_is_read_inside_the_stopwatch():
    class Unread:
        reads = 0

        def to_dict(self):
            self.reads += 1

    unread = Unread()
    lazy = Contender("lazy", lambda inputs: Answer(None, unread))

    def stopwatch(call, calls):
        before = unread.reads
        call()
        assert unread.reads == before + 1
        return 1.0

    case = Case(
        "made_up", Workload(1, 2, 7, 5), lazy, lazy, Quantity.RATIO, None, stopwatch=stopwatch
    )
    outcome.measure(case, repeats=2)
    assert unread.reads == 2 * (2 + 2)
