"""Nested tensors: each sequence attends to itself, like a call of its own."""

import pytest
import torch

import scaledot

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")

LENGTHS = (4, 2, 6)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(20_23)


def jagged(*lengths, rest=(3, 8), **keywords):
    """[batch, tokens, *rest], ragged along the tokens."""
    rows = [torch.randn(length, *rest) for length in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True, **keywords)


def strided(*lengths, heads=3):
    rows = [torch.randn(heads, length, 8) for length in lengths]
    return torch.nested.nested_tensor(rows, requires_grad=True)


def like(nested, rest):
    return torch.nested.nested_tensor_from_jagged(
        torch.randn(nested.values().shape[0], *rest), nested.offsets()
    )


def heads_first(nested):
    return nested.transpose(1, 2)


def entries(nested):
    """The dense [heads, tokens, width] of each sequence."""
    if nested.layout is torch.jagged:
        return [entry.transpose(0, 1) for entry in nested.transpose(1, 2).unbind()]
    return list(nested.unbind())


OPTIONS = [
    {},
    {"is_causal": True},
    {"scale": 0.2},
    {"window": (1, 1)},
    {"softcap": 2.0},
    {"sinks": torch.tensor([0.5, -1.0, 2.0])},
    {"is_causal": True, "causal_align": "bottom_right", "scale": "log_n"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", ["self", "cross", "strided"])
def test_each_sequence_is_a_call_of_its_own(kind, options):
    if kind == "strided":
        query, key, value = strided(*LENGTHS), strided(5, 3, 1), strided(5, 3, 1)
    else:
        query = heads_first(jagged(*LENGTHS))
        keys = jagged(5, 3, 1) if kind == "cross" else jagged(*LENGTHS)
        key, value = heads_first(keys), heads_first(like(keys, (3, 5)))
    out, vitals = scaledot.attention_with_vitals(query, key, value, **options)
    plain = scaledot.attention(query, key, value, **options)
    alone = scaledot.vitals(query, key, **options)
    assert vitals.entropy.shape == alone.entropy.shape == (3, 3)
    parts = zip(entries(query), entries(key), entries(value), strict=True)
    for index, (q, k, v) in enumerate(parts):
        expected, measured = scaledot.attention_with_vitals(q, k, v, **options)
        torch.testing.assert_close(entries(out)[index], expected)
        torch.testing.assert_close(entries(plain)[index], expected)
        for found in (vitals, alone):
            assert torch.equal(found.pairs[index], measured.pairs)
            torch.testing.assert_close(found.entropy[index], measured.entropy)
            torch.testing.assert_close(found.max_logit[index], measured.max_logit)


def test_output_has_the_ragged_size_of_the_query():
    query, keys = heads_first(jagged(*LENGTHS)), jagged(5, 3, 1)
    key, value = heads_first(keys), heads_first(like(keys, (3, 5)))
    out = scaledot.attention(query, key, value)
    assert out.shape[:3] == query.shape[:3]
    assert out.shape[3] == 5
    self_attended = scaledot.attention(query, query, query)
    assert (self_attended + query).shape == query.shape


def test_gradients_are_nested_like_their_tensors():
    rows = jagged(*LENGTHS)
    query = heads_first(rows)
    out = scaledot.attention(query, query, query, is_causal=True)
    (found,) = torch.autograd.grad(out.values().square().sum(), rows)
    assert found.shape == rows.shape
    for index, entry in enumerate(entries(query)):
        leaf = entry.detach().requires_grad_()
        expected = scaledot.attention(leaf, leaf, leaf, is_causal=True).square().sum()
        (grad,) = torch.autograd.grad(expected, leaf)
        torch.testing.assert_close(found.unbind()[index].transpose(0, 1), grad)


def test_gradients_of_strided_nested_tensors():
    nested = strided(*LENGTHS)
    out = scaledot.attention(nested, nested, nested)
    (found,) = torch.autograd.grad(sum(part.square().sum() for part in out.unbind()), nested)
    for part, entry in zip(found.unbind(), nested.unbind(), strict=True):
        leaf = entry.detach().requires_grad_()
        expected = scaledot.attention(leaf, leaf, leaf).square().sum()
        torch.testing.assert_close(part, torch.autograd.grad(expected, leaf)[0])


def test_agrees_with_torch_where_torch_serves_the_call():
    query = heads_first(jagged(*LENGTHS))
    theirs = torch.nn.functional.scaled_dot_product_attention(query, query, query)
    ours = scaledot.attention(query, query, query)
    assert ours.shape == theirs.shape
    assert ours.stride() == theirs.stride()
    torch.testing.assert_close(ours.values(), theirs.values())


def test_a_sequence_without_heads():
    query = jagged(*LENGTHS, rest=(8,))
    out, vitals = scaledot.attention_with_vitals(query, query, query, per_row=True)
    assert out.shape == query.shape
    assert vitals.entropy.shape == scaledot.vitals(query, query).entropy.shape == (3,)
    assert vitals.per_row is not None
    assert vitals.per_row.lse.shape == (sum(LENGTHS),)
    for found, entry in zip(out.unbind(), query.unbind(), strict=True):
        torch.testing.assert_close(found, scaledot.attention(entry, entry, entry))


def test_ragged_entries_of_dense_tokens_are_attended_side_by_side():
    """[batch, ragged, tokens, width]: what torch does where the second dimension is ragged."""
    query = jagged(*LENGTHS, rest=(7, 8))
    out = scaledot.attention(query, query, query)
    assert out.shape == query.shape
    rows = query.values()
    torch.testing.assert_close(out.values(), scaledot.attention(rows, rows, rows))


def test_rows_of_jagged_sequences_lie_one_after_the_other():
    query = heads_first(jagged(*LENGTHS))
    per_row = scaledot.vitals(query, query, per_row=True).per_row
    assert per_row is not None
    assert per_row.lse.shape == (3, sum(LENGTHS))
    first = entries(query)[0]
    expected = scaledot.vitals(first, first, per_row=True).per_row
    assert expected is not None
    torch.testing.assert_close(per_row.lse[:, : LENGTHS[0]], expected.lse)


def test_grouped_heads_and_dropout():
    rows = jagged(*LENGTHS, rest=(4, 8))
    query, key = heads_first(rows), heads_first(like(rows, (2, 8)))
    out = scaledot.attention(query, key, key, enable_gqa=True)
    for found, q, k in zip(entries(out), entries(query), entries(key), strict=True):
        torch.testing.assert_close(found, scaledot.attention(q, k, k, enable_gqa=True))
    dropped = scaledot.attention(query, key, key, dropout_p=1.0, enable_gqa=True)
    assert not dropped.values().any()


def test_autocast_reaches_nested_tensors():
    query = heads_first(jagged(*LENGTHS))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert scaledot.attention(query, query, query).dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at it
def test_nested_tensors_compile():
    rows = jagged(*LENGTHS)
    query = heads_first(rows)
    compiled = torch.compile(scaledot.attention, fullgraph=True, backend="aot_eager")
    out = compiled(query, query, query)
    expected = scaledot.attention(query, query, query)
    torch.testing.assert_close(out.values(), expected.values())
    torch.testing.assert_close(
        torch.autograd.grad(out.values().square().sum(), rows)[0].values(),
        torch.autograd.grad(expected.values().square().sum(), rows)[0].values(),
    )


def refused(match, *tensors, function=scaledot.attention, **options):
    with pytest.raises((ValueError, TypeError), match=match):
        function(*tensors, **options)


def test_what_nested_tensors_cannot_be_is_said_in_words():
    rows = jagged(*LENGTHS)
    query, dense, packed = heads_first(rows), torch.randn(3, 3, 6, 8), strided(*LENGTHS)
    refused("query is a nested tensor but key is not", query, dense, dense)
    refused("key is a nested tensor; scaledot.attention, ", dense, query, query)
    refused(
        "query is a nested tensor; .*key_lengths",
        query,
        query,
        query,
        torch.randn(8),
        function=scaledot.additive_attention,
    )
    refused("attn_mask and nested tensors", query, query, query, torch.ones(6, 6) > 0)
    refused("key_lengths and nested tensors", query, query, query, key_lengths=torch.ones(3))
    refused("of different kinds", query, packed, packed)
    fewer = heads_first(jagged(5, 3))
    refused("key holds 2 sequences but query holds 3", query, fewer, fewer)
    five = jagged(*LENGTHS, rest=(3, 7, 8)).transpose(1, 2)
    refused("of 5 dimensions, ragged along dimension 2", five, five, five)
    refused("key is a nested tensor .* ragged along dimension 1", query, rows, rows)
    refused("different sequence lengths", query, query, heads_first(jagged(4, 3, 5)))
    gaps = torch.nested.nested_tensor_from_jagged(
        torch.randn(12, 3, 8), torch.tensor([0, 5, 8, 12]), lengths=torch.tensor([4, 2, 3])
    )
    refused("gaps between its sequences", *[heads_first(gaps)] * 3)
    refused("per_row=True", *[packed] * 2, function=scaledot.vitals, per_row=True)
    unequal = torch.nested.nested_tensor([torch.randn(n, 4, 8) for n in (2, 3)])
    refused("different numbers of heads", unequal, unequal, function=scaledot.vitals)
    assert len(scaledot.attention(unequal, unequal, unequal).unbind()) == 2
