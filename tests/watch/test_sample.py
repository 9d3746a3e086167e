"""A reading of a part of the batch: which part, what it is called, and what it does not miss."""

import json
import math
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from watched_models import assert_reads

from scaledot import Watch
from scaledot.watch import reading, stacks
from scaledot.watch.sample import LEAST_ROWS, entries_of


class Kept:
    """A store that keeps all it is given."""

    def __init__(self):
        self.readings, self.scalars = [], []

    def write(self, readings=(), scalars=()):
        self.readings += readings
        self.scalars += scalars
        return True

    def of_step(self, step):
        return [one for one in self.readings if one.step == step]

    def rows(self, step):
        names = (reading.ROWS_READ, reading.ROWS_THERE)
        found = {s.name: s.value for s in self.scalars if s.step == step and s.name in names}
        return tuple(found[name] for name in names) if found else None


def tensors(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(2, *shape, generator=generator)).to(dtype).unbind()


def steps_of(attend, number=3, **words):
    """attend(step), in each of the first steps; the third is the first that is a sample."""
    store = Kept()
    with Watch(store=store, losses=False, alarms=False, **words) as watch:
        for step in range(number):
            assert watch.cadence.due
            attend(step)
            watch.step()
    return store


@pytest.mark.parametrize("batch", [2, 5, 7])
def test_first_steps_are_read_whole_and_later_ones_in_part(batch):
    query, key = tensors(batch, 3, LEAST_ROWS, 4)
    store = steps_of(lambda step: F.scaled_dot_product_attention(query, key, key))
    for step in (0, 1):
        assert_reads(store.of_step(step)[0], query, key)
        assert store.rows(step) is None
    entries = entries_of(2, batch, LEAST_ROWS)
    assert_reads(store.of_step(2)[0], query[entries], key[entries])
    assert store.rows(2) == (LEAST_ROWS, batch * LEAST_ROWS)


def test_an_interval_that_was_asked_for_reads_whole_batches():
    query, key = tensors(3, 2, LEAST_ROWS, 4)
    store = steps_of(lambda step: F.scaled_dot_product_attention(query, key, key), every=1)
    assert_reads(store.of_step(2)[0], query, key)
    assert store.rows(2) is None


def test_large_calls_are_sampled_where_they_are_made():
    tokens = 1 + stacks.LARGEST_CALL // (2 * 4 * 3 * 8)
    query, key = tensors(2, 3, tokens, 8)
    store = steps_of(lambda step: F.scaled_dot_product_attention(query, key, key, is_causal=True))
    entries = entries_of(2, 2, tokens)
    assert_reads(store.of_step(2)[0], query[entries], key[entries], is_causal=True)
    assert store.rows(2) == (tokens, 2 * tokens)


def test_short_sequences_are_read_until_there_are_enough_rows():
    query, key = tensors(40, 2, 5, 4)
    store = steps_of(lambda step: F.scaled_dot_product_attention(query, key, key))
    entries = entries_of(2, 40, 5)
    assert entries.stop - entries.start == math.ceil(LEAST_ROWS / 5)
    assert_reads(store.of_step(2)[0], query[entries], key[entries])


@pytest.mark.parametrize("batch", [2, 3, 8, 17, 64])
@pytest.mark.parametrize("every", [1, 2, 3, 8, 10, 17, 100])
def test_the_entries_take_turns_at_every_interval(batch, every):
    found = {entries_of(step, batch, 64).start for step in range(0, 20 * batch * every, every)}
    assert found == set(range(batch))


def test_the_choice_takes_nothing_from_the_random_numbers_of_the_training():
    before = torch.get_rng_state(), random.getstate()
    query, key = tensors(3, 2, LEAST_ROWS, 4)
    steps_of(lambda step: F.scaled_dot_product_attention(query, key, key))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()


@pytest.mark.one_case
@pytest.mark.parametrize("tokens", [LEAST_ROWS, 600], ids=["held", "at once"])
@pytest.mark.parametrize("of", ["query", "key"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_what_is_broken_in_another_entry_is_not_missed(tokens, of, dtype, value):
    query, key = tensors(4, 3, tokens, 8, dtype=dtype)
    other = (entries_of(2, 4, tokens).start + 1) % 4
    (query if of == "query" else key)[other, 1, 0] = value
    store = steps_of(lambda step: F.scaled_dot_product_attention(query, key, key))
    assert store.of_step(2)[0].value("nonfinite")[1] > 0
    assert store.of_step(2)[0].value("nonfinite").tolist() == (
        store.of_step(1)[0].value("nonfinite").tolist()
    )


def test_large_numbers_whose_sum_overflows_are_not_called_broken():
    query, key = tensors(4, 3, LEAST_ROWS, 8, dtype=torch.float16)
    query, key = query.abs() * 100, key.abs() / 1000
    store = steps_of(lambda step: F.scaled_dot_product_attention(query, key, key))
    assert not store.of_step(2)[0].value("nonfinite").any()
    assert store.of_step(2)[0].value("rows").tolist() == [LEAST_ROWS] * 3


MASKS = {
    "of pairs": (32, 37),
    "of each entry": (4, 1, 32, 37),
    "of each head": (3, 32, 37),
    "of keys": (4, 1, 1, 37),
}


@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("kind", ["bool", "hides", "bias"])
def test_masks_are_cut_as_the_batch_is(shape, kind):
    (query, _), (key, _) = tensors(4, 3, 32, 8), tensors(4, 3, 37, 8, seed=1)
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    if kind != "bias":
        mask = mask > -0.5
    if kind == "hides":
        mask = torch.zeros(shape).masked_fill(~mask, -math.inf)
    store = steps_of(lambda step: F.scaled_dot_product_attention(query, key, key, mask))
    entries = entries_of(2, 4, 32)
    part = mask[entries] if mask.dim() == 4 else mask
    assert_reads(store.of_step(2)[0], query[entries], key[entries], attn_mask=part)


def test_the_projections_of_a_module_are_made_of_a_part_of_its_batch():
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(12, 3, batch_first=True)
    x = torch.randn(4, 32, 12)
    padding = torch.zeros(4, 32, dtype=torch.bool)
    padding[:, 29:] = True
    of_heads = torch.randn(12, 32, 32) > 1.0
    store = steps_of(lambda step: attention(x, x, x, key_padding_mask=padding, attn_mask=of_heads))
    entries = entries_of(2, 4, 32)
    one, mask = x[entries], of_heads.view(4, 3, 32, 32)[entries].flatten(0, 1)
    alone = steps_of(
        lambda step: attention(one, one, one, key_padding_mask=padding[entries], attn_mask=mask)
    )
    ours, theirs = store.of_step(2)[0], alone.of_step(0)[0]
    assert ours.value("rows").tolist() == [32] * 3
    assert abs(ours.floats - theirs.floats).max() < 1e-5


def test_evaluations_are_sampled_as_training_is():
    query, key = tensors(4, 3, 32, 8)
    store = Kept()
    with Watch(store=store, losses=False) as watch:
        for step in range(3):
            watch._evaluations._next = -math.inf  # the last one is paid for
            watch._evaluations._taken.clear()
            with torch.no_grad():
                F.scaled_dot_product_attention(query, key, key)
            if step == 2:
                break
            F.scaled_dot_product_attention(query, key, key)
            watch.step()
    evaluations = [one for one in store.readings if one.phase == "eval"]
    assert_reads(evaluations[0], query, key)
    entries = entries_of(2, 4, 32)
    assert_reads(evaluations[-1], query[entries], key[entries])
    assert store.rows(2) == (32, 128)


def test_a_sample_is_called_one_in_the_store_the_report_and_its_json(tmp_path, capsys):
    from scaledot.cli import main
    from scaledot.watch.store import RunReader

    path = tmp_path / "run.vitals"
    query, key = tensors(4, 3, LEAST_ROWS, 8)
    with Watch(store=path, losses=False) as watch:
        for _ in range(3):
            F.scaled_dot_product_attention(query, key, key)
            watch.step()
    run = RunReader(path)
    for name, rows in ((reading.ROWS_READ, LEAST_ROWS), (reading.ROWS_THERE, 4 * LEAST_ROWS)):
        series = run.scalars(name)
        assert series.steps.tolist() == [2]
        assert series.values.tolist() == [rows]
    assert run.attributes.more["sample"] == {"read": 32, "there": 128}
    words = "readings are samples of the batch: 32 of 128 rows"
    assert words in run.attributes.more["cadence"]
    main(["report", str(path), "--html", str(tmp_path / "page.html")])
    assert words.capitalize() in (tmp_path / "page.html").read_text()
    assert words in " ".join(capsys.readouterr().out.split())
    main(["report", str(path), "--json"])
    assert json.loads(capsys.readouterr().out)["coverage"]["sample"] == {"read": 32, "there": 128}
