"""Random calls on Triton against the float64 oracle; `python -m fuzz --engine triton` runs more."""

import pytest
from fuzz.cases import draw, near, smaller
from fuzz.checks import check

CASES, CHUNK = 10, 2


@pytest.mark.parametrize("first", range(0, CASES, CHUNK))
def test_triton_agrees_with_the_oracle(first):
    reports = []
    for index in range(first, first + CHUNK):
        case = near(smaller(draw(26, index), most=8))
        outcome = check(case, "triton")
        if outcome.faults:
            repeat = f'python -m fuzz --engine triton --only "{case}"'
            reports.append("\n  ".join([repeat, *outcome.faults]))
    assert not reports, "\n" + "\n".join(reports)
