"""nn.MultiheadAttention and nn.TransformerEncoder on each of their paths."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from watched_models import TinyEncoder, assert_reads

from scaledot import Watch

BATCH, QUERIES, KEYS, WIDTH, HEADS = 2, 5, 7, 12, 3


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def projected(module, query, key):
    """[batch, heads, tokens, size], by the matrices and in words of its own; batch comes first."""
    if module._qkv_same_embed_dim:
        q_weight, k_weight, _ = module.in_proj_weight.chunk(3)
    else:
        q_weight, k_weight = module.q_proj_weight, module.k_proj_weight
    q_bias, k_bias, _ = module.in_proj_bias.chunk(3)
    q, k = query @ q_weight.T + q_bias, key @ k_weight.T + k_bias
    if module.bias_k is not None:
        k = torch.cat([k, module.bias_k.expand(k.shape[0], 1, -1)], dim=1)
    if module.add_zero_attn:
        k = torch.cat([k, torch.zeros_like(k[:, :1])], dim=1)
    heads = module.num_heads
    return (t.unflatten(-1, (heads, -1)).transpose(1, 2).detach() for t in (q, k))


def read(module, *args, **kwargs):
    with Watch(module, every=1, store=(readings := [])) as watch:
        module(*args, **kwargs)
    assert [reading.layer for reading in readings] == ["MultiheadAttention"], watch
    return readings[0]


PADDING = torch.zeros(BATCH, KEYS, dtype=torch.bool)
PADDING[1, -2:] = True
HIDDEN = torch.ones(QUERIES, KEYS, dtype=torch.bool).triu(2)
BIAS = torch.linspace(-1, 1, QUERIES * KEYS).view(QUERIES, KEYS)
PER_HEAD = torch.linspace(-2, 2, BATCH * HEADS * QUERIES * KEYS).view(-1, QUERIES, KEYS)


def allowed(mask):
    return torch.zeros(mask.shape).masked_fill(mask, -torch.inf)


MASKS = {
    "none": ({}, None),
    "padding": ({"key_padding_mask": PADDING}, ~PADDING[:, None, None, :]),
    "bool": ({"attn_mask": HIDDEN}, ~HIDDEN),
    "float": ({"attn_mask": BIAS}, BIAS),
    "per head": ({"attn_mask": PER_HEAD}, PER_HEAD.view(BATCH, HEADS, QUERIES, KEYS)),
    "both": (
        {"attn_mask": HIDDEN, "key_padding_mask": PADDING},
        ~HIDDEN & ~PADDING[:, None, None, :],
    ),
    "float and padding": (
        {"attn_mask": BIAS, "key_padding_mask": allowed(PADDING)},
        BIAS + allowed(PADDING)[:, None, None, :],
    ),
}


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("masks", MASKS)
def test_training_reads_the_reference(masks, need_weights):
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    query, key = 2 * torch.randn(BATCH, QUERIES, WIDTH), 2 * torch.randn(BATCH, KEYS, WIDTH)
    keywords, mask = MASKS[masks]
    reading = read(module, query, key, key, need_weights=need_weights, **keywords)
    assert reading.phase == "train"
    assert_reads(reading, *projected(module, query, key), mask)


@pytest.mark.parametrize("need_weights", [True, False])
def test_added_keys_are_read_too(need_weights):
    module = nn.MultiheadAttention(
        WIDTH, HEADS, batch_first=True, add_bias_kv=True, add_zero_attn=True
    )
    query, key = torch.randn(BATCH, QUERIES, WIDTH), torch.randn(BATCH, KEYS, WIDTH)
    reading = read(module, query, key, key, key_padding_mask=PADDING, need_weights=need_weights)
    mask = ~F.pad(PADDING, (0, 2))[:, None, None, :]
    assert_reads(reading, *projected(module, query, key), mask)


def test_separate_projections():
    module = nn.MultiheadAttention(WIDTH, HEADS, kdim=5, vdim=4, batch_first=True)
    query, key = torch.randn(BATCH, QUERIES, WIDTH), torch.randn(BATCH, KEYS, 5)
    reading = read(module, query, key, torch.randn(BATCH, KEYS, 4))
    assert_reads(reading, *projected(module, query, key))


def test_sequence_first_and_without_batch():
    module = nn.MultiheadAttention(WIDTH, HEADS)
    query = torch.randn(QUERIES, WIDTH)
    assert_reads(read(module, query, query, query), *projected(module, query[None], query[None]))
    source = torch.randn(QUERIES, BATCH, WIDTH)
    batch_first = source.transpose(0, 1)
    assert_reads(read(module, source, source, source), *projected(module, batch_first, batch_first))


def test_weights_that_are_returned_agree_with_the_reading():
    """The module's own probabilities, which no part of the watch has touched."""
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    x = 3 * torch.randn(BATCH, KEYS, WIDTH)
    reading = read(module, x, x, x)
    weights = module(x, x, x, average_attn_weights=False)[1].detach()
    entropy = -(weights * weights.log()).sum(-1).mean((0, 2))
    torch.testing.assert_close(torch.from_numpy(reading.value("entropy")), entropy)
    top = weights.max(-1).values.mean((0, 2))
    torch.testing.assert_close(torch.from_numpy(reading.value("top_p")), top)


@pytest.mark.parametrize("masks", ["none", "padding", "bool", "both"])
def test_fast_path_of_evaluation_is_read_and_kept(masks, monkeypatch):
    module = nn.MultiheadAttention(WIDTH, 2, batch_first=True).eval()
    x = 2 * torch.randn(BATCH, KEYS, WIDTH)
    hidden = torch.ones(KEYS, KEYS, dtype=torch.bool).triu(1)
    keywords, mask = {
        "none": ({}, None),
        "padding": ({"key_padding_mask": PADDING}, ~PADDING[:, None, None, :]),
        "bool": ({"attn_mask": hidden}, ~hidden),
        "both": (
            {"attn_mask": hidden, "key_padding_mask": PADDING},
            ~hidden & ~PADDING[:, None, None, :],
        ),
    }[masks]
    calls, original = [], torch._native_multi_head_attention

    def counted(*args):
        calls.append(args)
        return original(*args)

    monkeypatch.setattr(torch, "_native_multi_head_attention", counted)
    with torch.no_grad():
        expected = module(x, x, x, **keywords)[0]
        with Watch(module, every=1, store=(readings := [])):
            found = module(x, x, x, **keywords)[0]
    assert len(calls) == 2
    assert torch.equal(found, expected)
    assert readings[0].phase == "eval"
    assert_reads(readings[0], *projected(module, x, x), mask)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_encoders_fast_path_is_read_and_kept(norm_first, padded, monkeypatch):
    model = TinyEncoder(norm_first).eval()
    tokens = torch.arange(3 * 5).view(3, 5)
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    given = padding if padded else None
    calls, original = [], torch._transformer_encoder_layer_fwd

    def counted(source, *args):
        calls.append(source)
        return original(source, *args)

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", counted)
    with torch.no_grad():
        expected = model(tokens, given)
        with Watch(model, every=1, store=(readings := [])) as watch:
            found = model(tokens, given)
    assert len(calls) == 4
    assert torch.equal(found, expected)
    assert [reading.layer for reading in readings] == [
        "encoder.layers.0.self_attn",
        "encoder.layers.1.self_attn",
    ]
    assert str(watch.coverage()) == "2 of 2 attention layers watched"
    for reading, source, layer in zip(readings, calls[2:], model.encoder.layers, strict=True):
        mask = ~padding[:, None, None, :] if padded else None
        if source.is_nested:
            source = source.to_padded_tensor(0.0)
            mask = mask & ~padding[:, None, :, None]
        if norm_first:
            source = layer.norm1(source)
        assert_reads(reading, *projected(layer.self_attn, source, source), mask)


def test_training_encoder_is_named_like_its_modules():
    model = TinyEncoder()
    with Watch(model, every=1, store=(readings := [])):
        model(torch.arange(10).view(2, 5))
    assert [(reading.layer, reading.phase) for reading in readings] == [
        ("encoder.layers.0.self_attn", "train"),
        ("encoder.layers.1.self_attn", "train"),
    ]


def test_decoder_layers_have_two_attentions():
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 16, batch_first=True)
    target, memory = torch.randn(BATCH, QUERIES, WIDTH), torch.randn(BATCH, KEYS, WIDTH)
    with Watch(layer, every=1, store=(readings := [])):
        layer(target, memory)
    assert [reading.layer for reading in readings] == ["self_attn", "multihead_attn"]
    pairs = {reading.layer: reading.value("pairs")[0] for reading in readings}
    assert pairs == {
        "self_attn": BATCH * QUERIES * QUERIES,
        "multihead_attn": BATCH * QUERIES * KEYS,
    }
