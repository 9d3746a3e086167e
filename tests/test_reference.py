"""The textbook against numbers worked out by hand."""

import math

import pytest
import torch

from scaledot.measure import COUNT_FIELDS, FLOAT_FIELDS
from scaledot.reference import attention_with_vitals

LN3 = math.log(3)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(20_17)


def heads_of(*rows):
    return torch.tensor([rows], dtype=torch.float64)


def assert_fields(vitals, **expected):
    for name, value in expected.items():
        assert getattr(vitals, name).item() == pytest.approx(value, abs=1e-14), name


# One head, two queries, two keys, width 1, scale 1: the logits are [[0, ln 3], [0, 0]], so the
# weights are [[1/4, 3/4], [1/2, 1/2]].
QUERY, KEY, VALUE = heads_of([LN3], [0.0]), heads_of([0.0], [1.0]), heads_of([4.0, 0.0], [0.0, 8.0])
H_QUARTER = math.log(4) - 0.75 * LN3  # entropy of (1/4, 3/4)


def test_two_by_two():
    out, vitals = attention_with_vitals(QUERY, KEY, VALUE, scale=1.0, per_row=True)
    torch.testing.assert_close(out, heads_of([1.0, 6.0], [2.0, 4.0]))
    assert_fields(
        vitals,
        max_logit=LN3,
        logit_mean=LN3 / 4,
        logit_std=LN3 * math.sqrt(3) / 4,  # one of four is ln 3
        row_std=math.sqrt((LN3 / 2) ** 2 / 2),
        entropy=(H_QUARTER + math.log(2)) / 2,
        entropy_ratio=(H_QUARTER / math.log(2) + 1) / 2,
        sum_p2=(10 / 16 + 1 / 2) / 2,
        passes=1 - (10 / 16 + 1 / 2) / 2,
        top_p=(3 / 4 + 1 / 2) / 2,
        saturated=0.0,
        sink=(1 / 4 + 1 / 2) / 2,
        off=0.0,
        q_rms=LN3 / math.sqrt(2),
        k_rms=math.sqrt(0.5),
        rows=2,
        pairs=4,
        nonfinite=0,
        ratio_rows=2,
        q_entries=2,
        k_entries=2,
    )
    rows = vitals.per_row
    assert rows is not None
    torch.testing.assert_close(rows.lse, torch.tensor([[math.log(4), math.log(2)]]).double())
    torch.testing.assert_close(rows.top_p, torch.tensor([[0.75, 0.5]]).double())


def test_two_by_two_causal():
    """The first row sees its own key alone: logit 0, weight 1, no entropy to have a ratio of."""
    out, vitals = attention_with_vitals(QUERY, KEY, VALUE, None, 0.0, True, 1.0)
    torch.testing.assert_close(out, heads_of([4.0, 0.0], [2.0, 4.0]))
    assert_fields(
        vitals,
        max_logit=0.0,
        logit_std=0.0,
        entropy=math.log(2) / 2,
        entropy_ratio=1.0,
        sum_p2=0.75,
        top_p=0.75,
        saturated=0.5,
        sink=0.75,
        rows=2,
        pairs=3,
        ratio_rows=1,
    )


def test_two_by_two_with_a_bias_and_a_hidden_key():
    """Bias ln 2 lifts the first key of row 0 to 2/5; row 1 may see nothing."""
    bias = torch.tensor([[math.log(2), 0.0], [-math.inf, -math.inf]], dtype=torch.float64)
    out, vitals = attention_with_vitals(QUERY, KEY, VALUE, bias, scale=1.0)
    torch.testing.assert_close(out, heads_of([1.6, 4.8], [0.0, 0.0]))
    assert_fields(vitals, rows=1, pairs=2, sink=2 / 5, top_p=3 / 5, max_logit=LN3, q_rms=LN3)


def test_two_by_two_with_a_sink():
    """The sink's logit is 0: weights (1, 3 | 1) / 5 and (1, 1 | 1) / 3."""
    out, vitals = attention_with_vitals(
        QUERY, KEY, VALUE, scale=1.0, sinks=torch.zeros(1, dtype=torch.float64)
    )
    torch.testing.assert_close(out, heads_of([0.8, 4.8], [4 / 3, 8 / 3]))
    assert_fields(
        vitals,
        off=(1 / 5 + 1 / 3) / 2,
        sum_p2=(11 / 25 + 1 / 3) / 2,
        top_p=(3 / 5 + 1 / 3) / 2,
        entropy=(math.log(5) - 0.6 * LN3 + LN3) / 2,
        entropy_ratio=((math.log(5) - 0.6 * LN3) / LN3 + 1) / 2,
        logit_mean=LN3 / 4,
    )


def test_two_by_two_with_a_cap():
    """The cap bends the softmax's argument; the logits stay as they are."""
    out, vitals = attention_with_vitals(QUERY, KEY, VALUE, scale=1.0, softcap=1.0)
    bent = math.exp(math.tanh(LN3))  # tanh(ln 3) = 0.8
    assert math.tanh(LN3) == pytest.approx(0.8)
    expected = [4 / (1 + bent), 8 * bent / (1 + bent)]
    torch.testing.assert_close(out, heads_of(expected, [2.0, 4.0]))
    assert_fields(vitals, max_logit=LN3, logit_mean=LN3 / 4, top_p=(bent / (1 + bent) + 0.5) / 2)


def test_two_by_two_additive():
    """weight . tanh(q + k) with tanh(ln 3 / 2) = 1/2: the logits of row 0 are 0 and 2 * 1/2."""
    query, key = heads_of([0.0]), heads_of([0.0], [LN3 / 2])
    weight = torch.tensor([2.0], dtype=torch.float64)
    out, vitals = attention_with_vitals(query, key, VALUE, weight=weight)
    share = math.e / (1 + math.e)
    torch.testing.assert_close(out, heads_of([4 * (1 - share), 8 * share]))
    assert_fields(vitals, max_logit=1.0, logit_mean=0.5, logit_std=0.5, top_p=share)


def test_log_n_counts_the_keys_of_each_row():
    """Row 1 of two sees two keys: its logits are multiplied by ln 2, those of row 0 by ln 1."""
    query, key = heads_of([1.0], [1.0]), heads_of([0.0], [1.0])
    out, _ = attention_with_vitals(query, key, VALUE, is_causal=True, scale="log_n")
    torch.testing.assert_close(out, heads_of([4.0, 0.0], [4 / 3, 16 / 3]))


def test_nan_row_is_counted_and_nowhere_else():
    query = heads_of([math.nan], [0.0])
    out, vitals = attention_with_vitals(query, KEY, VALUE, scale=1.0)
    assert out is not None
    assert out[0, 0].isnan().all()
    assert_fields(vitals, nonfinite=1, rows=1, pairs=2, entropy=math.log(2), q_rms=0.0)


def test_scores_alone_have_no_output():
    out, vitals = attention_with_vitals(QUERY, KEY, None, scale=1.0)
    assert out is None
    assert_fields(vitals, max_logit=LN3)


@pytest.mark.parametrize("keywords", [{}, {"is_causal": True}, {"window": (1, 2)}], ids=str)
@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
def test_packed_equals_one_by_one(keywords, align):
    query, key, value = torch.randn(3, 17, 2, 5)
    ends_q, ends_k = [0, 3, 3, 10, 17], [0, 5, 7, 7, 17]
    out, vitals = attention_with_vitals(
        query,
        key,
        value,
        cu_seqlens=(torch.tensor(ends_q), torch.tensor(ends_k)),
        causal_align=align,
        **keywords,
    )
    assert out is not None
    assert vitals.shape == (4, 2)
    for i in range(4):
        rows, keys = slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i + 1])
        parts = [t.transpose(0, 1) for t in (query[rows], key[keys], value[keys])]
        alone, own = attention_with_vitals(*parts, causal_align=align, **keywords)
        assert alone is not None
        assert torch.equal(out[rows].transpose(0, 1), alone)
        for name in (*FLOAT_FIELDS, *COUNT_FIELDS):
            assert torch.equal(getattr(vitals, name)[i], getattr(own, name)), name


def test_dropout_is_not_the_references_business():
    with pytest.raises(ValueError, match="no dropout"):
        attention_with_vitals(QUERY, KEY, VALUE, dropout_p=0.1)
