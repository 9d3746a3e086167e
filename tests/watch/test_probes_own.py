"""scaledot's own functions and modules, under the watch."""

import pytest
import torch
from watched_models import assert_reads

import scaledot
from scaledot import Watch, functional

Q, K, V = (
    2 * torch.randn(2, 3, 7, 4, generator=torch.Generator().manual_seed(i)) for i in range(3)
)
PACKED = [tensor[0].transpose(0, 1).contiguous() for tensor in (Q, K, V)]
LENGTHS = torch.tensor([0, 3, 7])
WEIGHT = torch.linspace(-1, 1, 4)

CALLS = {
    "attention": (
        lambda: scaledot.attention(Q, K, V, is_causal=True, window=(2, 0), dropout_p=0.5),
        lambda r: assert_reads(r, Q, K, is_causal=True, window=(2, 0)),
    ),
    "attention_with_vitals": (
        lambda: scaledot.attention_with_vitals(Q, K, V, softcap=3.0),
        lambda r: assert_reads(r, Q, K, softcap=3.0),
    ),
    "attention_varlen": (
        lambda: scaledot.attention_varlen(*PACKED, LENGTHS, LENGTHS, is_causal=True),
        lambda r: assert_reads(r, *PACKED[:2], is_causal=True, cu_seqlens=(LENGTHS, LENGTHS)),
    ),
    "attention_varlen_with_vitals": (
        lambda: scaledot.attention_varlen_with_vitals(*PACKED, LENGTHS, LENGTHS),
        lambda r: assert_reads(r, *PACKED[:2], cu_seqlens=(LENGTHS, LENGTHS)),
    ),
    "additive_attention": (
        lambda: scaledot.additive_attention(Q, K, V, WEIGHT, scale=2.0),
        lambda r: assert_reads(r, Q, K, scale=2.0, weight=WEIGHT),
    ),
    "additive_attention_with_vitals": (
        lambda: scaledot.additive_attention_with_vitals(Q, K, V, WEIGHT),
        lambda r: assert_reads(r, Q, K, weight=WEIGHT),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_reading_equals_the_reference(name):
    call, assert_right = CALLS[name]
    with Watch(every=1, store=(readings := [])):
        call()
    assert len(readings) == 1  # not one more for the torch function that may be inside
    assert_right(readings[0])


def test_outputs_are_the_same_to_the_bit():
    plain = scaledot.attention(Q, K, V, is_causal=True)
    with Watch(every=1, store=(readings := [])):
        watched = scaledot.attention(Q, K, V, is_causal=True)
    assert readings
    assert torch.equal(plain, watched)


def test_a_users_own_measurement_is_no_attention():
    with Watch(every=1, store=(readings := [])):
        scaledot.vitals(Q, K)
    assert not readings


def test_modules_give_the_vitals_of_their_own_pass(monkeypatch):
    module = scaledot.nn.MultiHeadAttention(12, 3)
    x = torch.randn(2, 5, 12)
    computed = []
    monkeypatch.setattr(functional, "vitals", lambda *a, **k: computed.append(a))
    with Watch(module, every=1, store=(readings := [])):
        module(x)
    assert not computed
    assert [reading.layer for reading in readings] == ["MultiHeadAttention"]
    kept = module.vitals.over_batch()
    assert readings[0].value("entropy").tolist() == pytest.approx(kept.entropy.tolist())


def test_modules_that_do_not_measure_are_measured_beside():
    module = scaledot.nn.MultiHeadAttention(12, 3, measure=False)
    with Watch(module, every=1, store=(readings := [])):
        module(torch.randn(2, 5, 12))
    assert len(readings) == 1
    assert module.vitals is None


def test_functions_are_put_back():
    names = ("attention", "attention_varlen", "additive_attention", "_with_vitals")
    before = tuple(getattr(functional, name) for name in names)  # a dict would be exchanged, too
    public = scaledot.attention
    with Watch(every=1):
        assert functional.attention is not before[0]
    assert tuple(getattr(functional, name) for name in names) == before
    assert scaledot.attention is public
