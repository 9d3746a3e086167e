"""Which layer a call belongs to: found once, and seen again when something has changed."""

import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from watched_models import CausalSelfAttention, TinyGPT, train

from scaledot import Watch
from scaledot.watch import layers
from scaledot.watch.probes import place


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def counted(monkeypatch, name, called):
    original = getattr(place, name)
    monkeypatch.setattr(place, name, lambda *given: called.append(name) or original(*given))


@pytest.mark.parametrize("replace", [False, True])
def test_the_whole_stack_is_read_the_first_time_only(monkeypatch, replace):
    model, called = TinyGPT(), []
    with Watch(model, every=1, replace=replace, store=(readings := [])) as watch:
        counted(monkeypatch, "here", called)
        model(torch.zeros(1, 3, dtype=torch.long))
        watch.step()
        assert called == ["here"] * 2
        for _ in range(3):
            model(torch.zeros(1, 3, dtype=torch.long))
            watch.step()
        assert called == ["here"] * 2
    assert [(one.step, one.layer) for one in readings] == [
        (step, f"layers.{number}.attn") for step in range(4) for number in range(2)
    ]


def test_what_is_near_is_what_the_whole_stack_says():
    class Asks(nn.Module):
        def asked(self):
            return place.near(1), place.here()

        def ask(self):
            return self.asked()

        def forward(self):
            return self.ask()

    model = nn.Sequential(Asks())
    (module, lines), whole = next(model.children())()
    assert module is model[0] is whole.modules[0]
    addresses = tuple(one if isinstance(one, int) else id(one) for one in whole.site)
    assert addresses[2:] == lines != ()  # one of them begins a frame further out
    assert place.near(0) == (None, ())


def test_attentions_of_one_module_are_told_apart_in_every_step():
    class SelfAndCross(nn.Module):
        def attend(self, q, k):
            return F.scaled_dot_product_attention(q, k, k)

        def forward(self, x, memory):
            return self.attend(self.attend(x, x), memory)

    model = SelfAndCross()
    with Watch(model, every=1, store=(readings := [])) as watch:
        for _ in range(3):
            model(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4))
            watch.step()
    assert [(one.step, one.layer, one.value("pairs")[0]) for one in readings] == [
        (step, *call) for step in range(3) for call in (("SelfAndCross", 9), ("SelfAndCross#2", 15))
    ]


def test_code_that_is_made_anew_is_the_same_line():
    """As a notebook's cell that runs again, whose first code lives on."""
    source = "attend(x, x, x)"
    cells = [compile(source, "cell", "exec") for _ in range(3)]
    names = {"attend": F.scaled_dot_product_attention, "x": torch.randn(1, 2, 3, 4)}
    with Watch(every=1, store=(readings := [])) as watch:
        names["attend"] = F.scaled_dot_product_attention
        for cell in cells:
            exec(cell, names)
            watch.step()
    assert len({one.layer for one in readings}) == 1
    assert len(readings) == 3


def test_a_nameless_module_that_is_made_anew_in_each_call_is_one_layer():
    class Attends(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x)

    class Makes(nn.Module):
        def forward(self, x):
            return Attends()(x)

    model, elsewhere = Makes(), []
    with Watch(model, every=1, store=(readings := [])) as watch:
        for _ in range(4):
            model(torch.randn(1, 2, 3, 4))
            elsewhere.append(Attends())  # where the one before was
            watch.step()
    assert [one.layer for one in readings] == ["Makes"] * 4


def test_a_module_that_was_replaced_is_named_anew_and_not_kept_alive():
    model = nn.Sequential(CausalSelfAttention(), CausalSelfAttention())
    x = torch.randn(2, 5, 12)
    with Watch(model, every=1, store=(readings := [])) as watch:
        model(x)
        watch.step()
        gone = weakref.ref(model[0])
        model[0] = CausalSelfAttention(12, 6)
        gc.collect()
        assert gone() is None
        model(x)
        watch.step()
        model.append(CausalSelfAttention(12, 2))
        model(x)
    # The heads of a layer have changed: its readings do not go on as if they had not.
    names = ["0", "1", "0 (6 heads)", "1", "0 (6 heads)", "1", "2"]
    assert [one.layer for one in readings] == names


def test_an_id_that_belongs_to_another_module_now_tells_nothing():
    model = nn.Sequential(CausalSelfAttention(), CausalSelfAttention())
    with Watch(model, every=1, store=(readings := [])) as watch:
        model(torch.randn(2, 5, 12))
        watch.step()
        known = watch._layers._known
        first, second = known
        known[first] = known[second]  # as if the second lay where the first has been
        model(torch.randn(2, 5, 12))
    assert [one.layer for one in readings] == ["0", "1", "0", "1"]


def test_evaluation_with_gradients_is_told_from_training_in_every_step():
    model = TinyGPT(layers=1)
    with Watch(model, every=1, store=(readings := [])) as watch:
        for training in (True, False, True, False):
            model.train(training)
            model(torch.zeros(1, 3, dtype=torch.long))
            watch.step()
    assert [one.phase for one in readings] == ["train", "eval", "train", "eval"]


def test_what_is_known_of_calls_does_not_grow_without_end(monkeypatch):
    monkeypatch.setattr(layers, "MOST", 3)
    model = nn.Sequential(*(CausalSelfAttention() for _ in range(7)))
    with Watch(model, every=1, store=(readings := [])) as watch:
        for _ in range(2):
            model(torch.randn(2, 5, 12))
            watch.step()
            assert len(watch._layers._known) <= 3
    assert [one.layer for one in readings] == [*map(str, range(7))] * 2


def test_two_watches_and_their_names():
    """The inner model's own watch calls its layers otherwise, at the same calls."""
    model = nn.Sequential(nn.Sequential(CausalSelfAttention()), CausalSelfAttention())
    with (
        Watch(model, every=1, store=(outer := [])),
        Watch(model[0], every=1, store=(inner := [])),
    ):
        for _ in range(2):
            model(torch.randn(2, 5, 12))
    assert {one.layer for one in outer} == {"0.0", "1"}
    assert {one.layer for one in inner} == {"0"}
    assert outer[0].value("rows").tolist() == inner[0].value("rows").tolist() == [20] * 3


def test_threads_find_their_own_modules():
    models = [nn.Sequential(CausalSelfAttention()) for _ in range(4)]
    whole = nn.ModuleList(models)
    with Watch(whole, every=1, store=(readings := [])):
        workers = [
            threading.Thread(target=lambda one=one: [one(torch.randn(2, 5, 12)) for _ in range(5)])
            for one in models
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert {one.layer: one.value("rows").tolist() for one in readings} == {
        f"{number}.0": [5 * 2 * 5] * 3 for number in range(4)
    }


@pytest.mark.filterwarnings("ignore:.*requires_grad=True. Gradients will be None")
def test_reentrant_checkpoints_are_training_in_every_step():
    model = TinyGPT(recompute="reentrant")
    with Watch(model, every=1, store=(readings := [])):
        train(model, steps=3)
    assert [one.phase for one in readings] == ["train"] * 6
    assert all(one.value("rows").tolist() == [2 * 7] * 3 for one in readings)
