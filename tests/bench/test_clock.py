"""The clock: turns, warm-up, medians; with a stopwatch that says what it is told."""

import gc

import pytest

from scaledot.bench import clock
from scaledot.bench.clock import Samples


def _nothing() -> None:
    pass


@pytest.mark.slow
def test_contenders_take_turns_and_the_first_place_rotates():
    seen = []
    contenders = {name: (lambda name=name: seen.append(name)) for name in ("peer", "ours", "third")}

    def stopwatch(call, calls):
        call()
        return 1.0

    clock.race(contenders, 4, stopwatch=stopwatch)
    initials = "".join(name[0] for name in seen)
    rounds = [initials[start : start + 3] for start in range(0, len(initials), 3)]
    assert rounds == ["pot", "pot", "pot", "otp", "tpo", "pot"]  # two of them to warm up


@pytest.mark.slow
def test_medians_come_from_the_rounds_and_not_from_the_warm_up():
    warm_up = [1000.0] * (2 * clock.WARM_UP_ROUNDS)
    # In turn: peer, ours; ours, peer; peer, ours.
    readings = iter([*warm_up, 1.0, 10.0, 30.0, 2.0, 9.0, 20.0])
    samples = clock.race(
        {"peer": _nothing, "ours": _nothing}, 3, stopwatch=lambda call, calls: next(readings)
    )
    assert samples["peer"].values == (1.0, 2.0, 9.0)
    assert samples["ours"].values == (10.0, 30.0, 20.0)
    assert samples["peer"].median == 2.0
    assert samples["ours"].median == 20.0
    assert next(readings, None) is None


def test_quantiles_lie_between_the_samples():
    samples = Samples((5.0, 1.0, 3.0, 2.0, 4.0, 6.0))
    assert (samples.p20, samples.median, samples.p80) == (2.0, 3.5, 5.0)


def test_one_sample_is_its_own_quantiles():
    samples = Samples((7.0,))
    assert (samples.p20, samples.median, samples.p80) == (7.0, 7.0, 7.0)


def test_the_collector_rests_during_a_race_and_is_back_after_it():
    states = []
    clock.race({"only": lambda: states.append(gc.isenabled())}, 3)
    assert states
    assert not any(states)
    assert gc.isenabled()


@pytest.mark.slow
def test_the_collector_is_back_after_a_failing_contender():
    with pytest.raises(ZeroDivisionError):
        clock.race({"only": lambda: 1 / 0}, 3)
    assert gc.isenabled()


@pytest.mark.slow
def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        clock.race({"only": _nothing}, 1)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_sample_of_many_calls_is_the_time_of_one(monkeypatch):
    ticks = iter([100.0, 102.0])
    monkeypatch.setattr(clock, "perf_counter", lambda: next(ticks))
    made = []
    assert clock.wall_seconds(lambda: made.append(1), 8) == 0.25
    assert len(made) == 8


def test_progress_is_drawn_once_a_round():
    drawn = []
    clock.race({"a": _nothing, "b": _nothing}, 5, after_round=lambda: drawn.append(1))
    assert len(drawn) == 5
