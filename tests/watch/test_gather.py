"""From the calls of a step to its readings, and when those are read from a device."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from watched_models import TinyGPT

import scaledot
from scaledot import Watch
from scaledot.watch import gather
from scaledot.watch.gather import MERGE_AT, Gathering, Key, Numbers


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def vitals_of(batch, heads=3, rows=5):
    query, key = torch.randn(2, batch, heads, rows, 4)
    return scaledot.vitals(query, key)


def test_calls_become_one_reading_a_layer():
    gathering = Gathering()
    one, two, other = vitals_of(2), vitals_of(4), vitals_of(6, heads=7)
    for layer, vitals in (("a", one), ("b", other), ("a", two)):
        gathering.add(layer, "train", Numbers(*vitals.packed()), vitals.shape[-1])
    assert gathering
    (waiting,) = gathering.close(step=11)  # both layers have a batch of 6
    assert not gathering
    first, second = waiting.readings()
    assert [(r.step, r.layer, r.phase, r.heads) for r in (first, second)] == [
        (11, "a", "train", 3),
        (11, "b", "train", 7),
    ]
    together = one.over_batch().merge(two.over_batch())
    for reading, expected in ((first, together), (second, other.over_batch())):
        for name in ("entropy", "logit_std", "k_rms", "max_logit", "rows", "pairs"):
            np.testing.assert_allclose(reading.value(name), getattr(expected, name), rtol=1e-6)
        assert reading.floats.base is None  # it keeps no other layer's numbers


def test_batch_times_heads_and_single_heads_are_folded():
    gathering = Gathering()
    folded = scaledot.vitals(*torch.randn(2, 6, 5, 4))  # [6]: 2 x 3 heads
    single = scaledot.vitals(*torch.randn(2, 5, 4))  # []
    gathering.add("folded", "train", Numbers(*folded.packed()), 3)
    gathering.add("single", "eval", Numbers(*single.packed()), 1)
    found = {r.layer: r for waiting in gathering.close(0) for r in waiting.readings()}
    assert found["folded"].value("rows").tolist() == [10] * 3
    assert found["single"].value("rows").tolist() == [5]


def test_many_calls_of_a_layer_take_no_more_memory_than_some():
    gathering, calls = Gathering(), [vitals_of(2) for _ in range(2 * MERGE_AT + 5)]
    for vitals in calls:
        gathering.add("a", "eval", Numbers(*vitals.packed()), 3)
        assert len(gathering._calls[Key("a", "eval")]) < MERGE_AT
    ((reading,),) = (waiting.readings() for waiting in gathering.close(0))
    assert reading.value("rows").tolist() == [len(calls) * 2 * 5] * 3
    expected = torch.stack([one.entropy for one in calls]).double().mean((0, 1))
    np.testing.assert_allclose(reading.value("entropy"), expected, rtol=1e-6)


def test_float64_beyond_float32_is_kept_as_infinity():
    gathering = Gathering()
    query, key = torch.randn(2, 1, 2, 5, 4, dtype=torch.float64)
    vitals = scaledot.vitals(query * 1e60, key.abs())
    gathering.add("a", "train", Numbers(*vitals.packed()), 2)
    (reading,) = gathering.close(0)[0].readings()
    assert reading.floats.dtype == np.float32
    assert np.isinf(reading.value("q_rms")).all()


class Event:
    """Of a copy that has arrived."""

    def query(self):
        return True

    def synchronize(self):
        pass


@pytest.fixture
def _from_device(monkeypatch):
    """Numbers come as from a device."""
    send = gather._send
    monkeypatch.setattr(
        gather, "_send", lambda step, layers: replace(send(step, layers), arrived=Event())
    )


class Kept(list):
    def write(self, readings=(), scalars=()):
        self.append(([one.step for one in readings], {one.step for one in scalars}))


class Training:
    def __init__(self):
        self.model = TinyGPT(layers=1)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def run(self, steps):
        for _ in range(steps):
            self.model(torch.zeros(1, 3, dtype=torch.long)).sum().backward()
            self._optimizer.step()


@pytest.mark.usefixtures("_from_device")
def test_numbers_from_a_device_are_read_when_they_are_here():
    training, kept = Training(), Kept()
    with Watch(training.model, every=1, store=kept) as one:
        for step in range(3):
            training.run(1)
            assert kept[-1] == ([step], {step})
            assert one.latest[Key("layers.0.attn", "train")].step == step


def test_numbers_of_the_host_are_read_at_once():
    training, kept = Training(), Kept()
    with Watch(training.model, every=1, store=kept):
        for step in range(3):
            training.run(1)
            assert kept[-1] == ([step], {step})
