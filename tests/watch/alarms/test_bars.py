"""The bars that decide, as far as a minute allows; benchmarks/alarms/bars.py holds all of them."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

STUDY = Path(__file__).parents[3] / "benchmarks" / "alarms"


@pytest.fixture(scope="module", autouse=True)
def _study_on_path():
    sys.path.insert(0, str(STUDY))
    yield
    sys.path.remove(str(STUDY))


@pytest.mark.nightly
def test_the_sick_run_is_told_of_in_time_while_loss_and_gradient_norm_are_quiet():
    import bars
    import runs

    run = runs.train(replace(bars.SICK, seed=11), stop=bars.IN_TIME)  # no seed of the study
    holds, words = bars.sick_holds(run)
    assert holds, words


@pytest.mark.slow
def test_heads_that_are_one_hot_by_right_are_left_in_peace():
    import bars
    import runs

    setup = bars.HEALTHY["repeated sequences: heads one-hot by right"]
    run = runs.train(replace(setup, seed=11), stop=150)
    assert (1 - run.vital("sum_p2")[-1]).min() < 0.25  # they are sharp
    holds, words = bars.healthy_holds(run)
    assert holds, words


def test_a_detector_sees_only_the_past():
    import detectors
    import runs

    run = runs.train(runs.Setup(width=16, heads=2, tokens=16, batch=2, steps=40, rate=0.2))
    cut = replace(
        run,
        floats=run.floats[:30],
        counts=run.counts[:30],
        losses=run.losses[:30],
        norms=run.norms[:30],
    )
    for detector in detectors.DETECTORS:
        np.testing.assert_array_equal(detector.curve(run)[:30], detector.curve(cut), detector.name)


def test_a_roc_of_perfect_of_useless_and_of_reversed_scores():
    import rates

    high, low = np.arange(5.0, 9.0), np.arange(4.0)
    assert rates.roc(high, low).min() == 1.0
    assert rates.roc(low, high)[:-1].max() == 0.0
    same = np.ones(7)
    np.testing.assert_allclose(rates.roc(same, same), rates.GRID)


def test_a_twin_whose_clip_is_never_reached_is_the_same_run():
    import runs

    setup = runs.Setup(width=16, heads=2, tokens=16, batch=2, steps=12)
    plain, clipped = runs.train(setup), runs.train(replace(setup, clip=1e6))
    np.testing.assert_array_equal(plain.losses, clipped.losses)
    held = runs.train(replace(setup, clip=0.5))
    assert held.vital("max_logit")[-1].max() < plain.vital("max_logit")[-1].max()
