"""The numbers the demo shows, each against the value that theory or a long sample gives."""

import dataclasses
import math

import pytest
import torch

import scaledot
from scaledot.lab.experiments import story
from scaledot.lab.experiments.finding import compare

near = pytest.approx


# Small vectors


@pytest.mark.parametrize(
    ("index", "query", "key", "product"),
    [
        (0, (1, -1), (1, 1), 0),
        (1, (2, -1), (1, 3), -1),
        (2, (1, -1, 1, -1), (1, 1, 1, 1), 0),
        (3, (2, -1, 2, -1), (1, 2, 1, 2), 0),
    ],
)
def test_small_products_are_those_done_by_hand(lessons, index, query, key, product):
    row = lessons.small_vectors.products[index]
    assert (row.query, row.key, row.finding.measured) == (query, key, product)
    assert row.finding.agree


def test_first_five_terms_are_those_done_by_hand(lessons):
    five = lessons.small_vectors.first_five
    assert five.terms == near((0.8, -0.77, -0.3, 1.17, 1.08))
    assert five.finding.agree


def test_a_product_of_zero_is_luck_not_law(lessons):
    lesson = lessons.small_vectors
    assert lesson.flipped.finding.measured == 4
    (cancels,) = lesson.findings
    assert cancels.measured == cancels.theory == 6 / lesson.sign_choices
    assert not cancels.agree


# Variance


@pytest.mark.parametrize(
    ("index", "d_k"), [(0, 2), (1, 16), (2, 64), (3, 128), (4, 512), (5, 1024)]
)
def test_variance_of_the_dot_product_is_d_k(lessons, index, d_k):
    row = lessons.variance.widths[index]
    assert row.d_k == row.finding.theory == d_k
    assert row.finding.measured == near(d_k, rel=0.006)
    assert row.finding.agree


def test_every_step_of_the_derivation_holds(lessons):
    steps = lessons.variance.derivation
    assert steps.mean_of_term.measured == near(0, abs=0.003)
    assert steps.variance_of_term.measured == near(1, rel=0.006)
    assert steps.variance_of_sum.measured == near(64, rel=0.006)
    assert steps.divided_by_root.measured == near(1, rel=0.006)
    assert steps.divided_by_width.measured == near(1 / 64, rel=0.006)


def test_scaling_divides_the_variance_by_the_square_of_the_divisor(lessons):
    steps = lessons.variance.derivation
    assert steps.divided_by_root.measured == near(steps.variance_of_sum.measured / 64, rel=1e-5)
    assert steps.divided_by_width.measured == near(steps.variance_of_sum.measured / 64**2, rel=1e-5)


def test_eight_is_the_deviation_at_64_not_the_typical_size(lessons):
    typical = lessons.variance.typical
    assert typical.standard_deviation.measured == near(8, abs=0.03)
    assert typical.mean_size.measured == near(6.36, abs=0.02)
    assert typical.median_size.measured == near(5.34, abs=0.025)
    assert typical.above_one_sd.measured == near(0.31, abs=0.005)
    assert typical.above_one_and_a_half.measured == near(0.13, abs=0.005)
    assert not lessons.variance.findings[0].agree


def test_theory_of_sizes_is_that_of_a_normal_where_vectors_are_wide():
    from scaledot.lab.experiments import dot_product

    d_k = 10_000
    assert dot_product._mean_size(d_k) == near(math.sqrt(2 * d_k / math.pi), rel=1e-4)
    assert dot_product._median_size(d_k) == near(0.67449 * math.sqrt(d_k), rel=1e-3)
    assert dot_product._tail(d_k, 100.0) == near(math.erfc(1 / math.sqrt(2)), rel=1e-3)


def test_a_range_belongs_to_the_sample_and_the_deviation_to_the_width(lessons):
    few_2, many_2, few_5, many_5 = lessons.variance.spreads
    for few, many in ((few_2, many_2), (few_5, many_5)):
        assert many.high - many.low > 1.5 * (few.high - few.low)
        assert many.standard_deviation == near(math.sqrt(many.d_k), rel=0.02)
    ranges = lessons.variance.findings[1]
    assert ranges.measured == near(1.58, abs=0.02)
    assert ranges.theory == near(math.sqrt(5 / 2))
    assert not ranges.agree


# Saturation


@pytest.mark.parametrize(
    ("index", "logits", "weights", "agree"),
    [
        (0, (12, 2, -1), (0.9999523, 4.53978e-5, 2.26022e-6), False),
        (1, (1.5, 0.25, -0.125), (0.6741, 0.1931, 0.1327), False),
        (2, (25, 2, -3), (1 - 1.03e-10, 1.026e-10, 6.9e-13), True),
        (3, (7, 3), (0.982014, 0.017986), True),
    ],
)
def test_weights_are_the_softmax_and_not_always_the_claim(lessons, index, logits, weights, agree):
    row = lessons.saturation.rows[index]
    assert row.logits == logits
    assert row.weights.measured == near(weights, rel=5e-4)
    assert row.weights.measured == near(row.weights.theory, rel=1e-12)
    assert math.fsum(row.weights.measured) == near(1)
    assert row.weights.agree is agree


def test_what_saturation_leaves_over_is_right_to_three_digits(lessons):
    first, *_ = lessons.saturation.rows[2].weights.measured
    assert 1 - first == near(1.033e-10, rel=1e-3)


@pytest.mark.parametrize(
    ("index", "powers"), [(0, (162754.79, 7.389, 0.3679)), (1, (4.4817, 1.2840, 0.8825))]
)
def test_the_claimed_exponentials_are_right(lessons, index, powers):
    exponentials = lessons.saturation.rows[index].exponentials
    assert exponentials.measured == near(powers, rel=1e-4)
    assert exponentials.agree


def test_the_lowest_score_never_gets_the_second_weight(lessons):
    for row in lessons.saturation.rows:
        by_score = [
            weight for _, weight in sorted(zip(row.logits, row.weights.measured, strict=True))
        ]
        assert by_score == sorted(by_score)
    claim = lessons.saturation.rows[1].weights.claim
    assert claim[2] > claim[1]


# Gradient


@pytest.mark.parametrize(
    ("index", "slope"), [(0, 0.2197), (1, 4.766e-5), (2, 1.033e-10), (3, 0.01766)]
)
def test_slope_of_a_weight_is_p_times_one_minus_p(lessons, index, slope):
    row = lessons.gradient.slopes[index]
    assert row.winner.measured == near(slope, rel=1e-3)
    assert row.winner.agree
    assert row.trace.agree
    assert row.passes == near(row.trace.measured, rel=1e-5)
    assert row.jacobian_error < 1e-15


def test_slope_is_at_most_a_quarter(lessons):
    steepest = lessons.gradient.findings[0]
    assert steepest.measured == near(0.25)
    assert steepest.agree


def test_without_scaling_most_rows_whisper_and_a_few_shout(lessons):
    unscaled, scaled = lessons.gradient.unscaled, lessons.gradient.scaled
    assert unscaled.median == near(0.0065, abs=0.002)
    assert unscaled.silent == near(0.42, abs=0.02)
    assert unscaled.percentile_99 == near(16.5, abs=1.5)
    assert scaled.median == near(0.27, abs=0.005)
    assert scaled.percentile_99 == near(0.62, abs=0.03)
    assert scaled.silent == 0
    vanishes, explodes = lessons.gradient.findings[1:]
    assert (vanishes.agree, explodes.agree) == (False, False)


def test_every_row_is_in_one_decade(lessons):
    for rows in (lessons.gradient.unscaled, lessons.gradient.scaled):
        assert math.fsum(rows.histogram) == near(1)
    assert sum(lessons.gradient.unscaled.histogram[:4]) == near(lessons.gradient.unscaled.silent)


# Divisors


@pytest.mark.parametrize(
    ("index", "rule", "deviation", "top_p", "entropy_ratio"),
    [
        (0, "none", 8.0, 0.844, 0.148),
        (1, "sqrt_dk", 1.0, 0.246, 0.85),
        (2, "dk", 0.125, 0.0775, 0.997),
        (3, "sqrt_dmodel", 0.354, 0.1115, 0.979),
    ],
)
def test_each_divisor_has_its_deviation_top_weight_and_entropy(
    lessons, index, rule, deviation, top_p, entropy_ratio
):
    row = lessons.divisors.rules[index]
    assert row.rule == rule
    assert row.standard_deviation.measured == near(deviation, rel=0.01)
    assert row.standard_deviation.agree
    assert row.top_p == near(top_p, rel=0.02)
    assert row.entropy_ratio == near(entropy_ratio, abs=0.005)


def test_model_width_only_ever_overcorrects_by_the_root_of_the_heads(lessons):
    counts = {row.heads: row.standard_deviation for row in lessons.divisors.head_counts}
    assert counts[8] == near(0.354, abs=0.003)
    assert counts[96] == near(0.102, abs=0.001)
    unit = lessons.divisors.rules[1].standard_deviation.measured
    for heads, deviation in counts.items():
        assert deviation == near(unit / math.sqrt(heads), rel=1e-5)
    assert not lessons.divisors.findings[2].agree


def test_dividing_by_d_k_is_flat_for_strangers_and_right_for_twins(lessons):
    _, width, _ = lessons.divisors.findings
    assert not width.agree
    assert width.measured == near(0.125, rel=0.01)
    assert lessons.divisors.aligned.dk == near(1, rel=0.01)
    assert lessons.divisors.aligned.sqrt_dk == near(8, rel=0.01)


# Vital signs


def test_scaling_brings_every_vital_sign_into_its_band(lessons):
    readings = {reading.name: reading for reading in lessons.vital_signs.readings}
    assert all(reading.scaled_healthy is not False for reading in readings.values())
    for name in ("logit_std", "row_std", "entropy_ratio", "passes", "top_p"):
        assert readings[name].unscaled_healthy is False


def test_vital_signs_are_those_of_the_call(lessons):
    lesson = lessons.vital_signs
    generator = torch.Generator().manual_seed(0)
    shape = (1, 1, lesson.tokens, lesson.d_k)
    query, key = (torch.randn(shape, generator=generator) for _ in range(2))
    unscaled = scaledot.vitals(query, key, scale="none")
    scaled = scaledot.vitals(query, key)
    for reading in lesson.readings:
        assert reading.unscaled == near(float(getattr(unscaled, reading.name)), rel=1e-4, abs=1e-6)
        assert reading.scaled == near(float(getattr(scaled, reading.name)), rel=1e-4, abs=1e-6)


# All of them


@pytest.mark.one_case
@pytest.mark.slow
@pytest.mark.parametrize("lesson", story.LESSONS, ids=lambda lesson: lesson.__name__)
def test_a_lesson_repeats_itself_and_leaves_the_global_generator_alone(lessons, lesson):
    before = torch.get_rng_state()
    again = lesson(seed=0)
    assert again == getattr(lessons, lesson.__name__)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.one_case
@pytest.mark.parametrize("lesson", story.LESSONS, ids=lambda lesson: lesson.__name__)
def test_verdicts_do_not_depend_on_the_seed(lessons, lesson):
    other = lesson(seed=20_170_612)
    assert _verdicts(other) == _verdicts(getattr(lessons, lesson.__name__))


@pytest.mark.slow
@pytest.mark.parametrize("lesson", story.LESSONS, ids=lambda lesson: lesson.__name__)
def test_a_lesson_cannot_be_changed(lessons, lesson):
    record = getattr(lessons, lesson.__name__)
    field = dataclasses.fields(record)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, field, None)


def test_a_claim_agrees_up_to_half_a_unit_of_its_last_digit():
    assert compare("key", 0.982014, claim=0.98, within=5e-3).agree
    assert not compare("key", 0.982014, claim=0.97, within=5e-3).agree
    assert not compare("key", (0.5, 0.5), claim=(0.5, 0.6), within=5e-3).agree


def test_without_a_claim_the_theory_is_put_to_the_test():
    assert compare("key", 1.001, theory=1.0, within=0.01).agree
    assert not compare("key", 1.1, theory=1.0, within=0.01).agree


def test_a_measurement_alone_is_no_finding():
    with pytest.raises(ValueError, match="nothing to compare lonely with"):
        compare("lonely", 1.0, within=0.1)


def _verdicts(value) -> list[tuple[str, bool]]:
    if isinstance(value, story.Finding):
        return [(value.key, value.agree)]
    if dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    return [pair for item in value for pair in _verdicts(item)] if _is_sequence(value) else []


def _is_sequence(value) -> bool:
    return isinstance(value, (list, tuple))
