"""Vitals merge disjoint rows, RowState merges key blocks of the same rows; both print well."""

import copy
import dataclasses
import json
import math
import pickle
from dataclasses import fields
from functools import reduce
from html.parser import HTMLParser

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree

import scaledot
from scaledot.measure import (
    BANDS,
    COUNT_FIELDS,
    FLOAT_FIELDS,
    ROW_FIELDS,
    RowState,
    RowVitals,
    Vitals,
)

HEADS, KEYS, WIDTH = 2, 7, 3
laws = settings(max_examples=60)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(20_17)


# --- Vitals --------------------------------------------------------------------------------------

KINDS = {
    "ordinary": lambda row: row,
    "zero": lambda row: row * 0,
    "negative": lambda row: -row.abs() * 3,
    "saturated": lambda row: row * 100,
    "huge": lambda row: row * 1e30,
    "nan": lambda row: row * math.nan,
}
batches = st.tuples(
    st.integers(0, 10_000),  # seed
    st.lists(st.sampled_from(sorted(KINDS)), max_size=5),  # rows, none at all too
    st.integers(0, KEYS),  # key length: 0 leaves every row without keys
    st.booleans(),
)


def tensors_of(batch):
    """query and key of one batch entry in float64, and its length."""
    seed, kinds, length, _ = batch
    numbers = torch.Generator().manual_seed(seed)
    query = torch.randn(1, HEADS, len(kinds), WIDTH, generator=numbers, dtype=torch.float64)
    for row, kind in enumerate(kinds):
        query[:, :, row] = KINDS[kind](query[:, :, row])
    key = torch.randn(1, HEADS, KEYS, WIDTH, generator=numbers, dtype=torch.float64)
    return query, key, torch.tensor([length])


def vitals_of(batch) -> Vitals:
    query, key, length = tensors_of(batch)
    with_sinks = torch.zeros(HEADS, dtype=torch.float64) if batch[3] else None
    return scaledot.vitals(query, key, key_lengths=length, sinks=with_sinks).over_batch()


def assert_same(one: Vitals, two: Vitals, rounding=1e-12):
    """Counts exactly; numbers within rounding of the largest of their kind."""
    assert one.shape == two.shape
    logits = ("max_logit", "logit_mean", "logit_std", "row_std")
    sizes = [getattr(v, name) for v in (one, two) for name in logits]
    size = torch.stack([torch.where(s.isfinite(), s.abs(), 0.0) for s in sizes]).amax(0)
    for name in COUNT_FIELDS:
        assert torch.equal(getattr(one, name), getattr(two, name)), name
    for name in (*FLOAT_FIELDS, "passes"):
        a, b = getattr(one, name), getattr(two, name)
        allowed = rounding * (1 + (size if name in logits else torch.maximum(a.abs(), b.abs())))
        fine = (a == b) | ((a - b).abs() <= allowed)
        assert fine.all(), f"{name}: {a.tolist()} and {b.tolist()}"


def assert_identical(one: Vitals, two: Vitals):
    for name in (*FLOAT_FIELDS, *COUNT_FIELDS):
        a, b = getattr(one, name), getattr(two, name)
        assert a.dtype == b.dtype
        assert torch.equal(a, b), f"{name}: {a.tolist()} and {b.tolist()}"


@laws
@given(batches, st.sampled_from([torch.float32, torch.float64]))
def test_empty_vitals_change_nothing(batch, dtype):
    vitals = vitals_of(batch)._map(lambda t: t.to(dtype) if t.is_floating_point() else t)
    for empty in (Vitals.empty(), Vitals.empty((HEADS,)), Vitals.empty((HEADS,), dtype)):
        assert_identical(vitals.merge(empty), vitals)
        assert_identical(empty.merge(vitals), vitals)


def test_empty_vitals_are_those_of_no_rows():
    empty = Vitals.empty((3,))
    assert empty.shape == (3,)
    assert empty.max_logit.tolist() == [-math.inf] * 3
    assert empty.passes.tolist() == [0.0] * 3
    assert empty.rows.dtype == torch.int64
    assert_identical(empty.merge(empty), empty)


@laws
@given(batches, batches)
def test_vitals_merge_in_either_order(one, two):
    a, b = vitals_of(one), vitals_of(two)
    assert_same(a.merge(b), b.merge(a))


@laws
@given(batches, batches, batches)
def test_vitals_merge_in_any_grouping(one, two, three):
    a, b, c = vitals_of(one), vitals_of(two), vitals_of(three)
    assert_same(a.merge(b).merge(c), a.merge(b.merge(c)))


@laws
@given(batches)
def test_merged_vitals_hold_no_nan_and_no_square_overflows(batch):
    merged = vitals_of(batch).merge(vitals_of((1, ["huge", "nan"], KEYS, False)))
    for name in (*FLOAT_FIELDS, "passes"):
        assert not getattr(merged, name).isnan().any(), name
        assert (getattr(merged, name) < math.inf).all(), name


@laws
@given(st.lists(batches, min_size=1, max_size=4))
def test_vitals_of_a_batch_are_the_merge_of_its_entries(entries):
    """Entries of one call need the same number of rows: the first's."""
    rows = entries[0][1]
    entries = [(seed, (kinds * 5)[: len(rows)], n, False) for seed, kinds, n, _ in entries]
    entries = [entry for entry in entries if len(entry[1]) == len(rows)]
    query, key, lengths = (
        torch.cat(parts) for parts in zip(*map(tensors_of, entries), strict=True)
    )
    whole = scaledot.vitals(query, key, key_lengths=lengths)
    assert whole.shape == (len(entries), HEADS)
    parts = [vitals_of(entry) for entry in entries]
    assert_same(whole.over_batch(), reduce(Vitals.merge, parts))
    assert_same(whole.over_batch(), reduce(Vitals.merge, reversed(parts)))


@laws
@given(batches, st.integers(0, 5))
def test_vitals_of_rows_are_the_merge_of_both_halves(batch, cut):
    """All but the key's own numbers, which both halves hold."""
    query, key, lengths = tensors_of(batch)
    whole = scaledot.vitals(query, key, key_lengths=lengths)
    parts = [
        scaledot.vitals(part, key, key_lengths=lengths)
        for part in (query[:, :, :cut], query[:, :, cut:])
    ]
    merged = parts[0].merge(parts[1])
    assert torch.equal(merged.k_entries, 2 * whole.k_entries)
    blank = torch.zeros_like(whole.k_entries)
    assert_same(
        Vitals(**{**vars(merged), "k_entries": blank}),
        Vitals(**{**vars(whole), "k_entries": blank}),
    )


def test_merge_weighs_with_the_right_counts():
    """By hand: 1 row of 2 pairs with one of 3 rows of 6 pairs."""
    one, two = Vitals.empty(dtype=torch.float64), Vitals.empty(dtype=torch.float64)
    counts = {"rows": (1, 3), "pairs": (2, 6), "ratio_rows": (1, 1), "q_entries": (1, 3)}
    numbers = {
        "entropy": (4.0, 0.0),
        "entropy_ratio": (0.5, 0.0),
        "logit_mean": (1.0, 5.0),
        "logit_std": (1.0, 1.0),
        "row_std": (2.0, 0.0),
        "q_rms": (2.0, 0.0),
        "max_logit": (-3.0, -7.0),
        "sum_p2": (1.0, 0.0),
    }
    for vitals, at in ((one, 0), (two, 1)):
        for name, values in {**counts, **numbers}.items():
            getattr(vitals, name).fill_(values[at])
    merged = one.merge(two)
    assert merged.entropy.item() == 1.0
    assert merged.entropy_ratio.item() == 0.25
    assert merged.logit_mean.item() == 4.0
    assert merged.logit_std.item() == pytest.approx(2.0)  # 1 within, 1/4 * 3/4 * 16 between
    assert merged.row_std.item() == pytest.approx(1.0)
    assert merged.q_rms.item() == pytest.approx(1.0)
    assert merged.max_logit.item() == -3.0
    assert merged.passes.item() == 0.75
    assert (merged.rows.item(), merged.pairs.item()) == (4, 8)


def test_merge_takes_the_wider_type():
    merged = Vitals.empty((2,)).merge(Vitals.empty((2,), torch.float64))
    assert merged.entropy.dtype == torch.float64


@pytest.mark.parametrize("lead", [(3,), (1, 3), (2, 3), (5, 3), (2, 5, 3)])
def test_over_batch_leaves_heads(lead):
    query, key = torch.randn(2, *lead, 5, WIDTH, dtype=torch.float64)
    vitals = scaledot.vitals(query, key)
    flat = vitals._map(lambda t: t.reshape(-1, 3))
    one_by_one = [flat._map(lambda t, i=i: t[i]) for i in range(flat.shape[0])]
    assert vitals.over_batch().shape == (3,)
    assert_same(vitals.over_batch(), reduce(Vitals.merge, one_by_one))


def test_over_batch_of_no_batch_is_empty_and_of_no_heads_has_none():
    none = scaledot.vitals(torch.randn(0, 3, 5, WIDTH), torch.randn(0, 3, 5, WIDTH)).over_batch()
    assert_identical(none, Vitals.empty((3,)))
    assert scaledot.vitals(torch.randn(2, 0, 5, 3), torch.randn(2, 0, 5, 3)).over_batch().shape == (
        0,
    )


@pytest.fixture
def vitals():
    numbers = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 2, 3, 13, 8, generator=numbers)
    query[:, 1] *= 100  # one head is ill
    query[0, 2, 4] = math.nan
    return scaledot.vitals(query, key, per_row=True)


def test_to_dict_is_json(vitals):
    plain = vitals.to_dict()
    back = json.loads(json.dumps(plain, allow_nan=False))
    assert set(back) == {*FLOAT_FIELDS, *COUNT_FIELDS, "passes", "per_row"}
    assert back["rows"] == vitals.rows.tolist()
    assert back["nonfinite"] == [[0, 0, 1], [0, 0, 0]]
    assert torch.equal(torch.tensor(back["entropy"]), vitals.entropy)
    assert set(back["per_row"]) == set(ROW_FIELDS)
    assert back["per_row"]["lse"][0][2][4] is None  # a broken row
    assert back["per_row"]["lse"][0][2][3] == vitals.per_row.lse[0, 2, 3].item()
    assert "per_row" not in vitals.over_batch().to_dict()
    assert Vitals.empty((2,)).to_dict()["max_logit"] == [None, None]


def test_repr_is_a_table_with_heads_and_bands(vitals):
    text = repr(vitals)
    title, head, *lines = text.splitlines()
    assert title.startswith("Vitals [2, 3]: 77 rows")
    assert head.split() == ["head", "0", "head", "1", "head", "2", "all", "healthy"]
    assert [line.split()[0] for line in lines] == list(BANDS)
    for line, band in zip(lines, BANDS.values(), strict=True):
        assert line.endswith(band.words)


def test_repr_marks_what_is_outside_its_band(vitals):
    lines = {line.split()[0]: line.split()[1:5] for line in repr(vitals).splitlines()[2:]}
    assert [cell.endswith("!") for cell in lines["max_logit"]] == [False, True, False, True]
    assert [cell.endswith("!") for cell in lines["nonfinite"]] == [False, False, True, True]
    assert not any(cell.endswith("!") for cell in lines["logit_mean"])


@pytest.mark.parametrize("heads", [0, 1, 8, 9, 13])
def test_repr_shows_a_few_heads_and_says_so(heads):
    text = repr(scaledot.vitals(torch.randn(2, heads, 5, 3), torch.randn(2, heads, 5, 3)))
    assert text.count("head ") == min(heads, 8)
    assert (f"of {heads} shown" in text) == (heads > 8)


def test_vitals_without_heads_or_rows_print_too():
    assert "head 0" in repr(scaledot.vitals(torch.randn(5, 3), torch.randn(5, 3)))
    assert "0 rows" in repr(Vitals.empty((3,)))
    assert "0 rows" in repr(Vitals.empty())


class Tags(HTMLParser):
    """Fails at a tag that closes another than the last one opened."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.text = [], [], ""

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_html_is_a_well_formed_table(vitals):
    page = Tags()
    page.feed(vitals._repr_html_())
    page.close()
    assert page.open == []
    assert page.seen.count("table") == 1
    assert page.seen.count("tr") == 1 + len(BANDS)
    assert all(band.words in page.text for band in BANDS.values())
    assert page.text.count("!") == repr(vitals).count("!")


def test_vitals_without_data_say_so():
    shape = (2, 3, 5, 7)
    on_meta = scaledot.vitals(torch.empty(shape, device="meta"), torch.empty(shape, device="meta"))
    with FakeTensorMode():
        fake = scaledot.vitals(torch.empty(shape), torch.empty(shape))
        assert repr(fake) == "Vitals [2, 3] without data"
    assert repr(on_meta) == "Vitals [2, 3] without data"
    assert on_meta._repr_html_() == "Vitals [2, 3] without data"


def test_vitals_are_a_pytree(vitals):
    for each in (vitals, vitals.over_batch()):
        leaves, spec = _pytree.tree_flatten(each)
        assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
        back = _pytree.tree_unflatten(leaves, spec)
        assert_identical(back, each)
        assert (back.per_row is None) == (each.per_row is None)
    doubled = _pytree.tree_map(lambda t: t * 2, vitals)
    assert torch.equal(doubled.rows, vitals.rows * 2)


def fresh(rows=False):
    """As a backend hands them over, with numbers that say where they belong."""
    shape = (2, 3)
    floats = torch.arange(len(FLOAT_FIELDS) * 6.0).reshape(-1, *shape)
    counts = 1000 + torch.arange(len(COUNT_FIELDS) * 6).reshape(-1, *shape)
    of_rows = torch.randn(len(ROW_FIELDS), *shape, 4)
    return Vitals.unpacked(floats, counts, RowVitals(*of_rows) if rows else None)


def test_fields_are_cut_when_one_is_looked_at():
    vitals = fresh()
    floats, counts = vitals.packed()
    assert vitals.shape == (2, 3)
    assert list(vars(vitals)) == ["per_row"]
    for names, whole in ((FLOAT_FIELDS, floats), (COUNT_FIELDS, counts)):
        for name, part in zip(names, whole, strict=True):
            assert torch.equal(getattr(vitals, name), part)
    assert vitals.entropy is vitals.entropy
    assert set(vars(vitals)) == {field.name for field in fields(Vitals)}
    assert vitals.packed()[0] is floats


def test_passes_that_a_backend_made_are_not_computed_again():
    plain = fresh()
    floats, counts = plain.packed()
    whole = torch.cat([floats, plain.passes[None]])
    made = Vitals.unpacked(whole, counts)
    assert made.passes.data_ptr() == whole[-1].data_ptr()
    assert torch.equal(made.passes, plain.passes)
    assert torch.equal(made.packed()[0], floats)
    assert torch.equal(made.entropy, plain.entropy)
    for again in (
        copy.deepcopy(made),
        pickle.loads(pickle.dumps(made)),
        made.merge(Vitals.empty()),
    ):
        torch.testing.assert_close(again.passes, plain.passes)
    with pytest.raises(ValueError, match="15 and 6 fields"):
        Vitals.unpacked(torch.cat([floats, floats[:2]]), counts)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("looked_at", [False, True])
@pytest.mark.parametrize(
    "again",
    [
        copy.copy,
        copy.deepcopy,
        lambda vitals: pickle.loads(pickle.dumps(vitals)),
        dataclasses.replace,
        lambda vitals: Vitals.unpacked(*vitals.packed(), vitals.per_row),
        lambda vitals: Vitals(**{f.name: getattr(vitals, f.name) for f in fields(vitals)}),
    ],
    ids=["copy", "deepcopy", "pickle", "replace", "packed", "fields"],
)
def test_copies_hold_all_fields(again, looked_at, rows):
    vitals = fresh(rows)
    if looked_at:
        assert vitals.rows.shape == (2, 3)
    copied = again(vitals)
    assert_identical(copied, fresh())
    assert (copied.per_row is not None) == rows
    assert [part.shape for part in copied.packed()] == [part.shape for part in fresh().packed()]


def test_a_field_that_does_not_exist_is_named():
    with pytest.raises(AttributeError, match="no attribute 'entropie'"):
        fresh().entropie  # noqa: B018
    with pytest.raises(dataclasses.FrozenInstanceError):
        fresh().entropy = torch.zeros(2, 3)


def test_vitals_come_out_of_vmap():
    floats, counts = fresh().packed()
    both = torch.func.vmap(Vitals.unpacked, in_dims=(1, 1))(floats, counts)
    assert_identical(both, fresh())


@pytest.mark.compile
@pytest.mark.parametrize("looked_at", [False, True])
def test_a_compiled_function_takes_vitals_and_makes_them(looked_at):
    def double(vitals):
        merged = vitals.merge(vitals)
        back = Vitals.unpacked(*vitals.packed())
        return merged, back, vitals.shape, vitals.entropy + 1

    vitals = fresh()
    if looked_at:
        assert vitals.rows.shape == (2, 3)
    merged, back, shape, entropy = torch.compile(double, backend="eager", fullgraph=True)(vitals)
    assert_identical(back, fresh())
    assert_identical(merged, fresh().merge(fresh()))
    assert shape == (2, 3)
    assert torch.equal(entropy, fresh().entropy + 1)


# --- RowState ------------------------------------------------------------------------------------

LOGITS = st.one_of(
    st.floats(-10, 10, width=32),
    st.floats(1e4, 1e4 + 20, width=32),
    st.sampled_from([0.0, -1.0, -1e4, 88.0, -104.0]),
)
blocks_of_logits = st.lists(st.lists(LOGITS, max_size=5), min_size=1, max_size=5)
huge_blocks = st.lists(
    st.lists(st.sampled_from([0.0, 1e30, -1e30, 3.0, 1e4]), max_size=3), min_size=1, max_size=4
)
types = st.sampled_from([torch.float32, torch.float64])


def state_of(block, dtype) -> RowState:
    return RowState.from_logits(torch.tensor([block], dtype=dtype))


def assert_same_rows(one: RowState, two: RowState, size=1.0):
    """Within rounding; `size` is that of the logits, whose mean and spread round with them."""
    assert torch.equal(one.count, two.count)
    eps = torch.finfo(one.max.dtype).eps
    names = ("max", "lse", "entropy", "sum_p2", "top_p", "mean", "std")
    for name in names:
        a, b = getattr(one, name), getattr(two, name)
        scale = size if name in ("max", "lse", "mean", "std") else 1.0
        same = (a == b) | (a.isnan() & b.isnan())
        assert (same | ((a - b).abs() <= 64 * eps * (1 + scale))).all(), f"{name}: {a} and {b}"


@laws
@given(blocks_of_logits, types, st.randoms(use_true_random=False))
def test_merged_key_blocks_are_the_whole_row_in_any_order(blocks, dtype, order):
    whole = state_of([x for block in blocks for x in block], dtype)
    order.shuffle(blocks)
    states = [state_of(block, dtype) for block in blocks]
    size = max((abs(x) for block in blocks for x in block), default=0.0)
    assert_same_rows(reduce(RowState.merge, states), whole, size)
    while len(states) > 1:  # as a tree
        states = [reduce(RowState.merge, states[i : i + 2]) for i in range(0, len(states), 2)]
    assert_same_rows(states[0], whole, size)


@laws
@given(huge_blocks, types)
def test_huge_logits_merge_to_the_whole_row(blocks, dtype):
    """Squares of 1e30 are beyond float32: there the spread is inf, merged or not, never NaN."""
    whole = state_of([x for block in blocks for x in block], dtype)
    merged = reduce(RowState.merge, [state_of(block, dtype) for block in blocks])
    assert not merged.m2.isnan().any()
    assert_same_rows(merged, whole, 1e30)


@laws
@given(st.lists(st.one_of(LOGITS, st.sampled_from([1e30, -1e30])), max_size=5), types)
def test_empty_row_state_changes_nothing(block, dtype):
    state = state_of(block, dtype)
    for empty in (RowState.empty((1,), dtype), state_of([], dtype)):
        for merged in (state.merge(empty), empty.merge(state)):
            for field in fields(RowState):
                got, want = getattr(merged, field.name), getattr(state, field.name)
                assert torch.equal(got, want), f"{field.name}: {got} and {want}"


@laws
@given(blocks_of_logits, types)
def test_nan_in_one_block_shows_in_the_merged_row(blocks, dtype):
    states = [state_of(block, dtype) for block in (*blocks, [1.0, math.nan])]
    for merged in (reduce(RowState.merge, states), reduce(RowState.merge, states[::-1])):
        for name in ("max", "lse", "entropy", "sum_p2", "top_p", "mean", "std"):
            assert getattr(merged, name).isnan().all(), name


@laws
@given(st.lists(LOGITS, min_size=1, max_size=7), st.floats(-1e4, 1e4))
def test_constant_added_to_a_row_moves_its_lse_and_nothing_else(block, constant):
    plain = state_of(block, torch.float64)
    shifted = state_of([x + constant for x in block], torch.float64)
    for name in ("entropy", "sum_p2", "top_p", "std"):
        torch.testing.assert_close(
            getattr(shifted, name), getattr(plain, name), rtol=1e-9, atol=1e-9
        )
    torch.testing.assert_close(shifted.lse, plain.lse + constant, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("keys", [1, 2, 7, 63, 64, 65])
@pytest.mark.parametrize("offset", [0.0, -50.0, 1e4])
def test_properties_are_the_plain_formulas(keys, offset):
    logits = 3 * torch.randn(2, 5, keys, dtype=torch.float64) + offset
    state = RowState.from_logits(logits)
    p = logits.softmax(-1)
    close = {"rtol": 1e-11, "atol": 1e-11}
    torch.testing.assert_close(state.lse, logits.logsumexp(-1), **close)
    torch.testing.assert_close(state.entropy, -(p * logits.log_softmax(-1)).sum(-1), **close)
    torch.testing.assert_close(state.sum_p2, p.square().sum(-1), **close)
    torch.testing.assert_close(state.top_p, p.amax(-1), **close)
    torch.testing.assert_close(state.mean, logits.mean(-1), **close)
    torch.testing.assert_close(state.std, logits.std(-1, correction=0), **close)
    assert torch.equal(state.max, logits.amax(-1))


def test_blocks_far_apart_in_lse_keep_their_digits():
    """The second block is 1e4 above the first: what it says is all there is."""
    low = torch.randn(5, 7)
    high = torch.randn(5, 11) + 1e4
    merged = RowState.from_logits(low).merge(RowState.from_logits(high))
    exact = RowState.from_logits(torch.cat([low, high], -1).double())
    alone = RowState.from_logits(high)
    assert torch.equal(merged.entropy, alone.entropy)
    assert torch.equal(merged.sum_p2, alone.sum_p2)
    torch.testing.assert_close(merged.lse.double(), exact.lse, rtol=2e-7, atol=0)
    torch.testing.assert_close(merged.std.double(), exact.std, rtol=1e-6, atol=0)


def test_hidden_logits_do_not_count_whatever_they_are():
    logits = torch.randn(3, 5, 7, dtype=torch.float64)
    allowed = torch.rand(3, 5, 7) < 0.5
    allowed[0, 0] = False
    spoiled = logits.masked_fill(~allowed, math.nan)
    state = RowState.from_logits(spoiled, allowed)
    alone = RowState.from_logits(logits[1, 1][allowed[1, 1]])
    assert state.lse[0, 0] == -math.inf
    for name in ("entropy", "sum_p2", "top_p", "std", "count"):
        assert getattr(state, name)[0, 0] == 0, name
        torch.testing.assert_close(getattr(state, name)[1, 1], getattr(alone, name))
        assert not getattr(state, name).isnan().any(), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_logits_are_summed_in_float32(dtype):
    logits = torch.randn(3, 65).to(dtype)
    state = RowState.from_logits(logits)
    assert state.sum_exp.dtype == torch.float32
    torch.testing.assert_close(state.lse, logits.float().logsumexp(-1))


def test_logits_must_be_floating_point():
    with pytest.raises(TypeError, match="floating point"):
        RowState.from_logits(torch.ones(2, 3, dtype=torch.int64))


def test_row_state_agrees_with_the_rows_of_vitals():
    query, key = torch.randn(2, 2, 3, 13, 5, dtype=torch.float64)
    rows = scaledot.vitals(query, key, is_causal=True, per_row=True).per_row
    causal = torch.ones(13, 13, dtype=torch.bool).tril().expand(2, 3, 13, 13)
    state = RowState.from_logits(query @ key.mT / math.sqrt(5), causal)
    for name, own in zip(ROW_FIELDS, ("max", "lse", "entropy", "top_p", "sum_p2"), strict=True):
        torch.testing.assert_close(getattr(rows, name), getattr(state, own))


def test_row_state_is_a_pytree():
    state = RowState.from_logits(torch.randn(3, 5))
    leaves, spec = _pytree.tree_flatten(state)
    assert len(leaves) == len(fields(RowState))
    assert torch.equal(_pytree.tree_unflatten(leaves, spec).lse, state.lse)


def held():
    made = torch.arange(float(len(FLOAT_FIELDS))), torch.arange(len(COUNT_FIELDS))
    return Vitals.unpacked(*(part[:, None] for part in made))


def test_a_first_look_inside_of_a_transform_leaves_plain_tensors():
    vitals = held()
    torch.func.grad(lambda x: (x * vitals.entropy.sum()).sum())(torch.ones(3))
    assert pickle.loads(pickle.dumps(vitals)).entropy.tolist() == [4.0]


def test_a_first_look_under_fake_tensors_leaves_real_ones():
    vitals = held()
    with FakeTensorMode():
        assert vitals.shape == (1,)
        _ = vitals.rows
    assert vitals.to_dict()["entropy"] == [4.0]


def test_numbers_of_other_fields_are_refused():
    with pytest.raises(ValueError, match="5 and 6 fields are not the 13 and 6"):
        Vitals.unpacked(torch.zeros(5, 2), torch.zeros(6, 2, dtype=torch.int64))


@pytest.mark.parametrize(("one", "other"), [(4, 1), (1, 4), (4, 3)])
def test_vitals_of_other_shapes_do_not_merge(one, other):
    """Broadcast, rows would be counted more than once."""
    first, second = (
        scaledot.vitals(torch.randn(n, 3, 8, 4), torch.randn(n, 3, 8, 4)) for n in (one, other)
    )
    with pytest.raises(ValueError, match=r"do not merge: take over_batch\(\) of both"):
        first.merge(second)
    assert first.over_batch().merge(second.over_batch()).rows.tolist() == [8 * (one + other)] * 3
    assert first.merge(Vitals.empty()).rows.sum() == Vitals.empty().merge(first).rows.sum()


def test_vitals_of_one_head_do_not_merge_with_those_of_several():
    one, several = (
        scaledot.vitals(torch.randn(*lead, 8, 4), torch.randn(8, 4)) for lead in ((), (3,))
    )
    for first, second in ((one, several), (several, one)):
        with pytest.raises(ValueError, match="without a dimension for heads"):
            first.merge(second)
    assert one.merge(one).rows.item() == 16


def test_allowed_keys_may_be_the_same_for_all_rows():
    logits = torch.randn(5, 4)
    allowed = torch.tensor([True, False, True, True])
    found, expected = (
        RowState.from_logits(logits, which) for which in (allowed, allowed.expand(5, 4).clone())
    )
    for field in fields(RowState):
        assert torch.equal(getattr(found, field.name), getattr(expected, field.name))
    with pytest.raises(RuntimeError):
        RowState.from_logits(logits, torch.ones(3, dtype=torch.bool))
