"""Calls that are measured together at the step's end say what each would have said alone."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from watched_models import TinyGPT, assert_reads

from scaledot import Watch, functional
from scaledot.watch import stacks
from scaledot.watch.sample import entries_of


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


# Calls of layers that were read before are known again and copied without another look. -----------


@pytest.fixture
def known(monkeypatch):
    """Of each call that was shown: whether it was known again."""
    found = []
    again = stacks.Stacks.again

    def counted(self, scores, call):
        stack = again(self, scores, call)
        found.append(stack is not None)
        return stack

    monkeypatch.setattr(stacks.Stacks, "again", counted)
    return found


class Given(nn.Module):
    """Layers of attention that are given their arguments anew in each step."""

    def __init__(self, layers=3):
        super().__init__()
        self.layers = nn.ModuleList(Attends(self.attend) for _ in range(layers))

    def attend(self, arguments):
        args, words = arguments
        return F.scaled_dot_product_attention(*args, **words)

    def forward(self, calls):
        for layer, arguments in zip(self.layers, calls, strict=True):
            layer(arguments)


def steps_of(model, *steps, every=None):
    """The readings of each step; every=None: samples, in steps that are all due."""
    store = Kept()
    with Watch(model, every=every, store=store, losses=False, alarms=False) as watch:
        for calls in steps:
            watch.cadence.due = True
            model(calls)
            watch.step()
    found = [[one for one in store.readings if one.step == step] for step in range(len(steps))]
    for readings in found:
        readings.sort(key=lambda one: one.layer)
    return found, store


class Kept:
    def __init__(self):
        self.readings, self.scalars = [], []

    def write(self, readings=(), scalars=()):
        self.readings += readings
        self.scalars += scalars


def calls_of(seed, layers=3, shape=(4, 4, 33, 8), keys=None, **words):
    pairs = [tensors(*shape, seed=97 * seed + layer) for layer in range(layers)]
    if keys is not None:
        pairs = [
            (q, tensors(*keys, seed=97 * seed + layer)[0]) for layer, (q, _) in enumerate(pairs)
        ]
    return [((q, k, k), words) for q, k in pairs]


ALIKE = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "grouped": {"keys": (4, 2, 33, 8), "enable_gqa": True},
    "cross": {"keys": (4, 4, 29, 8)},
    "hides": {"attn_mask": torch.rand(33, 33, generator=torch.Generator().manual_seed(3)) > 0.3},
}


@pytest.mark.parametrize("every", [None, 1], ids=["sampled", "whole"])
@pytest.mark.parametrize("words", ALIKE.values(), ids=ALIKE)
def test_what_is_known_again_is_read_as_if_it_were_new(known, words, every):
    steps = [calls_of(seed, **words) for seed in range(5)]
    found, _ = steps_of(Given(), *steps, every=every)
    assert known[-3:] == [False, True, True]  # the first of a step opens the stack
    assert known.count(True) == 2 * 4  # in the first step the layers are met
    for step, (calls, readings) in enumerate(zip(steps, found, strict=True)):
        part = slice(None) if every == 1 or step < 2 else entries_of(step, 4, 33)
        assert len(readings) == 3
        for ((query, key, _), words), one in zip(calls, readings, strict=True):
            assert_reads(one, query[part], key[part], **words)


def test_rows_of_calls_that_are_known_again_are_counted(known):
    _, store = steps_of(Given(), *(calls_of(seed) for seed in range(4)))
    rows = {(s.step, s.name): s.value for s in store.scalars if s.name.startswith("rows")}
    assert rows == {
        (2, "rows_read"): 3 * 33,
        (2, "rows_there"): 3 * 4 * 33,
        (3, "rows_read"): 3 * 33,
        (3, "rows_there"): 3 * 4 * 33,
    }
    assert any(known)


def test_shapes_that_change_from_step_to_step_are_known_again(known):
    steps = [calls_of(seed, shape=(4, 4, 33 + seed, 8)) for seed in range(5)]
    found, _ = steps_of(Given(), *steps)
    assert known.count(True) == 2 * 4
    for step in range(2, 5):
        part = entries_of(step, 4, 33 + step)
        for ((query, key, _), _words), one in zip(steps[step], found[step], strict=True):
            assert_reads(one, query[part], key[part])


def test_calls_that_differ_are_not_taken_for_one_another(known):
    causal, plain = calls_of(1, is_causal=True), calls_of(2)
    half = [((*(t.bfloat16() for t in args),), words) for args, words in calls_of(3)]
    mask = torch.rand(33, 33, generator=torch.Generator().manual_seed(3)) > 0.3
    masked = calls_of(4, attn_mask=mask)
    mixed = [causal[0], plain[1], half[2], masked[0], causal[1], calls_of(5, scale=0.1)[0]]
    for _ in range(2):
        found, _ = steps_of(Given(6), *[mixed] * 4, every=1)
        assert known.count(True) == 3  # of each later step, the second causal one
        known.clear()
        for readings in found:
            for ((query, key, _), words), one in zip(mixed, readings, strict=True):
                assert_reads(one, query, key, **words)


def test_what_is_written_to_after_a_known_call_does_not_change_the_reading(known):
    class Overwrites(Given):
        def attend(self, arguments):
            (query, key, _), _words = arguments
            F.scaled_dot_product_attention(query, key, key)
            query.zero_()
            key.mul_(7.0)

    steps = [calls_of(seed) for seed in range(4)]
    before = [[(q.clone(), k.clone()) for (q, k, _), _ in calls] for calls in steps]
    found, _ = steps_of(Overwrites(), *steps, every=1)
    assert any(known)
    for pairs, readings in zip(before, found, strict=True):
        for pair, one in zip(pairs, readings, strict=True):
            assert_reads(one, *pair)


def test_a_known_call_leaves_no_graph_and_asks_no_mode_of_the_users(known):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counts(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            called.append(str(function))
            return function(*args, **(kwargs or {}))

    called, model = [], Given()
    calls = calls_of(0)
    for (query, key, _), _words in calls:
        query.requires_grad_()
        key.requires_grad_()
    with Watch(model, every=1, store=[], losses=False) as watch:
        for _ in range(3):
            model(calls)
            held = [t for one in watch._stacks._stacks.values() for t in one.queries + one.keys]
            assert len(held) == 6
            assert not any(t.requires_grad for t in held)
            watch.step()
        assert any(known)
        known.clear()
        with Counts():
            model(calls)
        assert not any("clone" in name for name in called)
        assert known == []  # looked at in full, out of the mode's sight


def test_evaluation_is_not_known_again_as_training(known):
    model = Given()
    store = Kept()
    with Watch(model, every=1, store=store, losses=False) as watch:
        for step in range(4):
            model.train(step != 3)
            model(calls_of(step))
            watch.step()
    assert [one.phase for one in store.readings] == ["train"] * 9 + ["eval"] * 3
    assert known.count(True) == 2 * 2


def test_precision_that_changes_within_a_step_is_not_known_again(known):
    model, store = Given(), Kept()
    calls = calls_of(0)
    with Watch(model, every=1, store=store, losses=False) as watch:
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                model(calls)
            watch.step()
            model.layers[0](calls[0])
            with torch.autocast("cpu", torch.bfloat16):
                model.layers[1](calls[1])
            model.layers[2](calls[2])
            watch.step()
    for one in store.readings:
        (query, key, _), _words = calls[int(one.layer[-1])]
        if one.step % 2 == 0 or one.layer == "layers.1":
            query, key = query.bfloat16(), key.bfloat16()
        assert_reads(one, query, key)


def test_what_is_broken_in_a_known_call_is_read_whole(known):
    steps = [calls_of(seed) for seed in range(4)]
    (query, _key, _), _words = steps[3][1]
    query[(entries_of(3, 4, 33).start + 1) % 4, 1, 0] = float("nan")
    found, _ = steps_of(Given(), *steps)
    assert known[-3:] == [False, True, True]
    assert found[3][1].value("nonfinite").tolist() == [0, 1, 0, 0]
    assert found[3][1].value("rows").tolist() == [132, 131, 132, 132]
    assert found[3][0].value("rows").tolist() == [33] * 4
