"""Random calls on Triton against the float64 oracle; `python -m fuzz --engine triton` runs more."""

from dataclasses import replace

import pytest
from fuzz.cases import Case, draw, smaller
from fuzz.checks import check

CASES, CHUNK = 10, 2


@pytest.mark.one_case
@pytest.mark.parametrize("first", range(0, CASES, CHUNK))
def test_triton_agrees_with_the_oracle(first):
    reports = []
    for index in range(first, first + CHUNK):
        case = smaller(draw(26, index), most=8)
        outcome = check(case, "triton")
        if outcome.faults:
            repeat = f'python -m fuzz --engine triton --only "{case}"'
            reports.append("\n  ".join([repeat, *outcome.faults]))
    assert not reports, "\n" + "\n".join(reports)


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("mask", "mask_type"), [("bool", None), ("minus_inf", "float16"), ("float", "bfloat16")]
)
def test_a_mask_narrower_than_float64(mask, mask_type):
    """Its numbers take a way of their own into the products (logits.masked_pairs)."""
    case = Case(queries=5, keys=19, dtype="float64", with_vitals=True)
    case = replace(case, mask=mask, mask_type=mask_type, mask_shape=(5, 19))
    assert not check(case, "triton").faults


WIDE = Case(width=32, value_width=32, dtype="float16", queries=17, keys=17, is_causal=True)
FAR = replace(WIDE, level=1e4, common=True, value_size=100.0, scale="negative_heads")
PACKED = replace(
    WIDE,
    width=64,
    value_width=64,
    dtype="bfloat16",
    is_causal=False,
    query_lead=(2,),
    key_lead=(2,),
    value_lead=(2,),
    queries=14,
    keys=14,
    packed=((9, 9), (5, 5)),
    level=100.0,
    scale=-0.4,
)
GROUPED = Case(
    query_lead=(1, 4),
    queries=9,
    keys=21,
    dtype="bfloat16",
    gqa=True,
    level=1e4,
    common=True,
    scale="heads",
)


@pytest.mark.parametrize(
    "case",
    [replace(FAR, seed=1), replace(FAR, seed=8), replace(PACKED, seed=9), replace(GROUPED, seed=2)],
    ids=["query", "scale", "packed", "grouped"],
)
def test_gradients_of_rows_far_from_zero(case):
    """By the forward pass's own lse and output they were four times and more as far off."""
    assert not check(case, "triton").faults


BROKEN = Case(queries=3, keys=20, width=5, value_width=5, dtype="float16", value_size=100.0)


@pytest.mark.parametrize(
    "case",
    [
        replace(BROKEN, key_lead=(2, 1), value_lead=(2, 1), query_lead=(1, 1), key_lengths=(1, 18)),
        replace(BROKEN, queries=13, keys=13, is_causal=True, softcap=3.0),
        replace(BROKEN, queries=13, keys=13, window=(2, 1), softcap=3.0),
    ],
    ids=["lengths", "capped", "window"],
)
@pytest.mark.parametrize("bad", [("query", "nan", "visible"), ("query", "inf", "visible")], ids=str)
def test_hidden_keys_get_no_gradient_from_a_broken_query(case, bad):
    """A length hides keys of a block as a mask does; and a cap's slope at infinity is NaN."""
    assert not check(replace(case, bad=bad), "triton").faults


ADDITIVE = Case(
    query_lead=(2,), key_lead=(2,), value_lead=(2,), queries=9, keys=17, width=5, value_width=6
)


@pytest.mark.parametrize(
    "case",
    [
        replace(ADDITIVE, dtype="float64", mask="lowest", mask_shape=(1, 1), level=1e4),
        replace(ADDITIVE, dtype="bfloat16", level=1000.0, common=True, value_size=100.0),
    ],
    ids=["lowest", "common"],
)
def test_additive_gradients_of_rows_far_from_zero(case):
    assert not check(replace(case, additive="heads"), "triton").faults


REPAIRED = Case(queries=40, keys=40, width=16, value_width=16, level=1e4, common=True)


@pytest.mark.one_case
@pytest.mark.parametrize(
    "case",
    [
        replace(REPAIRED, level=1e6, window=(2, 1), bad=("value", "nan", "hidden")),
        replace(
            REPAIRED, level=1e6, mask="bool", mask_shape=(40, 40), bad=("value", "inf", "anywhere")
        ),
        replace(REPAIRED, window=(16, 7), bad=("key", "inf", "anywhere")),
    ],
    ids=["window", "mask", "key"],
)
def test_rows_computed_again_far_from_zero(case):
    """Their weights summed to 1.1: logits were rounded in another order than those in the sum."""
    assert not check(case, "triton").faults


WINDOWED = Case(
    seed=1049016530,
    query_lead=(2, 2, 2),
    key_lead=(2,),
    value_lead=(2,),
    queries=117,
    keys=117,
    width=16,
    value_width=16,
    level=0.01,
    mask="bool",
    mask_shape=(2, 2, 2, 1, 117),
    window=(21, 1),
    scale="heads",
    layouts=("more_tokens", "more_tokens", "plain"),
)
NEAR = Case(queries=17, keys=33, width=13, value_width=13, dtype="float16", level=0.01)
NEAR = replace(NEAR, value_size=100.0)


@pytest.mark.one_case
@pytest.mark.parametrize(
    "case",
    [
        replace(NEAR, scale="one_0d"),
        replace(NEAR, scale="heads", mask="bool", mask_shape=(33,)),
        replace(NEAR, scale="one_0d", additive="heads"),
        WINDOWED,
    ],
    ids=["one", "mask", "additive", "window"],
)
def test_the_scale_s_gradient_where_logits_are_small(case):
    """The output's rounding, times the scores' distance from the lse, was larger than it."""
    assert not check(case, "triton").faults


@pytest.mark.one_case
def test_a_broken_row_past_those_in_reach_breaks_no_key():
    """It lies in the last tile of rows all the same."""
    case = Case(seed=8, queries=71, keys=112, width=80, value_width=5, dtype="float64")
    case = replace(case, is_causal=True, causal_align="bottom_right", window=(3, 66))
    case = replace(case, mask="bool", mask_shape=(71, 112), bad=("query", "-inf", "anywhere"))
    assert not check(case, "triton").faults
