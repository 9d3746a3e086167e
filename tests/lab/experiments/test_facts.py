"""Every figure the lessons state, against the lessons' own numbers.

Samples are as small as a slider needs, so sampled figures are means over several seeds; the
tolerance is then four standard errors, or half a unit of the figure's last digit if that is wider.
"""

import math
from statistics import fmean

import pytest
import torch
from torch.nn import functional as F

import scaledot
from scaledot.lab import experiments
from scaledot.lab.experiments import normal_products
from scaledot.lab.experiments.gradients import row_sizes

near = pytest.approx
SEEDS = range(8)


def claims(result):
    return {found.key: found for found in result.claims}


def mean_of(lesson, path, seeds=SEEDS, **arguments):
    """The mean over seeds of a field, its path with dots."""
    values = []
    for seed in seeds:
        value = lesson(seed=seed, **arguments)
        for name in path.split("."):
            value = getattr(value, name)
        values.append(value)
    return fmean(values)


# 1. The flow


def test_flow_has_the_shapes_of_the_notes():
    result = experiments.flow()
    assert result.tokens == ("Love", "Apple", "phones")
    shapes = result.shapes
    assert shapes["embeddings"] == (3, 512)
    assert shapes["w_q"] == shapes["w_k"] == shapes["w_v"] == (512, 64)
    assert shapes["q"] == shapes["k"] == shapes["v"] == shapes["context"] == (3, 64)
    assert shapes["scores"] == shapes["scaled"] == shapes["weights"] == (3, 3)
    assert shapes["joined"] == shapes["output"] == (3, 512)
    assert result.divisor == near(8.0)


def test_flow_ends_in_another_shape_than_it_began():
    found = claims(experiments.flow())
    assert (found["same_shape"].folklore, found["same_shape"].measured) == ((3, 512), (3, 64))
    assert not found["same_shape"].agrees
    assert found["joined_shape"].agrees
    assert claims(experiments.flow(heads=1))["same_shape"].agrees  # one head is as wide as it all


@pytest.mark.parametrize("rule", ["none", "sqrt_dk", "dk", "sqrt_dmodel", "cosine"])
def test_flow_boxes_follow_from_each_other(rule):
    result = experiments.flow(sentence="a b c d", d_model=64, heads=8, rule=rule)  # 8 columns: all
    q, k, v, scores, scaled, weights, context = (
        torch.tensor(getattr(result, name))
        for name in ("q", "k", "v", "scores", "scaled", "weights", "context")
    )
    torch.testing.assert_close(scores, q @ k.T)
    expected = F.cosine_similarity(q[:, None], k[None], dim=-1)
    if rule != "cosine":
        expected = scores / result.divisor
    torch.testing.assert_close(scaled, expected)
    torch.testing.assert_close(weights, torch.softmax(scaled, -1))
    torch.testing.assert_close(context, weights @ v)
    entropy = -(weights * weights.log()).sum(-1)
    assert result.entropy == near(entropy.tolist(), rel=1e-4)
    assert result.top == tuple(weights.argmax(-1).tolist())


def test_flow_gives_a_word_the_same_vector_wherever_it_stands():
    result = experiments.flow(sentence="cat sees cat")
    assert result.embeddings[0] == result.embeddings[2] != result.embeddings[1]


@pytest.mark.parametrize(
    ("sentence", "tokens"),
    [
        ("मुझे हिन्दी पसंद है।", ("मुझे", "हिन्दी", "पसंद", "है", "।")),
        ("क्\u200dष, e\u0301t\u00e9 don't", ("क्\u200dष", ",", "e\u0301t\u00e9", "don", "'", "t")),
        ("I \u2764\ufe0f it", ("I", "\u2764\ufe0f", "it")),
    ],
)
def test_flow_keeps_the_marks_of_a_word(sentence, tokens):
    result = experiments.flow(sentence=sentence)
    assert result.tokens == tokens


def test_flow_says_what_is_wrong_with_a_sentence():
    with pytest.raises(ValueError, match="13 words and marks; type at most 12"):
        experiments.flow(sentence="a " * 13)
    with pytest.raises(ValueError, match="has no word"):
        experiments.flow(sentence="   ")


# 2. Small vectors


def test_vectors_by_hand():
    result = experiments.vectors()
    assert [row.dot for row in result.table[:4]] == near([0, -1, 0, 0])
    assert result.table[4].products == near((0.8, -0.77, -0.3, 1.17, 1.08))
    found = claims(result)
    assert found["by_hand"].agrees
    assert found["first_five"].agrees
    assert not found["cancel"].agrees
    assert result.zero_share == 6 / 16
    assert result.flipped_dot == near(4.0)


def test_vectors_of_other_numbers():
    result = experiments.vectors(q=(3.0, 4.0), k=(6.0, 8.0))
    assert (result.dot, result.cosine, result.q_norm, result.k_norm) == near((50, 1, 5, 10))
    assert experiments.vectors(q=(0.0,), k=(1.0,)).cosine == 0
    with pytest.raises(ValueError, match="q has 1 numbers but k has 2"):
        experiments.vectors(q=(1.0,), k=(1.0, 2.0))


# 3. Variance


@pytest.mark.parametrize(
    ("d_k", "figure"), [(2, 1.99), (16, 16.0), (64, 64.2), (128, 128), (512, 510), (1024, 1025)]
)
def test_variance_is_d_k(d_k, figure):
    results = [experiments.variance(d_k=d_k, samples=8000, seed=seed) for seed in SEEDS]
    number = sum(result.samples for result in results)
    error = d_k * math.sqrt((3 + 6 / d_k - 1) / number)
    measured = fmean(result.variance for result in results)
    assert measured == near(d_k, abs=4 * error)
    assert measured == near(figure, abs=5 * error)
    assert all(result.theory_variance == near(d_k) for result in results)


def test_typical_size_at_64_is_below_the_deviation():
    def mean(path):
        return mean_of(experiments.variance, path, d_k=64, samples=8000)

    assert mean("sd") == near(8.0, abs=0.1)
    assert mean("mean_abs") == near(6.36, abs=0.08)
    assert mean("median_abs") == near(5.36, abs=0.1)
    assert mean("above_8") == near(0.31, abs=0.01)
    assert mean("above_12") == near(0.13, abs=0.01)
    result = experiments.variance()
    assert result.theory_mean_abs == near(6.36, abs=5e-3)
    assert result.theory_median_abs == near(5.36, abs=0.02)  # a sample's figure: it is 5.342
    assert result.theory_above_8 == near(0.31, abs=5e-3)
    assert result.theory_above_12 == near(0.13, abs=5e-3)
    typical = claims(result)["typical"]
    assert (typical.folklore, typical.agrees) == (8.0, False)
    assert claims(result)["variance"].agrees


def test_ranges_of_two_and_five_dimensions_differ_by_the_root_of_their_ratio():
    ranges = claims(experiments.variance())["ranges"]
    assert ranges.measured == near(1.58, abs=0.03)
    assert ranges.theory == near(math.sqrt(5 / 2))
    assert ranges.folklore == near(171 / 46)
    assert not ranges.agrees


def test_derivation_holds_line_by_line():
    steps = {step.key: step for step in experiments.variance(d_k=256, samples=8000).derivation}
    assert [step.theory for step in steps.values()] == near([0, 1, 256, 1, 1 / 256])
    assert steps["mean_of_product"].measured == near(0, abs=0.02)
    assert steps["variance_of_product"].measured == near(1, abs=0.04)
    assert steps["variance_of_sum"].measured == near(256, rel=0.15)
    assert steps["divided_by_root"].measured == near(1, rel=0.15)
    assert steps["divided_by_width"].measured == near(1 / 256, rel=0.15)


def test_variance_scales_with_both_deviations():
    result = experiments.variance(d_k=16, sigma_q=2.0, sigma_k=0.5, samples=8000)
    assert result.theory_variance == near(16)
    wide = experiments.variance(d_k=16, sigma_q=2.0, sigma_k=3.0, samples=8000)
    assert wide.theory_variance == near(16 * 36)
    assert wide.variance == near(36 * result.variance, rel=1e-4)
    assert not claims(wide)["variance"].agrees  # d_k alone is not the variance
    assert wide.theory_above_8 == near(normal_products.tail(16, 8 / 6))


def test_division_brings_every_width_to_one():
    result = experiments.variance(scaled=True, samples=8000)
    assert result.curve.theory == near([1.0] * len(result.curve.d_k))
    assert result.curve.measured == near(result.curve.theory, rel=0.15)
    raw = experiments.variance(samples=8000).curve
    assert raw.theory == near([math.sqrt(d_k) for d_k in raw.d_k])


def test_histogram_counts_every_score():
    result = experiments.variance(d_k=2)
    assert sum(result.histogram.counts) == result.samples
    assert len(result.histogram.edges) == len(result.histogram.counts) + 1
    assert result.kurtosis > 4  # exactly Laplace: 6
    assert result.theory_kurtosis == 6


def test_scores_are_those_of_scaledot():
    """The sum of products is the score that attention forms."""
    generator = torch.Generator().manual_seed(0)
    entries = experiments.variance().samples * 64
    q, k = (torch.randn(2**19, generator=generator)[:entries].view(-1, 1, 64) for _ in range(2))
    scores = scaledot.vitals(q, k, scale="none").max_logit
    assert float(scores.var()) == near(experiments.variance().variance, rel=1e-4)


@pytest.mark.parametrize(("d", "t"), [(1, 0.5), (3, 2.0), (64, 8.0)])
def test_formulas_of_the_product_agree_with_a_long_sample(d, t):
    generator = torch.Generator().manual_seed(1)
    size = (torch.randn(200_000, d, generator=generator) * 1.0).mul_(
        torch.randn(200_000, d, generator=generator)
    ).sum(1).abs()  # fmt: skip
    assert normal_products.tail(d, t) == near(float((size > t).double().mean()), abs=5e-3)
    assert normal_products.mean_size(d) == near(float(size.mean()), rel=0.01)
    assert normal_products.median_size(d) == near(float(size.median()), rel=0.02)


# 4. Saturation


@pytest.mark.parametrize(
    ("scores", "divisor", "weights"),
    [
        ((12, 2, -1), 1, (0.9999523, 4.53978e-5, 2.26022e-6)),
        ((12, 2, -1), 8, (0.6741, 0.1931, 0.1327)),
        ((25, 2, -3), 1, (1 - 1.03e-10, 1.026e-10, 6.9e-13)),
        ((7, 3), 1, (0.982014, 0.017986)),
    ],
)
def test_weights_of_the_notes_rows(scores, divisor, weights):
    result = experiments.saturation(scores=scores, divisor=divisor)
    assert result.weights == near(weights, rel=3e-3)
    assert result.weights[0] == near(weights[0], rel=1e-4)
    assert result.max_probability == near(result.weights[result.top])


def test_folklore_of_the_scaled_row_is_wrong_and_its_order_impossible():
    found = claims(experiments.saturation())
    assert {key for key, row in found.items() if not row.agrees} == {"saturated", "scaled", "order"}
    assert found["scaled"].folklore == (0.59, 0.17, 0.24)
    assert found["scaled"].measured == near((0.6741, 0.1931, 0.1327), abs=5e-5)
    assert (found["order"].folklore, found["order"].measured) == (2, 1)


def test_exponentials_of_the_notes_are_right():
    table = experiments.saturation().table
    assert table[0].exponentials == near((162754.79, 7.38906, 0.367879), rel=1e-5)
    assert table[1].exponentials == near((4.48, 1.28, 0.88), abs=5e-3)
    found = claims(experiments.saturation())
    assert found["exponentials"].agrees
    assert found["scaled_exponentials"].agrees


def test_entropies_of_the_two_rows():
    assert experiments.saturation().entropy == near(5.3e-4, abs=5e-6)
    assert experiments.saturation(divisor=8).entropy == near(0.851, abs=5e-4)


# 5. The gradient


@pytest.mark.parametrize(
    ("scores", "slope", "digits"),
    [
        ((1.5, 0.25, -0.125), 0.2197, 5e-5),
        ((12, 2, -1), 4.8e-5, 5e-7),
        ((25, 2, -3), 1e-10, 5e-12),
        ((7, 3), 0.0177, 5e-5),
    ],
)
def test_slopes_of_the_notes_rows(scores, slope, digits):
    assert experiments.jacobian(scores=scores).slope == near(slope, abs=digits)


def test_jacobian_is_diag_p_minus_p_p():
    result = experiments.jacobian()
    p = torch.tensor(result.weights, dtype=torch.float64)
    torch.testing.assert_close(
        torch.tensor(result.matrix, dtype=torch.float64), p.diag() - p.outer(p)
    )
    assert result.diagonal == near((0.2197, 0.1558, 0.1151), abs=5e-5)
    assert result.trace == near(1 - float(p.square().sum()))
    assert result.passed == near(result.trace)
    found = claims(result)
    assert found["formula"].agrees
    assert found["quarter"].agrees
    assert result.steepest == near(0.25)
    assert not found["no_gradient"].agrees  # it passes less, not nothing


def test_most_unscaled_rows_are_silent_and_a_few_shout():
    def mean(path, **arguments):
        return mean_of(experiments.gradients, path, seeds=range(24), **arguments)

    assert mean("median") == near(0.006, abs=0.002)
    assert mean("mean") == near(1.32, rel=0.15)
    assert mean("p99") == near(17, rel=0.15)
    assert mean("below_1e3") == near(0.43, abs=0.02)
    assert mean("scaled.median") == near(0.27, abs=0.01)
    assert mean("scaled.p99") == near(0.60, abs=0.03)
    assert mean("scaled.below_1e3") == 0
    found = claims(experiments.gradients())
    assert not found["vanish"].agrees
    assert not found["explode"].agrees


@pytest.mark.parametrize("rule", ["sqrt_dk", "cosine"])
def test_claims_without_scaling_are_measured_without_it(rule):
    assert experiments.gradients(rule=rule).claims == experiments.gradients().claims


def test_rows_at_64():
    assert mean_of(experiments.gradients, "median", d_k=64) == near(0.48, rel=0.1)
    assert mean_of(experiments.gradients, "p99", d_k=64) == near(6.5, rel=0.1)
    assert mean_of(experiments.gradients, "below_1e3", d_k=64) == near(0.08, abs=0.01)


@pytest.mark.parametrize("rule", ["none", "sqrt_dk", "dk", "sqrt_dmodel", "cosine"])
def test_row_sizes_are_autograds(rule):
    generator = torch.Generator().manual_seed(3)
    q, k, v, loss = (torch.randn(2, n, 11, generator=generator) for n in (5, 7, 7, 5))
    q.requires_grad_()
    one, two, scale = q, k, rule
    if rule == "cosine":
        one, two, scale = F.normalize(q, dim=-1), F.normalize(k, dim=-1), "none"
    out = scaledot.attention(one, two, v, scale=scale, num_heads=8)
    (gradient,) = torch.autograd.grad(out, q, loss)
    expected = gradient.square().mean(-1).sqrt().flatten()
    torch.testing.assert_close(row_sizes(q.detach(), k, loss @ v.mT, rule), expected)


def test_gradient_histograms_count_every_row():
    result = experiments.gradients(d_k=1024)
    assert sum(result.counts) == sum(result.scaled.counts) == result.rows
    assert len(result.edges) == len(result.counts) + 1


# 6. Divisors


@pytest.mark.parametrize(
    ("rule", "sd", "top", "entropy"),
    [
        ("none", 8.0, 0.844, 0.148),
        ("sqrt_dk", 1.0, 0.25, 0.85),
        ("dk", 0.126, 0.078, 0.997),
        ("sqrt_dmodel", 0.356, 0.112, 0.979),
        ("cosine", 0.126, 0.078, 0.997),
    ],
)
def test_what_the_softmax_sees_under_each_rule(rule, sd, top, entropy):
    assert mean_of(experiments.divisors, f"{rule}.sd") == near(sd, rel=0.01)
    assert mean_of(experiments.divisors, f"{rule}.top") == near(top, rel=0.02)
    assert mean_of(experiments.divisors, f"{rule}.entropy_ratio") == near(entropy, abs=5e-3)


def test_share_of_saturated_rows():
    assert mean_of(experiments.divisors, "none.saturated") == near(0.29, abs=0.01)
    assert mean_of(experiments.divisors, "sqrt_dk.saturated") == 0


def test_divisors_are_those_of_scaledots_vitals():
    result = experiments.divisors(d_k=32, n=16)
    generator = torch.Generator().manual_seed(0)
    problems = result.samples // 16
    q, k = (torch.randn(problems, 1, 16, 32, generator=generator) for _ in range(2))
    for rule in ("none", "sqrt_dk", "dk", "sqrt_dmodel"):
        vitals = scaledot.vitals(q, k, scale=rule, num_heads=8).over_batch()
        row = getattr(result, rule)
        assert row.sd == near(float(vitals.logit_std), rel=1e-3)
        assert row.top == near(float(vitals.top_p), rel=1e-3)
        assert row.entropy_ratio == near(float(vitals.entropy_ratio), rel=1e-3)
        assert row.saturated == near(float(vitals.saturated), abs=1e-3)


def test_sqrt_dmodel_only_ever_over_corrects():
    result = experiments.divisors()
    by_heads = {row.heads: row.sd for row in result.head_counts}
    assert by_heads[1] == near(1.0, abs=0.02)
    assert by_heads[8] == near(0.354, abs=5e-3)
    assert by_heads[96] == near(0.102, abs=2e-3)
    found = claims(result)["under_or_over"]
    assert (found.measured, found.agrees) == ("over", False)


def test_d_k_is_right_for_aligned_vectors():
    result = experiments.divisors()
    assert result.aligned_dk == near(1.0, abs=0.02)
    assert result.aligned_none == near(64, rel=0.02)
    found = claims(result)
    assert found["dk_too_flat"].agrees
    assert not found["dk_always_flat"].agrees
    assert found["unit"].agrees


# 7. Heads


def test_head_widths_of_three_models():
    presets = {row.name: row.d_k for row in experiments.heads().presets}
    assert presets == {"transformer": 64, "gpt2": 64, "gpt3": 128}


@pytest.mark.parametrize(("preset", "sd"), [("transformer", 0.354), ("gpt3", 0.102)])
def test_wrong_divisor_shrinks_scores_by_the_root_of_heads(preset, sd):
    result = experiments.heads(preset=preset)
    assert result.sd_wrong == near(sd, rel=0.02)
    assert result.theory_sd_wrong == near(sd, abs=5e-4)
    assert result.sd_right == near(1.0, rel=0.02)
    assert not claims(result)["wrong_rule"].agrees
    assert claims(experiments.heads(heads=1))["wrong_rule"].agrees


@pytest.mark.parametrize("heads", [1, 8, 64])
def test_heads_one_by_one_are_the_module(heads):
    result = experiments.heads(heads=heads)
    assert result.difference < 1e-5
    assert result.torch_difference < 1e-5
    assert claims(result)["one_by_one"].agrees


def test_heads_must_divide_the_model():
    with pytest.raises(ValueError, match="d_model 192 is no multiple of heads 128"):
        experiments.heads(d_model=192, heads=128)


# 8. Scores


def test_additive_scores_are_bounded_by_the_norm_of_v():
    assert experiments.scores().expected_bound == near(4.0)
    assert experiments.scores(v_init="normal").expected_bound == near(51.1, abs=0.05)
    bounds = mean_of(experiments.scores, "additive.bound", v_init="normal", seeds=range(20))
    assert bounds == near(51.1, abs=4.5)  # its deviation is 4.8: four errors of 20 seeds
    assert mean_of(experiments.scores, "additive.bound", seeds=range(20)) == near(4.0, abs=0.3)
    for v_init in ("linear", "normal"):
        result = experiments.scores(v_init=v_init)
        found = claims(result)
        assert not found["tanh_bound"].agrees
        assert found["bounded"].agrees
        assert result.additive.largest < result.additive_large <= result.additive.bound * 1.00001


def test_additive_deviations():
    seeds = range(20)
    assert mean_of(experiments.scores, "additive.sd", seeds=seeds) == near(0.36, abs=0.03)
    narrow = mean_of(experiments.scores, "additive.sd", seeds=seeds, v_init="normal")
    assert narrow == near(5.0, abs=0.5)
    wide = mean_of(experiments.scores, "additive.sd", seeds=range(8), v_init="normal", width=512)
    assert wide == near(14.1, abs=1.2)  # sqrt(8) times: it grows with the width too


def test_cosine_can_give_no_weight_above_a_third_of_16_keys():
    result = experiments.scores()
    assert result.cosine_limit == near(0.33, abs=5e-3)
    assert result.cosine_limit_zero == near(0.15, abs=5e-3)
    assert result.cosine.max_weight < result.cosine_limit
    assert claims(result)["cosine_limit"].agrees
    assert mean_of(experiments.scores, "cosine.sd") == near(1 / 8, rel=0.05)


def test_scaled_dot_is_cosine_times_root_d():
    assert claims(experiments.scores())["identity"].agrees


def test_size_moves_dots_but_not_bounds():
    small, large = experiments.scores(), experiments.scores(size=3.0)
    assert large.dot.sd == near(9 * small.dot.sd, rel=1e-3)
    assert large.cosine.sd == near(small.cosine.sd, rel=1e-3)
    assert large.additive.bound == small.additive.bound


@pytest.mark.nightly
def test_times_are_measured_only_when_asked():
    assert experiments.scores().additive.milliseconds is None
    result = experiments.scores(measure=True)
    assert claims(result)["slower"].agrees
    assert result.additive.milliseconds > result.dot.milliseconds > 0


# 9. LayerNorm


def test_layernormed_vectors_still_need_the_division():
    result = experiments.layernorm()
    assert result.norm == near(8.0, rel=1e-4)
    assert result.norms == near((8.0, 8.0, 8.0), rel=1e-3)
    assert result.theory_sd_raw == near(8.06, abs=5e-3)
    assert mean_of(experiments.layernorm, "sd_raw") == near(8.06, abs=0.1)
    found = claims(result)
    assert not found["enough"].agrees
    assert found["deviation"].agrees


def test_qk_norm_stops_what_layernorm_does_not():
    grown = experiments.layernorm(growth=4.0)
    assert grown.sd_scores == near(16, rel=0.1)
    assert claims(grown)["stays"].measured == near(grown.sd_scores, rel=1e-4)
    held = experiments.layernorm(growth=4.0, qk_norm=True)
    assert held.sd_scores == near(1.0, rel=0.1)
    assert experiments.layernorm(qk_norm=True, gain=2.0).sd_scores == near(4.0, rel=0.1)


@pytest.mark.parametrize(
    "given", [{}, {"seed": 3}, {"layernorm": False, "qk_norm": True, "growth": 8.0}, {"d": 8}]
)
def test_layernorm_alone_never_keeps_the_scores_in_check(given):
    stays = claims(experiments.layernorm(**given))["stays"]
    assert (stays.theory, stays.agrees) == (16.0, False)
    assert stays.measured == near(16, rel=0.3)


@pytest.mark.parametrize("layernorm", [True, False])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_theory_of_every_switch(layernorm, qk_norm):
    def mean(path):
        return mean_of(experiments.layernorm, path, layernorm=layernorm, qk_norm=qk_norm)

    assert mean("sd_raw") == near(mean("theory_sd_raw"), rel=0.04)
    assert mean("sd_scores") == near(mean("theory_sd_scores"), rel=0.06)
    assert mean("norm") == near(mean("theory_norm"), rel=0.02)


# 10. Overflow


@pytest.mark.parametrize(
    ("dtype", "figure"),
    [("float16", 11.09), ("bfloat16", 88.72), ("float32", 88.72), ("float64", 709.78)],
)
def test_thresholds_of_exp(dtype, figure):
    rows = {row.dtype: row for row in experiments.overflow().thresholds}
    assert rows[dtype].theory == near(figure, abs=6e-3)
    assert rows[dtype].largest == near(figure, rel=6e-3)  # bfloat16 counts in halves there
    kind = getattr(torch, dtype)
    largest = torch.tensor(rows[dtype].largest, dtype=kind)
    assert largest.exp().isfinite()
    assert torch.nextafter(largest, torch.tensor(math.inf, dtype=kind)).exp().isinf()


def test_naive_float16_breaks_at_the_notes_scores():
    result = experiments.overflow()
    assert result.scores == near((12, 2, -1))
    assert math.isnan(result.naive[0])
    assert result.naive[1:] == (0.0, 0.0)
    assert result.safe[0] > 0.99
    assert result.disease == "both"


def test_each_cure_cures_its_own_disease():
    assert experiments.overflow(subtract_max=True).disease == "saturation"
    assert experiments.overflow(size=200.0, divisor=64.0).disease == "none"
    assert experiments.overflow(size=1000.0, divisor=64.0).disease == "both"
    assert experiments.overflow(dtype="float32").disease == "saturation"
    assert experiments.overflow(size=1.0).disease == "none"
    found = claims(experiments.overflow())
    assert found["thresholds"].agrees
    assert found["thresholds"].measured[1] == 88.5
    assert (found["why_scale"].measured, found["why_scale"].agrees) == ("saturation", False)
    assert not found["scaling_cures"].agrees


# 11. The assumption


@pytest.mark.parametrize(
    ("init", "scaled", "raw"),
    [("unit", 1.0, 8.0), ("mha", 0.5, 4.0), ("linear", 0.33, 2.7), ("gpt2", 0.31, 2.5)],
)
def test_deviation_of_scaled_scores_under_four_initialisations(init, scaled, raw):
    assert mean_of(experiments.assumption, "sd_scaled", init=init) == near(scaled, rel=0.04)
    assert mean_of(experiments.assumption, "sd_raw", init=init) == near(raw, rel=0.04)
    result = experiments.assumption(init=init)
    assert result.theory_scaled == near(scaled, rel=0.02)
    assert claims(result)["unit"].agrees == (init == "unit")


def test_vitals_see_the_deviation_and_the_limit():
    result = experiments.assumption()
    assert result.logit_std == near(result.sd_scaled, rel=1e-3)
    assert result.limit == near(math.sqrt(2 * math.log(64)))
    assert claims(result)["frozen"].agrees
    grown = experiments.assumption(sigma_q=3.0, sigma_k=3.0)
    assert grown.row_std > grown.limit
    assert claims(grown)["frozen"].measured == "frozen"
    small = experiments.assumption(sigma_q=0.1, sigma_k=0.1)  # nearly a plain average of all keys
    assert small.entropy_ratio > small.flat_entropy_ratio
    assert (claims(small)["frozen"].measured, claims(small)["frozen"].agrees) == ("flat", False)


@pytest.mark.parametrize("init", ["mha", "linear"])
def test_initialisations_are_torchs(init):
    """The deviation of a weight, against a module that torch has initialised."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = (
            torch.nn.MultiheadAttention(192, 6).in_proj_weight
            if init == "mha"
            else torch.nn.Linear(192, 192).weight
        )
    result = experiments.assumption(init=init, d_model=192, heads=6)
    assert float(module.detach().std()) == near(result.weight_sd, rel=0.01)
