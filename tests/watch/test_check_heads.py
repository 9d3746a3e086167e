"""What check says of a head: offsets without the matrix, bands, roles, the order of trouble."""

import math

import pytest
import torch

from scaledot import functional, reference
from scaledot.measure import BANDS
from scaledot.problem import describe
from scaledot.watch.check import offsets, words
from scaledot.watch.check.heads import Head, worst_first
from scaledot.watch.check.offsets import OFFSETS, Offset

HEALTHY = {
    "max_logit": 5.0,
    "logit_mean": 0.0,
    "logit_std": 1.0,
    "row_std": 1.0,
    "entropy": 3.0,
    "entropy_ratio": 0.7,
    "sum_p2": 0.2,
    "passes": 0.8,
    "top_p": 0.3,
    "saturated": 0.0,
    "sink": 0.1,
    "off": 0.0,
    "q_rms": 1.0,
    "k_rms": 1.0,
    "nonfinite": 0.0,
    "rows": 64.0,
    "pairs": 64.0 * 64.0,
}


def _head(offset=None, head=0, **changed):
    return Head("layer", head, {**HEALTHY, **changed}, 64, 8.0, offset)


def _bias(shape):
    bias = torch.randn(shape)
    bias[..., -2] = -math.inf
    bias[..., 3] = torch.finfo(bias.dtype).min  # what models write for «masked»
    return bias


CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"window": (2, 1)},
    "bottom right": {"is_causal": True, "causal_align": "bottom_right", "queries": 7},
    "bool mask": {"attn_mask": torch.rand(2, 1, 11, 11, generator=torch.manual_seed(1)) > 0.3},
    "row of keys": {"attn_mask": torch.arange(11).expand(2, 1, 1, 11) < 9},
    "bias": {"attn_mask": _bias((2, 6, 11, 11))},
    "softcap": {"softcap": 0.7},
    "sinks": {"sinks": torch.linspace(-1, 1, 6)},
    "one scale a head": {"scale": torch.linspace(0.1, 2, 6)},
    "scale": {"scale": 1.7},
    "lengths": {"key_lengths": torch.tensor([11, 5])},
    "grouped": {"groups": 2, "enable_gqa": True},
}


@pytest.mark.parametrize("name", CALLS)
def test_weights_at_offsets_are_those_of_the_whole_matrix(name):
    arguments = dict(CALLS[name])
    queries, groups = arguments.pop("queries", 11), arguments.pop("groups", 6)
    torch.manual_seed(3)
    query, key = torch.randn(2, 6, queries, 5), torch.randn(2, groups, 11, 5)
    problem = describe(query, key, None, scores_only=True, wants_vitals=True, **arguments)
    assert offsets.why_not(problem) == ""
    rows = functional.vitals(query, key, per_row=True, **arguments).per_row
    measured = offsets.weights_of(problem, rows.lse)

    identity = torch.eye(11).expand(2, groups, 11, 11)
    matrix = reference.attention_with_vitals(query, key, identity, **arguments)[0]
    # A key that a row may see has a probability above 0; the reference gives 0 to all others.
    shift = 11 - queries
    for number, offset in enumerate(OFFSETS):
        diagonal = matrix.diagonal(offset + shift, -2, -1)
        torch.testing.assert_close(
            measured.total[number], diagonal.sum((0, 2)), atol=1e-5, rtol=1e-5
        )
        assert measured.rows[number].tolist() == (diagonal > 0).sum((0, 2)).tolist()
    assert measured.rows.sum() > 0


def test_offsets_of_a_folded_batch_are_merged_by_head():
    total = torch.arange(1.0, 7.0).expand(len(OFFSETS), 6)  # [batch * heads], 2 of 3
    weights = offsets.Weights(total, torch.full_like(total, 4.0))
    expected = torch.tensor([1 + 4, 2 + 5, 3 + 6]) / 8.0
    assert torch.equal(weights.of_heads(3)[0], expected)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"scale": "log_n"}, "row to row"),
        ({"weight": torch.ones(5)}, "additive"),
        (
            {"causal_align": "bottom_right", "key_lengths": torch.tensor([11, 5])},
            "diagonal of its own",
        ),
    ],
)
def test_where_offsets_are_not_known_it_is_said_why(arguments, reason):
    query, key = torch.randn(2, 6, 11, 5), torch.randn(2, 6, 11, 5)
    problem = describe(query, key, None, scores_only=True, wants_vitals=True, **arguments)
    assert reason in offsets.why_not(problem)


def test_another_sequence_has_no_offsets():
    problem = describe(torch.randn(2, 6, 7, 5), torch.randn(2, 6, 11, 5), None, scores_only=True)
    assert "not of the same sequence" in offsets.why_not(problem)


def test_a_healthy_head_is_outside_of_nothing_and_nothing_in_particular():
    head = _head(Offset(-1, 0.4))
    assert head.outside == head.roles == ()
    assert head.strain < 1
    assert head.scale_holds


@pytest.mark.parametrize("name", [name for name, band in BANDS.items() if band.low or band.high])
def test_leaving_a_band_shows_and_strains(name):
    band = BANDS[name]
    beyond = band.low / 2 if band.high is None else min(band.high * 1.5, (1 + band.high) / 2)
    if name in ("max_logit", "logit_std", "row_std"):
        beyond = band.high * 1.5
    head = _head(**{name: beyond})
    assert name in head.outside
    assert head.strain > 1


def test_every_edge_of_a_band_is_a_strain_of_one():
    for name, edge in (("entropy_ratio", 0.98), ("entropy_ratio", 0.1), ("logit_std", 4.0)):
        assert _head(**{name: edge}).strain == pytest.approx(1.0)


@pytest.mark.parametrize(("keys", "limit"), [(64, 2.8841), (296, 3.3735), (4096, 4.0788)])
def test_row_std_is_held_against_the_number_of_keys(keys, limit):
    inside = _head(row_std=limit - 0.01, pairs=64.0 * keys)
    outside = _head(row_std=limit + 0.01, pairs=64.0 * keys)
    assert "row_std" not in inside.outside
    assert outside.outside == ("row_std",)
    assert inside.scale_holds
    assert not outside.scale_holds


@pytest.mark.parametrize(
    ("head", "roles", "said"),
    [
        (_head(Offset(-1, 0.77)), ("positional",), "previous token 77%"),
        (_head(Offset(2, 0.51)), ("positional",), "2 tokens ahead 51%"),
        (_head(sink=0.4), ("sink",), "sink 40%"),
        (_head(saturated=0.999), ("saturated",), "saturated >99%"),
        (_head(entropy_ratio=0.99), ("flat",), "flat"),
        (_head(nonfinite=3.0), ("broken",), "3 rows with NaN or infinity"),
        (
            _head(Offset(0, 0.9), saturated=0.6),
            ("positional", "saturated"),
            "own token 90%, saturated 60%",
        ),
    ],
)
def test_roles(head, roles, said):
    assert head.roles == roles
    assert words.of_head(head) == said


def test_nan_is_in_no_band_and_the_worst_of_all():
    sick = _head(head=1, logit_std=math.nan)
    sharp = _head(head=2, entropy_ratio=0.01)
    assert "logit_std" in sick.outside
    assert [head.head for head in worst_first([_head(), sharp, sick])] == [1, 2, 0]


def test_a_head_outside_comes_before_one_inside():
    edge = _head(head=1, top_p=0.9)  # on the edge, still inside
    over = _head(head=2, logit_std=4.01)
    assert [head.head for head in worst_first([_head(), edge, over])] == [2, 1, 0]


@pytest.mark.parametrize(
    ("layers", "short", "pattern"),
    [
        (["a.0.b", "a.1.b"], ["0", "1"], "a.N.b"),
        (["a.0.b", "a.1.c"], ["0", "1"], ""),
        (["a.0", "a.0.b"], ["0", "1"], ""),
        (["a.7.b"], ["0"], ""),
    ],
)
def test_layers_are_named_by_what_differs(layers, short, pattern):
    names = words.short_names(layers)
    assert [names.short[layer] for layer in layers] == short
    assert names.pattern == pattern
    if not pattern:
        assert all(layer in names.label(layer) for layer in layers)
