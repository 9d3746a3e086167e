"""Calls that are measured together at the step's end say what each would have said alone."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from watched_models import TinyGPT, assert_reads

from scaledot import Watch, functional
from scaledot.watch import stacks


def tensors(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, *shape, generator=generator).unbind()


class Attends(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend = attend

    def forward(self, x):
        return self.attend(x)


def readings_of(*calls, every=1):
    """One layer a call, in one step."""
    model = nn.Sequential(*map(Attends, calls))
    with Watch(model, every=every, store=(readings := []), losses=False) as watch:
        model(torch.zeros(1))
        watch.step()
    return readings


def attending(*arguments, **words):
    def attend(x):
        F.scaled_dot_product_attention(*arguments, **words)
        return x

    return attend


@pytest.fixture
def calls(monkeypatch):
    """How many times vitals were asked for."""
    made = []
    vitals = functional.vitals

    def counted(*args, **kwargs):
        made.append(args[0].shape)
        return vitals(*args, **kwargs)

    monkeypatch.setattr(functional, "vitals", counted)
    return made


def test_layers_alike_are_one_call(calls):
    pairs = [tensors(2, 3, 7, 5, seed=seed) for seed in range(4)]
    readings = readings_of(*(attending(q, k, k, is_causal=True) for q, k in pairs))
    assert calls == [(8, 3, 7, 5)]
    for one, (query, key) in zip(readings, pairs, strict=True):
        assert_reads(one, query, key, is_causal=True)
    assert [one.layer for one in readings] == ["0", "1", "2", "3"]


def test_together_and_alone_give_the_same_bits():
    pairs = [tensors(2, 3, 37, 8, seed=seed) for seed in range(5)]
    together = readings_of(*(attending(q, k, k) for q, k in pairs))
    for one, (q, k) in zip(together, pairs, strict=True):
        (alone,) = readings_of(attending(q, k, k))
        assert (one.floats == alone.floats).all()
        assert (one.counts == alone.counts).all()


def test_layers_that_differ_are_apart(calls):
    q, k = tensors(2, 4, 7, 5)
    (few, _), (long, _) = tensors(2, 2, 7, 5, seed=1), tensors(2, 4, 9, 5, seed=2)
    mask = torch.rand(7, 7, generator=torch.Generator().manual_seed(3)) > 0.3
    cases = [
        ((q, k, k), {}),
        ((q, k, k), {"is_causal": True}),
        ((q, k, k), {"scale": 0.3}),
        ((q, few, few), {"enable_gqa": True}),
        ((q, long, long), {}),
        ((q.bfloat16(), k.bfloat16(), k.bfloat16()), {}),
        ((q, k, k), {"attn_mask": mask}),
        ((q, k, k), {"attn_mask": ~mask}),
        ((q, k, k), {"attn_mask": mask.float()}),
    ]
    readings = readings_of(*(attending(*args, **words) for args, words in cases))
    assert len(calls) == len(cases)
    for one, ((query, key, _), words) in zip(readings, cases, strict=True):
        assert_reads(one, query, key, **words)


def test_one_mask_for_all_layers_is_one_call(calls):
    pairs = [tensors(2, 3, 7, 7, seed=seed) for seed in range(3)]
    mask = torch.rand(2, 1, 7, 7, generator=torch.Generator().manual_seed(3)) > 0.3
    readings = readings_of(*(attending(q, k, k, attn_mask=mask) for q, k in pairs))
    assert len(calls) == 1
    for one, (query, key) in zip(readings, pairs, strict=True):
        assert_reads(one, query, key, attn_mask=mask)


def test_what_is_changed_in_place_after_the_call_does_not_change_the_reading():
    query, key = tensors(2, 3, 7, 7)
    mask = torch.rand(7, 7, generator=torch.Generator().manual_seed(3)) > 0.3
    before = query.clone(), key.clone(), mask.clone()

    def then_overwrites(x):
        F.scaled_dot_product_attention(query, key, key, mask)
        query.zero_()
        key.mul_(7.0)
        mask.logical_not_()
        return x

    def again(x):
        F.scaled_dot_product_attention(*map(torch.clone, before[:2]), before[1], mask)
        return x

    first, second = readings_of(then_overwrites, again)
    assert_reads(first, *before[:2], attn_mask=before[2])
    assert_reads(second, *before[:2], attn_mask=~before[2])


def test_precision_is_that_of_the_call_and_not_that_of_the_steps_end():
    query, key = tensors(2, 3, 7, 5)
    with Watch(every=1, store=(readings := []), losses=False) as watch:
        F.scaled_dot_product_attention(query, key, key)
        with torch.autocast("cpu", torch.bfloat16):
            watch.step()
            F.scaled_dot_product_attention(query, key, key)
        watch.step()
    assert_reads(readings[0], query, key)
    assert_reads(readings[1], query.bfloat16(), key.bfloat16())


def test_several_calls_of_a_layer_are_merged():
    pairs = [tensors(2, 3, 7, 5, seed=seed) for seed in range(3)]

    def attend(x):
        for query, key in pairs:
            F.scaled_dot_product_attention(query, key, key)
        return x

    (one,) = readings_of(attend)
    assert_reads(one, *(torch.cat(parts) for parts in zip(*pairs, strict=True)))


def test_what_cannot_be_measured_spoils_no_other_layer(monkeypatch):
    vitals = functional.vitals
    broken, key = tensors(2, 3, 7, 5, seed=9)

    def picky(query, *args, **kwargs):
        if (query[:, None] == broken[None]).flatten(2).all(-1).any():
            raise ArithmeticError("out of luck")
        return vitals(query, *args, **kwargs)

    monkeypatch.setattr(functional, "vitals", picky)
    sound = tensors(2, 3, 7, 5)
    model = nn.Sequential(
        Attends(attending(*sound, sound[1])), Attends(attending(broken, key, key))
    )
    with Watch(model, every=1, store=(readings := []), losses=False) as watch:
        for _ in range(2):
            model(torch.zeros(1))
            watch.step()
    assert [one.layer for one in readings] == ["0", "0"]
    assert_reads(readings[0], *sound)
    assert watch.coverage().reasons == {"1": "ArithmeticError: out of luck"}


def test_a_long_step_holds_no_more_than_some_bytes(calls):
    query, key = tensors(1, 2, 64, 64)
    size = 2 * query.numel() * 4
    fit = stacks.MOST_HELD // size

    def attend(x):
        for _ in range(3 * fit):
            F.scaled_dot_product_attention(query, key, key)
        return x

    with Watch(every=1, store=[], losses=False) as watch:
        attend(None)
        assert len(calls) == 3
        assert not watch._stacks._stacks
        watch.step()


def test_nothing_is_held_after_the_step():
    model = TinyGPT()
    with Watch(model, every=1, store=[]) as watch:
        model(torch.zeros(1, 5, dtype=torch.long)).sum().backward()
        assert watch._stacks._stacks
        watch.step()
        assert not watch._stacks._stacks
        assert not watch._stacks._masks
