"""The oracle itself, against loops that a reader can check by eye, and against torch."""

import math

import oracle
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from conformance.agreement import assert_vitals_agree, field_tolerances


def test_oracle_equals_loops_over_rows_and_keys():
    query, key, value = (
        torch.randn(5, 3).double(),
        torch.randn(7, 3).double(),
        torch.randn(7, 2).double(),
    )
    mask = torch.randn(5, 7).double()
    mask[torch.rand(5, 7) < 0.2] = -math.inf
    mask[2] = torch.finfo(torch.float64).min
    mask[4] = -math.inf
    keywords = {
        "attn_mask": mask,
        "is_causal": True,
        "causal_align": "bottom_right",
        "window": (3, 0),
        "softcap": 0.8,
    }

    rows, outs = [], []
    for i in range(5):
        seen = [j for j in range(7) if i + 2 - 3 <= j <= i + 2 and mask[i, j] > -math.inf]
        scores = [float(query[i] @ key[j]) / math.sqrt(3) for j in seen]
        argument = [
            0.8 * math.tanh(s / 0.8) + float(mask[i, j]) for s, j in zip(scores, seen, strict=True)
        ]
        weights = [math.exp(a - max(argument)) for a in argument]
        outs.append(
            sum(
                (w / sum(weights) * value[j] for w, j in zip(weights, seen, strict=True)),
                torch.zeros(2).double(),
            )
        )
        if seen and i != 2:
            rows.append(
                {
                    "z": [s + float(mask[i, j]) for s, j in zip(scores, seen, strict=True)],
                    "p": [w / sum(weights) for w in weights],
                    "first": weights[0] / sum(weights) if seen[0] == 0 else 0.0,
                    "q": query[i].tolist(),
                }
            )

    def mean(xs):
        return sum(xs) / len(xs)

    def variance(xs):
        return mean([(x - mean(xs)) ** 2 for x in xs])

    def entropy(row):
        return -sum(p * math.log(p) for p in row["p"])

    every = [z for row in rows for z in row["z"]]
    many = [row for row in rows if len(row["z"]) > 1]
    expected = {
        "max_logit": max(every),
        "logit_mean": mean(every),
        "logit_std": math.sqrt(variance(every)),
        "row_std": math.sqrt(mean([variance(row["z"]) for row in rows])),
        "entropy": mean([entropy(row) for row in rows]),
        "entropy_ratio": mean([entropy(row) / math.log(len(row["z"])) for row in many]),
        "sum_p2": mean([sum(p * p for p in row["p"]) for row in rows]),
        "passes": 1 - mean([sum(p * p for p in row["p"]) for row in rows]),
        "top_p": mean([max(row["p"]) for row in rows]),
        "saturated": mean([float(max(row["p"]) > 0.99) for row in rows]),
        "sink": mean([row["first"] for row in rows]),
        "off": 0.0,
        "q_rms": math.sqrt(mean([x * x for row in rows for x in row["q"]])),
        "k_rms": math.sqrt(mean([x * x for x in key.flatten().tolist()])),
        "rows": len(rows),
        "pairs": len(every),
        "nonfinite": 0,
    }
    found = oracle.diagnose(query, key, **keywords)
    for name, number in expected.items():
        assert getattr(found, name).item() == pytest.approx(number, abs=1e-12), name
    torch.testing.assert_close(oracle.attend(query, key, value, **keywords), torch.stack(outs))


def test_learned_sink_is_one_more_key_with_a_fixed_logit():
    query, key, value = (
        torch.randn(2, 3, 5).double(),
        torch.randn(2, 7, 5).double(),
        torch.randn(2, 7, 4).double(),
    )
    sinks = torch.tensor([0.3, -1.0]).double()
    # One more feature carries the sink's logit, one more key alone reads it, its value is zero.
    ones = torch.full((2, 3, 1), 1.0).double()
    wider_query = torch.cat([query, ones], -1)
    wider_key = torch.cat([torch.cat([key, torch.zeros(2, 7, 1)], -1), torch.zeros(2, 1, 6)], 1)
    wider_key[:, -1, -1] = sinks * math.sqrt(5)
    wider_value = torch.cat([value, torch.zeros(2, 1, 4)], 1)
    scale = 1 / math.sqrt(5)
    with_sink = oracle.diagnose(query, key, sinks=sinks)
    with_key = oracle.diagnose(wider_query, wider_key, scale=scale)
    torch.testing.assert_close(
        oracle.attend(query, key, value, sinks=sinks),
        oracle.attend(wider_query, wider_key, wider_value, scale=scale),
    )
    for name in ("entropy", "entropy_ratio", "sum_p2", "passes"):
        torch.testing.assert_close(getattr(with_sink, name), getattr(with_key, name))
    torch.testing.assert_close(with_sink.per_row.lse, with_key.per_row.lse)
    assert (with_sink.off > 0).all()
    assert torch.equal(with_sink.pairs, torch.tensor([21, 21]))


@pytest.mark.parametrize("queries_keys", [(3, 7), (7, 3), (5, 5), (1, 7), (65, 63)])
@pytest.mark.parametrize("masking", ["none", "causal", "bool", "float"])
def test_oracle_equals_torch_where_torch_is_right(queries_keys, masking):
    queries, keys = queries_keys
    query, key, value = (
        torch.randn(2, 6, queries, 5),
        torch.randn(2, 3, keys, 5),
        torch.randn(2, 3, keys, 4),
    )
    mask = {"bool": torch.rand(queries, keys) < 0.7, "float": torch.randn(2, 1, queries, keys)}.get(
        masking
    )
    keywords = {
        "attn_mask": mask,
        "is_causal": masking == "causal",
        "scale": 0.4,
        "enable_gqa": True,
    }
    double = {**keywords, "attn_mask": mask.double() if masking == "float" else mask}
    theirs = scaled_dot_product_attention(query.double(), key.double(), value.double(), **double)
    torch.testing.assert_close(oracle.attend(query, key, value, **keywords), theirs)


def test_tolerance_admits_float32_and_nothing_a_thousandth_away():
    query, key = torch.randn(2, 3, 127, 64), torch.randn(2, 3, 257, 64)
    exact = oracle.diagnose(query, key)
    assert_vitals_agree(oracle.diagnose(query, key, compute=torch.float32), exact, per_row=True)
    for name, tolerance in field_tolerances(torch.float32, exact).items():
        assert (torch.as_tensor(tolerance) < 1e-3 * getattr(exact, name).abs() + 1e-4).all(), name
