"""Every field of Vitals, for every argument, against the dense float64 oracle."""

import math
from dataclasses import replace

import oracle
import pytest
import torch

import scaledot
from conformance.agreement import assert_output_agrees, assert_vitals_agree, rounding
from conformance.calls import Call, call, draw

LOWEST = {
    t: torch.finfo(t).min for t in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
}

SEEDED = torch.Generator().manual_seed(20_17)  # for the tensors in parametrize, made at import


def assert_call_agrees(c: Call):
    """attention, attention_with_vitals and vitals, all against the oracle."""
    expected = oracle.diagnose(c.query, c.key, **c.keywords)
    out, with_output = scaledot.attention_with_vitals(*c.tensors, **c.keywords, per_row=True)
    assert_output_agrees(
        [out, scaledot.attention(*c.tensors, **c.keywords)], *c.tensors, **c.keywords
    )
    assert_vitals_agree(with_output, expected, per_row=True)
    assert_vitals_agree(scaledot.vitals(c.query, c.key, **c.keywords), expected)


# --- plain calls ---------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [1, 2, 3, 31, 63, 64, 65, 127, 128, 129, 257])
@pytest.mark.parametrize("queries", [1, 3, 64, 67])
def test_fields_hold_at_every_length_around_a_tile(queries, keys):
    assert_call_agrees(call(lead=(1, 2), queries=queries, keys=keys, width=16))


@pytest.mark.parametrize("width", [1, 2, 3, 31, 64, 65, 129, 257])
@pytest.mark.parametrize("value_width", [1, 67])
def test_fields_hold_at_every_width(width, value_width):
    assert_call_agrees(call(width=width, value_width=value_width, queries=7, keys=13))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_fields_hold_in_every_type(dtype, is_causal):
    assert_call_agrees(call(queries=65, keys=67, width=32, dtype=dtype, is_causal=is_causal))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_vitals_are_float32_or_better(dtype):
    found = scaledot.vitals(*call(dtype=dtype).tensors[:2], per_row=True)
    for name in oracle.FLOAT_FIELDS:
        assert getattr(found, name).dtype in (torch.float32, torch.float64)
    for name in oracle.ROW_FIELDS:
        assert getattr(found.per_row, name).dtype in (torch.float32, torch.float64)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 5, 3), (2, 1, 2, 3)])
def test_fields_have_the_leading_shape_of_the_query(lead):
    c = call(lead=lead, is_causal=True)
    assert scaledot.vitals(c.query, c.key).max_logit.shape == lead
    assert_call_agrees(c)


@pytest.mark.parametrize(
    ("query_lead", "key_lead"),
    [
        ((2, 3), (1, 3)),
        ((1, 3), (2, 3)),
        ((3,), (2, 3)),
        ((2, 3), (3,)),
        ((2, 3), ()),
        ((2, 1), (1, 3)),
        ((2, 1, 3), (5, 1)),
    ],
    ids=str,
)
def test_leading_dimensions_broadcast_as_in_torch(query_lead, key_lead):
    assert_call_agrees(
        Call(
            torch.randn(*query_lead, 7, 5),
            torch.randn(*key_lead, 11, 5),
            torch.randn(*key_lead, 11, 4),
        )
    )


def test_value_alone_may_have_more_leading_dimensions():
    c = Call(torch.randn(3, 7, 5), torch.randn(3, 11, 5), torch.randn(2, 3, 11, 4))
    assert_output_agrees(scaledot.attention(*c.tensors), *c.tensors)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("queries_keys", [(517, 1301), (64, 1500), (1, 1201), (1031, 331)], ids=str)
def test_fields_hold_over_many_key_tiles(queries_keys, is_causal):
    queries, keys = queries_keys
    assert_call_agrees(call(lead=(1, 2), queries=queries, keys=keys, width=16, is_causal=is_causal))


# --- who may see whom ----------------------------------------------------------------------------


@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
@pytest.mark.parametrize(
    "queries_keys",
    [(1, 1), (1, 7), (7, 1), (5, 5), (3, 7), (7, 3), (63, 65), (65, 63), (130, 67), (67, 130)],
    ids=str,
)
def test_causal_fields_hold_in_both_alignments(queries_keys, align):
    queries, keys = queries_keys
    assert_call_agrees(call(queries=queries, keys=keys, is_causal=True, causal_align=align))


@pytest.mark.parametrize(
    "window",
    [(0, 0), (2, 0), (0, 3), (5, 1), (None, 2), (4, None), (None, None), (1000, 1000), (63, 64)],
    ids=str,
)
@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_window_is_counted_from_the_aligned_diagonal(window, align, is_causal):
    for queries, keys in [(13, 13), (5, 17), (17, 5), (129, 67)]:
        assert_call_agrees(
            call(
                lead=(1, 2),
                queries=queries,
                keys=keys,
                window=window,
                causal_align=align,
                is_causal=is_causal,
            )
        )


@pytest.mark.parametrize("window", [(40, 0), (300, 17), (None, 5), (0, None), (3, 900)], ids=str)
@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
def test_window_fields_hold_over_many_key_tiles(window, align):
    queries = 1031 if align == "top_left" else 331
    assert_call_agrees(
        call(lead=(1, 1), queries=queries, keys=1031, width=16, window=window, causal_align=align)
    )


MASK_SHAPES = [
    (17,),
    (1,),
    (13, 17),
    (13, 1),
    (1, 17),
    (1, 1),
    (3, 13, 17),
    (3, 1, 17),
    (1, 13, 17),
    (3, 13, 1),
    (3, 1, 1),
    (2, 3, 13, 17),
    (2, 1, 13, 17),
    (2, 1, 1, 17),
    (1, 3, 13, 17),
    (1, 1, 13, 17),
    (2, 3, 1, 17),
    (2, 3, 13, 1),
    (2, 1, 1, 1),
]


@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
def test_bool_mask_broadcasts_from_every_shape(shape):
    assert_call_agrees(call(attn_mask=torch.rand(shape) < 0.6))


@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
@pytest.mark.parametrize("low", ["none", "minus_inf", "lowest"])
def test_float_mask_broadcasts_from_every_shape(shape, low):
    mask = torch.randn(shape)
    if low != "none":
        mask[torch.rand(shape) < 0.3] = -math.inf if low == "minus_inf" else LOWEST[torch.float32]
    assert_call_agrees(call(attn_mask=mask))


@pytest.mark.parametrize("lead", [(), (3,), (2, 5, 3)], ids=str)
def test_masks_fit_every_rank_of_query(lead):
    for shape in [
        (17,),
        (13, 17),
        (13, 1),
        (*lead, 13, 17),
        (*lead, 1, 17),
        (*(1 for _ in lead), 13, 1),
    ]:
        assert_call_agrees(call(lead=lead, attn_mask=torch.rand(shape) < 0.7))


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
def test_mask_and_causality_both_apply(kind, align):
    mask = torch.rand(2, 1, 65, 67) < 0.7 if kind == "bool" else torch.randn(65, 67)
    assert_call_agrees(
        call(queries=65, keys=67, attn_mask=mask, is_causal=True, causal_align=align)
    )


def test_mask_fields_hold_over_many_key_tiles():
    mask = torch.rand(1, 1, 131, 1301) < 0.5
    mask[..., 3, :] = False
    mask[..., 5, :1290] = False
    mask[..., 7, 1:] = False
    assert_call_agrees(call(lead=(1, 2), queries=131, keys=1301, width=16, attn_mask=mask))
    bias = torch.where(mask, torch.randn(mask.shape), -math.inf)
    assert_call_agrees(
        call(lead=(1, 2), queries=131, keys=1301, width=16, attn_mask=bias, is_causal=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_row_of_lowest_bias_gives_output_like_torch_and_no_statistic(dtype):
    mask = torch.zeros(13, 17, dtype=dtype)
    mask[4] = LOWEST[dtype]
    mask[6] = -math.inf
    mask[8, 3:] = LOWEST[dtype] / 2
    c = call(dtype=dtype, attn_mask=mask)
    assert_call_agrees(c)
    found = scaledot.vitals(c.query, c.key, attn_mask=mask)
    assert (found.rows == 11).all()
    assert (found.pairs == 10 * 17 + 3).all()


def test_bias_just_above_half_of_the_lowest_value_is_a_logit():
    mask = torch.zeros(13, 17, dtype=torch.float16)
    mask[2, 5] = -32000.0  # the lowest float16 is -65504
    mask[3, 5] = -32752.0
    c = call(dtype=torch.float16, attn_mask=mask)
    assert (scaledot.vitals(c.query, c.key, attn_mask=mask).pairs == 13 * 17 - 1).all()
    assert_call_agrees(c)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_of_the_lowest_value_is_that_of_the_bias_not_of_the_query(dtype):
    mask = torch.zeros(13, 17)
    mask[2, 5] = -60000.0
    mask[3, 5] = LOWEST[torch.float32]
    c = call(dtype=dtype, attn_mask=mask)
    assert (scaledot.vitals(c.query, c.key, attn_mask=mask).pairs == 13 * 17 - 1).all()
    assert_call_agrees(c)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", [(17, 17), (5, 0), (1, 16), (0, 0)], ids=str)
def test_key_lengths_hide_the_keys_behind_them(lengths, dtype):
    lengths = torch.tensor(lengths, dtype=dtype)
    for keywords in [
        {},
        {"is_causal": True},
        {"window": (3, 2)},
        {"attn_mask": torch.rand(13, 17) < 0.8},
    ]:
        for align in ("top_left", "bottom_right"):
            assert_call_agrees(call(key_lengths=lengths, causal_align=align, **keywords))


def test_key_lengths_hold_over_many_key_tiles():
    lengths = torch.tensor([1301, 700, 64, 1])
    for keywords in [
        {},
        {"is_causal": True, "causal_align": "bottom_right"},
        {"window": (100, 30)},
    ]:
        assert_call_agrees(
            call(lead=(4, 1), queries=67, keys=1301, key_lengths=lengths, **keywords)
        )


def test_key_lengths_of_several_batch_dimensions_have_their_shape():
    assert_call_agrees(
        call(lead=(2, 3, 2), key_lengths=torch.tensor([[3, 17, 0], [1, 2, 16]]), is_causal=True)
    )


# --- scores --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scale", [None, "sqrt_dk", "dk", "none", "log_n", "sqrt_dmodel", 1.0, 0.125, 0, 0.0, -0.4, 7]
)
@pytest.mark.parametrize(
    "keywords", [{}, {"is_causal": True}, {"window": (3, 1)}, {"softcap": 2.0}], ids=str
)
def test_scale_rules_and_numbers(scale, keywords):
    heads = {"num_heads": 3} if scale == "sqrt_dmodel" else {}
    assert_call_agrees(call(scale=scale, **heads, **keywords))


@pytest.mark.parametrize("lead", [(3,), (2, 3), (2, 2, 3)], ids=str)
def test_scale_tensor_holds_one_value_a_head(lead):
    for keywords in [{}, {"is_causal": True}, {"softcap": 3.0}]:
        assert_call_agrees(call(lead=lead, scale=torch.tensor([0.5, -0.3, 0.0]), **keywords))


def test_sqrt_dmodel_counts_the_heads_it_is_told():
    c = call(lead=(2, 3), width=16)
    found = scaledot.vitals(c.query, c.key, scale="sqrt_dmodel", num_heads=8)
    assert_vitals_agree(found, oracle.diagnose(c.query, c.key, scale=1 / math.sqrt(8 * 16)))


@pytest.mark.parametrize("masking", ["bool", "minus_inf", "lowest", "lengths", "causal", "window"])
def test_log_n_counts_the_keys_that_the_output_sees(masking):
    hidden = torch.rand(13, 17) < 0.5
    bias = torch.randn(13, 17)
    keywords = {
        "bool": {"attn_mask": ~hidden},
        "minus_inf": {"attn_mask": bias.masked_fill(hidden, -math.inf)},
        "lowest": {"attn_mask": bias.masked_fill(hidden, LOWEST[torch.float32])},
        "lengths": {"key_lengths": torch.tensor([17, 4])},
        "causal": {"is_causal": True, "causal_align": "bottom_right"},
        "window": {"window": (2, 3)},
    }[masking]
    assert_call_agrees(call(scale="log_n", **keywords))
    assert_call_agrees(call(scale="log_n", sinks=torch.randn(3), **keywords))


@pytest.mark.parametrize("softcap", [0.05, 1.0, 15.0, 1e6])
@pytest.mark.parametrize("scale", [None, 10.0, -1.0])
def test_softcap_bends_the_weights_and_not_the_logits(softcap, scale):
    for keywords in [{}, {"is_causal": True}, {"attn_mask": torch.randn(13, 17)}]:
        assert_call_agrees(call(softcap=softcap, scale=scale, **keywords))


def test_top_p_follows_the_capped_argument_not_the_largest_logit():
    # A bias comes after the cap: the largest logit does not take the largest weight.
    query, key = torch.tensor([[1.0]]), torch.tensor([[100.0], [50.0]])
    bias = torch.tensor([[0.0, 10.0]])
    found = scaledot.vitals(query, key, attn_mask=bias, scale=1.0, softcap=1.0, per_row=True)
    assert found.max_logit.item() == 100.0
    assert found.top_p.item() == pytest.approx(1 / (1 + math.exp(-10)), rel=1e-6)
    assert found.per_row.lse.item() == pytest.approx(11 + math.log1p(math.exp(-10)), rel=1e-6)
    assert_call_agrees(Call(query, key, key, {"attn_mask": bias, "scale": 1.0, "softcap": 1.0}))


def test_softcap_fields_hold_over_many_key_tiles():
    assert_call_agrees(call(lead=(1, 2), queries=67, keys=1301, width=16, softcap=2.0, scale=1.0))
    assert_call_agrees(
        call(lead=(1, 2), queries=67, keys=1301, width=16, softcap=2.0, scale=1.0, is_causal=True)
    )


@pytest.mark.parametrize("lead", [(3,), (2, 3), (2, 2, 3)], ids=str)
def test_learned_sinks_add_one_outcome(lead):
    sinks = torch.tensor([-2.0, 0.5, 9.0])
    for keywords in [
        {},
        {"is_causal": True},
        {"softcap": 2.0},
        {"attn_mask": torch.rand(13, 17) < 0.3},
        {"window": (0, 0)},
    ]:
        assert_call_agrees(call(lead=lead, sinks=sinks, **keywords))


def test_learned_sinks_hold_over_many_key_tiles():
    assert_call_agrees(
        call(lead=(1, 3), queries=67, keys=1301, width=16, sinks=torch.tensor([-30.0, 3.0, 60.0]))
    )


def test_one_key_and_a_sink_have_two_outcomes():
    c = call(keys=1, sinks=torch.zeros(3), scale=0.0)
    found = scaledot.vitals(c.query, c.key, **c.keywords)
    assert torch.allclose(found.entropy_ratio, torch.ones(2, 3))
    assert torch.allclose(found.off, torch.full((2, 3), 0.5))
    assert_call_agrees(c)


@pytest.mark.parametrize("key_heads", [1, 2, 3, 6])
@pytest.mark.parametrize("lead", [(6,), (2, 6), (2, 2, 6)], ids=str)
def test_grouped_heads_repeat_their_key(lead, key_heads):
    for keywords in [
        {},
        {"is_causal": True},
        {"attn_mask": torch.rand(6, 13, 17) < 0.7},
        {"sinks": torch.randn(6)},
    ]:
        assert_call_agrees(call(lead=lead, key_heads=key_heads, **keywords))


def test_grouped_heads_hold_over_many_key_tiles():
    assert_call_agrees(
        call(
            lead=(1, 4),
            key_heads=2,
            queries=131,
            keys=1301,
            is_causal=True,
            causal_align="bottom_right",
        )
    )


def test_every_argument_at_once():
    for queries, keys in [(13, 17), (65, 63), (131, 1031)]:
        mask = torch.randn(2, 1, queries, keys).masked_fill(
            torch.rand(queries, keys) < 0.2, -math.inf
        )
        assert_call_agrees(
            call(
                lead=(2, 4),
                key_heads=2,
                queries=queries,
                keys=keys,
                attn_mask=mask,
                is_causal=True,
                causal_align="bottom_right",
                window=(keys // 2, 3),
                softcap=4.0,
                sinks=torch.randn(4),
                key_lengths=torch.tensor([keys, keys - 3]),
                scale=torch.randn(4),
            )
        )


# --- difficult numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"is_causal": True},
        {"window": (30, 5)},
        {"sinks": torch.tensor([1.0, -3.0])},
        {"softcap": 50.0},
    ],
    ids=lambda k: next(iter(k), "plain"),
)
@pytest.mark.parametrize("size", [1e4, -1e4, 1e6])
def test_huge_logits(size, keywords):
    c = call(lead=(1, 2), queries=67, keys=331, width=4, **keywords)
    # Small whole numbers: every score is exact in float32, so nothing excuses a wrong digit.
    query, key = (
        torch.randint(-3, 4, c.query.shape).float(),
        torch.randint(-3, 4, c.key.shape).float(),
    )
    assert_call_agrees(replace(c, query=query, key=key).with_keywords(scale=size / 16))


def test_logits_that_jump_by_ten_thousand_between_key_tiles():
    c = call(lead=(1, 2), queries=67, keys=1301, width=8)
    steps = torch.tensor([0.0, 1e4, -1e4, 5e3, 1e4]).repeat_interleave(261)[:1301]
    assert_call_agrees(c.with_keywords(attn_mask=steps))
    assert_call_agrees(
        c.with_keywords(attn_mask=steps.flip(0), is_causal=True, causal_align="bottom_right")
    )


@pytest.mark.parametrize("offset", [10.0, 1000.0, -1000.0])
@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"is_causal": True},
        {"window": (20, 3)},
        {"key_lengths": torch.tensor([331, 100])},
        {"softcap": 1e5},
    ],
    ids=lambda k: next(iter(k), "plain"),
)
def test_keys_with_a_large_common_offset(offset, keywords):
    c = call(lead=(2, 2), queries=67, keys=331, width=16, **keywords)
    assert_call_agrees(replace(c, key=c.key + offset))


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"is_causal": True},
        {"window": (9, 0)},
        {"attn_mask": torch.rand(67, 331, generator=SEEDED) < 0.9},
    ],
    ids=lambda k: next(iter(k), "plain"),
)
@pytest.mark.parametrize("offset", [0.3, 1000.3])
def test_constant_keys_have_no_spread(offset, keywords):
    c = call(lead=(1, 2), queries=67, keys=331, width=16, **keywords)
    assert_call_agrees(replace(c, key=torch.full_like(c.key, offset)))


@pytest.mark.parametrize("window", [(5, 5), (40, 0)], ids=str)
def test_keys_that_drift_far_have_the_spread_of_their_window(window):
    """Neighbours are alike, the ends are far apart: differences of running sums would lose it."""
    c = call(lead=(1, 1), queries=1031, keys=1031, width=8, window=window)
    key = torch.linspace(-300, 300, 1031)[:, None] + 0.01 * c.key
    assert_call_agrees(replace(c, key=key))


def test_keys_in_two_far_clusters_seen_one_at_a_time():
    c = call(lead=(1, 1), queries=600, keys=600, width=8, window=(99, 0))
    key = 0.01 * c.key + torch.where(torch.arange(600) < 300, 500.0, -500.0)[:, None]
    assert_call_agrees(replace(c, key=key))
    assert_call_agrees(replace(c, key=key.flip(-2)).with_keywords(window=None, is_causal=True))


def test_one_outlier_key_does_not_spoil_the_spread_of_others():
    c = call(lead=(1, 2), queries=331, keys=331, width=8, window=(20, 0))
    key = c.key.clone()
    key[..., 0, :] = 1e5
    found = scaledot.vitals(c.query, key, window=(20, 0), per_row=True)
    expected = oracle.diagnose(c.query, key, window=(20, 0))
    # Rows past the outlier's window are judged by their own rounding, not by the outlier's.
    own = oracle.diagnose(c.query[..., 21:, :], key[..., 1:, :], window=(0, 20))
    assert_vitals_agree(found, expected, per_row=True)
    error = (found.per_row.entropy[..., 21:].double() - own.per_row.entropy).abs().max()
    assert error <= rounding(torch.float32, own.per_row.entropy, own.reach, 4.0)


@pytest.mark.parametrize("size", [1e-22, 1e-12, 1e15])
def test_root_mean_squares_survive_tiny_and_large_entries(size):
    c = call(queries=13, keys=17)
    found = scaledot.vitals(c.query * size, c.key * size, scale=0.0)
    expected = oracle.diagnose(c.query * size, c.key * size, scale=0.0)
    assert torch.allclose(found.q_rms.double(), expected.q_rms, rtol=1e-5, atol=0)
    assert torch.allclose(found.k_rms.double(), expected.k_rms, rtol=1e-5, atol=0)


def test_saturated_rows_are_counted():
    # Logits 0 and ln(99) +- a little: top_p just below and just above 0.99.
    key = torch.tensor([[0.0], [1.0]])
    query = torch.tensor([[math.log(99) - 1e-3], [math.log(99) + 1e-3], [100.0], [0.0]])
    found = scaledot.vitals(query, key, scale=1.0)
    assert found.saturated.item() == 0.5
    assert_call_agrees(Call(query, key, key, {"scale": 1.0}))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("keys", [3, 17, 300])
def test_query_that_is_not_finite_spoils_its_own_row_only(bad, keys):
    c = call(keys=keys, dtype=torch.float32)
    c.query[0, 1, 5, 2] = bad
    found = scaledot.vitals(c.query, c.key, per_row=True)
    assert_vitals_agree(found, oracle.diagnose(c.query, c.key), per_row=True)
    assert found.nonfinite.tolist() == [[0, 1, 0], [0, 0, 0]]
    out, again = scaledot.attention_with_vitals(*c.tensors, per_row=True)
    assert_vitals_agree(again, oracle.diagnose(c.query, c.key), per_row=True)
    others = torch.ones(2, 3, 13, dtype=torch.bool)
    others[0, 1, 5] = False
    assert out[others].isfinite().all()
    assert out[0, 1, 5].isnan().any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"is_causal": True},
        {"window": (2, 2)},
        {"attn_mask": torch.rand(13, 17, generator=SEEDED) < 0.6},
        {"softcap": 3.0},
    ],
    ids=lambda k: next(iter(k), "plain"),
)
def test_key_that_is_not_finite_spoils_the_rows_that_see_it(bad, keywords):
    c = call(**keywords)
    c.key[1, 0, 6, 1] = bad
    for found in (
        scaledot.vitals(c.query, c.key, **keywords, per_row=True),
        scaledot.attention_with_vitals(*c.tensors, **keywords, per_row=True)[1],
    ):
        assert_vitals_agree(found, oracle.diagnose(c.query, c.key, **keywords), per_row=True)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "hide", ["causal", "window", "lengths", "bool", "minus_inf", "bool_column"]
)
@pytest.mark.parametrize("size", [(13, 17), (129, 600)], ids=str)
def test_bad_numbers_in_hidden_keys_leave_other_rows_clean(bad, hide, size):
    queries, keys = size
    c = call(lead=(2, 2), queries=queries, keys=keys)
    bias = torch.zeros(queries, keys)
    bias[:-2, -1] = -math.inf
    keywords = {
        "causal": {"is_causal": True, "causal_align": "bottom_right"},
        "window": {"window": (1, 1), "causal_align": "bottom_right"},
        "lengths": {"key_lengths": torch.tensor([keys - 1, keys - 1])},
        "bool": {"attn_mask": bias == 0},
        "minus_inf": {"attn_mask": bias},
        "bool_column": {"attn_mask": torch.arange(keys) < keys - 1},
    }[hide]
    c.key[..., -1, 0] = bad
    c.value[..., -1, 1] = bad
    expected = oracle.diagnose(c.query, c.key, **keywords)
    out, found = scaledot.attention_with_vitals(*c.tensors, **keywords, per_row=True)
    assert_vitals_agree(found, expected, per_row=True)
    assert_vitals_agree(scaledot.vitals(c.query, c.key, **keywords), expected)
    clean = expected.per_row.lse.isfinite()
    exact = oracle.attend(*c.tensors, **keywords)
    for result in (out, scaledot.attention(*c.tensors, **keywords)):
        assert result[clean].isfinite().all()
        torch.testing.assert_close(result[clean].double(), exact[clean], atol=1e-5, rtol=1e-5)
        assert not result[~clean].isfinite().all(-1).any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bias_that_is_not_finite_spoils_its_row(bad):
    mask = torch.zeros(13, 17)
    mask[3, 4] = bad
    c = call(attn_mask=mask)
    out, found = scaledot.attention_with_vitals(*c.tensors, attn_mask=mask, per_row=True)
    assert_vitals_agree(found, oracle.diagnose(c.query, c.key, attn_mask=mask), per_row=True)
    assert out[:, :, 3].isnan().all()
    assert out[:, :, 4:].isfinite().all()


def test_overflowing_score_is_counted_as_not_finite():
    c = call()
    c.query[0, 0, 2] = 1e30
    c.key[0, 0, 3] = 1e30
    found = scaledot.vitals(c.query, c.key)
    assert found.nonfinite.tolist() == [[1, 0, 0], [0, 0, 0]]
    assert found.rows.tolist() == [[12, 13, 13], [13, 13, 13]]
    assert all(getattr(found, name).isfinite().all() for name in oracle.FLOAT_FIELDS)


def test_head_with_every_row_not_finite_has_no_statistic():
    c = call()
    c.query[1, 2] = math.nan
    for found in (scaledot.vitals(c.query, c.key), scaledot.attention_with_vitals(*c.tensors)[1]):
        assert_vitals_agree(found, oracle.diagnose(c.query, c.key))
        assert found.nonfinite[1, 2] == 13
        assert found.max_logit[1, 2] == -math.inf


def test_entries_that_are_not_finite_are_left_out_of_the_root_mean_square_of_keys():
    c = call(is_causal=True)
    c.key[0, 0, 16, 3] = math.inf
    c.key[0, 1, 2] = math.nan
    found = scaledot.vitals(c.query, c.key, is_causal=True)
    assert_vitals_agree(found, oracle.diagnose(c.query, c.key, is_causal=True))
    assert found.k_rms.isfinite().all()


# --- nothing there -------------------------------------------------------------------------------


@pytest.mark.parametrize("hide", ["bool", "minus_inf", "window", "lengths"])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.0, 1.0, 2.0])], ids=["plain", "sinks"])
def test_rows_with_no_key_are_zero_and_counted_nowhere(hide, sinks):
    keywords = {
        "bool": {"attn_mask": torch.zeros(13, 17, dtype=torch.bool)},
        "minus_inf": {"attn_mask": torch.full((13, 17), -math.inf)},
        "window": {"window": (None, 0), "is_causal": True, "causal_align": "bottom_right"},
        "lengths": {"key_lengths": torch.tensor([0, 0])},
    }[hide]
    c = call(queries=30 if hide == "window" else 13, sinks=sinks, **keywords)
    assert_call_agrees(c)
    out, found = scaledot.attention_with_vitals(*c.tensors, **c.keywords, per_row=True)
    empty = 13 if hide != "window" else 30 - 17
    assert (out[..., :empty, :] == 0).all()
    assert (found.per_row.lse[..., :empty] == -math.inf).all()
    assert (found.rows == out.shape[-2] - empty).all()


@pytest.mark.parametrize("zero", ["batch", "heads", "queries", "keys", "width", "value_width"])
@pytest.mark.parametrize(
    "keywords", [{}, {"is_causal": True}, {"window": (1, 1)}, {"softcap": 2.0}], ids=str
)
def test_sizes_of_zero(zero, keywords):
    sizes = {"batch": 2, "heads": 3, "queries": 5, "keys": 7, "width": 4, "value_width": 3, zero: 0}
    lead = sizes.pop("batch"), sizes.pop("heads")
    c = call(lead=lead, **sizes, **keywords)
    assert_call_agrees(c)
    sinks = c.with_keywords(sinks=torch.randn(lead[1]))
    assert_call_agrees(sinks)


@pytest.mark.parametrize("zero", ["queries", "keys", "width", "value_width"])
@pytest.mark.parametrize("lead", [(), (3,), (2, 0, 3)], ids=str)
def test_sizes_of_zero_in_other_ranks(zero, lead):
    sizes = {"queries": 5, "keys": 7, "width": 4, "value_width": 3, zero: 0}
    assert_call_agrees(call(lead=lead, **sizes))


# --- packed --------------------------------------------------------------------------------------

PACKINGS = {
    "equal": ([0, 5, 10, 15], [0, 5, 10, 15]),
    "unequal": ([0, 3, 16, 17], [0, 7, 8, 21]),
    "empty_queries": ([0, 3, 3, 9], [0, 2, 7, 9]),
    "empty_keys": ([0, 3, 5, 9], [0, 4, 4, 9]),
    "empty_both_ends": ([0, 0, 5, 5], [0, 0, 7, 7]),
    "one": ([0, 65], [0, 131]),
    "long": ([0, 131, 194, 300], [0, 64, 577, 700]),
}


def assert_packed_call_agrees(
    packing, *, heads=4, key_heads=None, width=8, dtype=torch.float32, index=torch.int32, **keywords
):
    ends_q, ends_k = (torch.tensor(ends, dtype=index) for ends in PACKINGS[packing])
    query = torch.randn(ends_q[-1], heads, width).to(dtype)
    key = torch.randn(ends_k[-1], key_heads or heads, width).to(dtype)
    value = torch.randn(ends_k[-1], key_heads or heads, 5).to(dtype)
    if key_heads:
        keywords["enable_gqa"] = True
    expected = oracle.diagnose_packed(query, key, ends_q, ends_k, **keywords)
    exact = oracle.attend_packed(query, key, value, ends_q, ends_k, **keywords)
    out, with_output = scaledot.attention_varlen_with_vitals(
        query, key, value, ends_q, ends_k, **keywords, per_row=True
    )
    assert_vitals_agree(with_output, expected, per_row=True)
    assert_vitals_agree(scaledot.vitals_varlen(query, key, ends_q, ends_k, **keywords), expected)
    for result in (out, scaledot.attention_varlen(query, key, value, ends_q, ends_k, **keywords)):
        assert result.shape == exact.shape
        error = (result.double() - exact).abs().max().item() if exact.numel() else 0.0
        assert error <= 4 * rounding(dtype, exact, expected.reach, 4.0)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"is_causal": True},
        {"is_causal": True, "causal_align": "bottom_right"},
        {"window": (2, 1)},
        {"window": (3, 0), "causal_align": "bottom_right"},
    ],
    ids=str,
)
def test_packed_sequences_do_not_see_each_other(packing, keywords):
    assert_packed_call_agrees(packing, **keywords)


@pytest.mark.parametrize(
    "keywords",
    [
        {"scale": "log_n"},
        {"scale": -0.3},
        {"softcap": 2.0},
        {"sinks": torch.randn(4, generator=SEEDED)},
        {"scale": torch.randn(4, generator=SEEDED)},
        {"scale": "sqrt_dmodel", "num_heads": 4},
    ],
    ids=lambda k: next(iter(k)) + str(k.get("scale", ""))[:8],
)
@pytest.mark.parametrize("packing", ["unequal", "empty_keys"])
def test_packed_scores(packing, keywords):
    assert_packed_call_agrees(packing, **keywords)
    assert_packed_call_agrees(packing, is_causal=True, **keywords)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_packed_types(dtype, index):
    assert_packed_call_agrees("unequal", dtype=dtype, index=index, is_causal=True)


@pytest.mark.parametrize("key_heads", [1, 2])
def test_packed_grouped_heads(key_heads):
    assert_packed_call_agrees("unequal", key_heads=key_heads)
    assert_packed_call_agrees(
        "empty_keys", key_heads=key_heads, is_causal=True, causal_align="bottom_right"
    )


def test_packed_nan_stays_in_its_sequence():
    ends = torch.tensor([0, 5, 12, 15])
    query, key, value = torch.randn(3, 15, 2, 8)
    key[7] = math.nan
    out, found = scaledot.attention_varlen_with_vitals(query, key, value, ends, ends)
    assert found.nonfinite.tolist() == [[0, 0], [7, 7], [0, 0]]
    assert out[5:12].isnan().all()
    assert out[:5].isfinite().all()
    assert out[12:].isfinite().all()


# --- the whole argument space --------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(240))
def test_random_call(seed):
    assert_call_agrees(draw(seed))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(1000, 1060))
def test_random_call_in_other_types(seed, dtype):
    assert_call_agrees(draw(seed, dtype))


# --- what must not change ------------------------------------------------------------------------


@pytest.mark.parametrize("keywords", [{}, {"is_causal": True}, {"softcap": 2.0}], ids=str)
def test_dropout_does_not_reach_the_vitals(keywords):
    c = call(queries=65, keys=67, **keywords)
    found = scaledot.attention_with_vitals(*c.tensors, dropout_p=0.4, **keywords, per_row=True)[1]
    assert_vitals_agree(found, oracle.diagnose(c.query, c.key, **keywords), per_row=True)


def test_vitals_never_carry_a_graph():
    c = call(is_causal=True)
    tensors = [t.requires_grad_() for t in c.tensors]
    scale, sinks = torch.full((3,), 0.3, requires_grad=True), torch.zeros(3, requires_grad=True)
    out, found = scaledot.attention_with_vitals(
        *tensors, scale=scale, sinks=sinks, is_causal=True, per_row=True
    )
    assert out.requires_grad
    for name in (*oracle.FLOAT_FIELDS, *oracle.COUNT_FIELDS):
        assert not getattr(found, name).requires_grad, name
    for name in oracle.ROW_FIELDS:
        assert not getattr(found.per_row, name).requires_grad, name


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_backends_agree_with_the_oracle_or_say_why_not(backend):
    for seed in range(2000, 2040):
        c = draw(seed)
        try:
            out = scaledot.attention(*c.tensors, **c.keywords, backend=backend)
        except ValueError as refusal:
            assert backend in str(refusal)  # noqa: PT017 (a refusal is a right answer here)
            continue
        assert_output_agrees(out, *c.tensors, **c.keywords)


def test_inputs_are_left_as_they_were():
    c = call(
        attn_mask=torch.randn(13, 17),
        sinks=torch.randn(3),
        key_lengths=torch.tensor([3, 17]),
        scale=torch.randn(3),
    )
    before = [
        t.clone()
        for t in (*c.tensors, *(x for x in c.keywords.values() if isinstance(x, torch.Tensor)))
    ]
    scaledot.attention_with_vitals(*c.tensors, **c.keywords, is_causal=True, per_row=True)
    after = [*c.tensors, *(x for x in c.keywords.values() if isinstance(x, torch.Tensor))]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
