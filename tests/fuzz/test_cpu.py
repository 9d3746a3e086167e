"""Compare random calls on every engine of the CPU; SCALEDOT_FUZZ_SEED=7 draws others."""

import os

import pytest

from fuzz.cases import draw, fit
from fuzz.checks import check

SEED = int(os.environ.get("SCALEDOT_FUZZ_SEED", "26"))
CASES = int(os.environ.get("SCALEDOT_FUZZ_CASES", "480"))
CHUNK = 20  # cases of one test: few enough to be shared out to several processes
ENGINES = ("cpu-native", "cpu-tiles", "dispatched")


@pytest.mark.parametrize("first", range(0, CASES, CHUNK))
def test_every_engine_agrees_with_the_oracle(first):
    reports = []
    for index in range(first, min(first + CHUNK, CASES)):
        engine = ENGINES[index % len(ENGINES)]
        case = fit(draw(SEED, index), engine)
        outcome = check(case, engine)
        if outcome.faults:
            repeat = f'python -m fuzz --engine {engine} --only "{case}"'
            reports.append("\n  ".join([repeat, *outcome.faults]))
    assert not reports, "\n" + "\n".join(reports)
