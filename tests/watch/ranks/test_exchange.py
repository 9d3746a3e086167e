"""The ranks' conversation, in one process: who sends what, how often, and how it can fail."""

import math

import numpy as np
import pytest
import torch

from scaledot.measure import COUNT_FIELDS, FLOAT_FIELDS
from scaledot.watch.gather import Key, Waiting
from scaledot.watch.ranks.exchange import KNOWN, Exchange, OutOfStep
from scaledot.watch.ranks.layout import Layout, Slot
from scaledot.watch.ranks.merge import readings_of, scalars_of, wish_of
from scaledot.watch.ranks.parcel import SIZE, Header, Parcel
from scaledot.watch.ranks.told import NUMBER, Placing, numbered
from scaledot.watch.reading import Scalar


class Table:
    """Where all ranks put their bytes."""

    def __init__(self, ranks):
        self.ranks, self.rounds = ranks, []
        self.sides = [Side(self, rank) for rank in range(ranks)]


class Side:
    def __init__(self, table, rank):
        self.table, self.rank, self.number = table, rank, 0

    def gather(self, own, size):
        assert len(own) <= size
        if len(self.table.rounds) == self.number:
            self.table.rounds.append((size, {}))
        expected, sent = self.table.rounds[self.number]
        assert size == expected  # else gloo would fail, or hang
        sent[self.rank] = own.ljust(size, b"\0")
        self.number += 1
        return Sent(self.table, sent)


class Sent:
    def __init__(self, table, sent):
        self.table, self.sent = table, sent

    @property
    def done(self):
        return len(self.sent) == self.table.ranks

    def result(self):
        return [self.sent[rank] for rank in range(self.table.ranks)]


def job(ranks):
    table = Table(ranks)
    return [Exchange(side, rank, ranks) for rank, side in enumerate(table.sides)]


def parcel(step=0, layers=None, scalars=(), wish=0, last=False, told=None, firsts=None):
    """layers: {(name, phase): heads}, every number of them telling its layer and its step."""
    heads = {Key(*key): number for key, number in (layers or {}).items()}
    every = sum(heads.values())
    floats = torch.full((len(FLOAT_FIELDS), 1, every), float(step + 1))
    counts = torch.full((len(COUNT_FIELDS), 1, every), step + 1)
    waiting = [Waiting(step, 5.0, heads, floats, counts, None)] if heads else []
    named = [Scalar(step, name, value) for name, value in dict(scalars).items()]
    return Parcel(step, waiting, named, [], wish, last, firsts or {}, told or Layout())


def exchanged(exchanges, parcels):
    """All ranks' bundles of one reading. Their order must be the same: rank 0 finishes last."""
    for exchange, one in zip(exchanges, parcels, strict=True):
        exchange.put(one)
    for _ in range(3):
        for exchange in reversed(exchanges):
            exchange.advance()
    found = [exchange.taken(10**9) for exchange in exchanges]
    assert all(len(one) == 1 for one in found)
    return [one[0][1] for one in found]


ONE = {("a", "train"): 3, ("b", "train"): 2}


def test_one_collective_a_reading_once_the_layers_are_known():
    exchanges = job(3)
    found = []
    for step in range(4):
        bundles = exchanged(exchanges, [parcel(step, ONE) for _ in range(3)])
        assert {bundle.collectives for bundle in bundles} == {bundles[0].collectives}
        found.append((bundles[0].collectives, bundles[0].bytes))
    assert [collectives for collectives, _ in found] == [3, 1, 1, 1]
    numbers = 6 * 8 + 2 * (8 + 8) + 5 * (13 * 4 + 6 * 8)
    assert found[-1][1] == 3 * (SIZE + numbers)


def test_all_ranks_make_the_same_readings():
    exchanges = job(2)
    layers = [ONE, {("a", "train"): 3, ("c", "eval"): 1}]
    bundles = exchanged(exchanges, [parcel(4, layers[rank]) for rank in range(2)])
    found = [readings_of(bundle, Placing()) for bundle in bundles]
    assert [one.layer for one in found[0]] == ["a", "b", "c"]
    for one, other in zip(*found, strict=True):
        assert (one.layer, one.phase, one.step) == (other.layer, other.phase, other.step)
        np.testing.assert_array_equal(one.floats, other.floats)
        np.testing.assert_array_equal(one.counts, other.counts)
    assert [one.value("rows")[0] for one in found[0]] == [10, 5, 5]


def test_a_rank_without_layers_takes_part_and_a_reading_with_more_takes_one_round_more():
    exchanges = job(2)
    evaluated = {**ONE, ("a", "eval"): 3}
    counts = []
    for step, layers in enumerate([ONE, ONE, evaluated, ONE, evaluated, ONE]):
        bundle = exchanged(exchanges, [parcel(step, layers), parcel(step)])[0]
        counts.append(bundle.collectives)
    # The second evaluation is known by name; its numbers need room all the same.
    assert counts == [3, 1, 3, 1, 2, 1]


def test_more_kinds_of_readings_than_are_remembered():
    exchanges = job(2)
    for turn in range(2):
        for number in range(KNOWN + 3):
            step = turn * 100 + number
            one = parcel(step, {(f"layer{number}", "train"): 1})
            for bundle in exchanged(exchanges, [one, parcel(step)]):
                assert [r.layer for r in readings_of(bundle, Placing())] == [f"layer{number}"]


def test_the_scalars_of_a_step():
    numbers = [{"loss": 1.0, "learning_rate": 0.5, "step_time": 2.0}, {"loss": 2.0, "step_time": 3}]
    bundle = exchanged(job(2), [parcel(7, scalars=one) for one in numbers])[0]
    assert scalars_of(bundle) == [
        Scalar(7, "loss", 1.5),
        Scalar(7, "learning_rate", 0.5),
        Scalar(7, "step_time", 3.0),
    ]
    lost = [{"loss": math.nan}, {"loss": 2.0}]
    bundle = exchanged(job(2), [parcel(7, scalars=one) for one in lost])[0]
    assert math.isnan(scalars_of(bundle)[0].value)


def test_the_rarest_wish_is_everybodys():
    bundle = exchanged(job(3), [parcel(wish=wish) for wish in (0, 40, 7)])[0]
    assert wish_of(bundle) == 40


def test_ranks_at_different_steps_are_named():
    exchanges = job(2)
    for step, exchange in enumerate(exchanges):
        exchange.put(parcel(6 + step))
    exchanges[0].advance()
    with pytest.raises(OutOfStep, match="rank 0 is at step 6, rank 1 at step 7"):
        exchanges[1].advance()


def test_a_watch_that_ends_may_do_so_at_another_step():
    exchanges = job(2)
    for exchange, one in zip(exchanges, [parcel(6), parcel(9, last=True)], strict=True):
        exchange.put(one)
    for _ in range(3):
        for exchange in exchanges:
            exchange.advance()
    assert exchanges[0].taken(6)[0][1].over == [1]


def test_nothing_is_sent_to_a_watch_that_has_ended():
    exchanges = job(2)
    exchanges[0].put(parcel(0))
    exchanges[0].put(parcel(1))
    exchanges[1].put(parcel(0, last=True))
    for _ in range(3):
        for exchange in reversed(exchanges):
            exchange.advance()
    assert exchanges[0].side.number == exchanges[1].side.number
    assert exchanges[0].wait(1, end=0.0)
    assert [bundle.over for _, bundle in exchanges[0].taken(1)] == [[1]]
    assert [left.step for left in exchanges[0].abandon()] == [1]


def test_what_another_version_sends_is_refused():
    with pytest.raises(ValueError, match="another version of scaledot"):
        Header.read(b"old!".ljust(SIZE, b"\0"))


@pytest.mark.parametrize("text", [b"{}", b"[[],[],[]]", b'[[["a","train",0,0]],[],[],[]]', b"\xff"])
def test_a_list_of_layers_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="another rank's list of layers"):
        Layout.decoded(text)


def test_a_layout_is_read_as_it_was_sent():
    layout = Layout((Slot("layers.0", "train", 3, 6),), (0, 1), (0, 2), numbered(["layers.0.x"]))
    assert Layout.decoded(layout.encoded()) == layout


def test_the_first_number_of_a_name():
    names = ("layers.12.attn", "h.0", "model.decoder.3.attn#2", "0.1", "block2.attn")
    found = [match and match[2] for match in map(NUMBER.match, names)]
    assert found == ["12", "0", "3", "0", None]


def merged(parcels):
    bundle = exchanged(job(len(parcels)), parcels)[0]
    return {one.layer: one for one in readings_of(bundle, Placing())}


def test_heads_of_a_rank_are_put_where_they_belong():
    parcels = [parcel(3, {("a", "train"): 2}, firsts={"a": 2 * rank}) for rank in (0, 1)]
    assert merged(parcels)["a"].value("rows").tolist() == [4] * 4


def test_stages_that_count_from_zero_are_numbered_through():
    names = [["layers.0.attn", "layers.1.mlp"], ["layers.0.attn"]]
    layers = [{("layers.0.attn", "train"): 2}, {("layers.0.attn", "train"): 2}]

    def parcels(names):
        told = [Layout((), (), (0, 1), numbered(one)) for one in names]
        return [parcel(0, layers[rank], told=told[rank]) for rank in (0, 1)]

    assert set(merged(parcels(names))) == {"layers.0.attn", "layers.2.attn"}
    # Numbers that do not meet are those of the whole model, and stay.
    assert set(merged(parcels([["layers.0.attn"], ["layers.3.attn"]]))) == {"layers.0.attn"}


def test_zero_queries_do_not_decide_who_shares_heads():
    """All heads look alike until the projection has learned something."""
    placing, exchanges, told = Placing(), job(2), Layout((), (0, 1))

    def reading(step, values):
        parcels = []
        for value in values:
            floats = torch.zeros(len(FLOAT_FIELDS), 1, 1)
            counts = torch.zeros(len(COUNT_FIELDS), 1, 1, dtype=torch.int64)
            floats[FLOAT_FIELDS.index("q_rms")], counts[COUNT_FIELDS.index("rows")] = value, 5
            waiting = Waiting(step, 5.0, {Key("a", "train"): 1}, floats, counts, None)
            parcels.append(Parcel(step, [waiting], [], [], 0, False, {}, told))
        return readings_of(exchanged(exchanges, parcels)[0], placing)[0]

    assert reading(0, (0.0, 0.0)).heads == 2
    assert reading(1, (0.5, 0.25)).heads == 2
    assert reading(2, (0.5, 0.5)).heads == 2  # once told apart, they stay so
