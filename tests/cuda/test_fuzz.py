"""Random calls on Triton against the float64 oracle; `python -m fuzz --engine triton` runs more."""

from dataclasses import replace

import pytest
from fuzz.cases import Case, draw, near, smaller
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


@pytest.mark.parametrize(
    ("mask", "mask_type"), [("bool", None), ("minus_inf", "float16"), ("float", "bfloat16")]
)
def test_a_mask_narrower_than_float64(mask, mask_type):
    """Its numbers take a way of their own into the products (logits.masked_pairs)."""
    case = Case(queries=5, keys=19, dtype="float64", with_vitals=True)
    case = replace(case, mask=mask, mask_type=mask_type, mask_shape=(5, 19))
    assert not check(case, "triton").faults
