"""flash_attn called directly, and FlexAttention."""

import math
import sys
import types

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from watched_models import assert_reads

from scaledot import Watch
from scaledot.watch.probes import compiled, flex


def random(*shape, seed=0):
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def flash_attn(monkeypatch):
    """The package's names and signatures; its kernels need a GPU, the outputs are not looked at."""
    home = types.ModuleType("flash_attn.flash_attn_interface")

    def flash_attn_func(
        q,
        k,
        v,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
    ):
        return torch.zeros_like(q)

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False
    ):
        return torch.zeros_like(q)

    def flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False):
        return torch.zeros_like(qkv[:, :, 0])

    home.flash_attn_func = flash_attn_func
    home.flash_attn_varlen_func = flash_attn_varlen_func
    home.flash_attn_qkvpacked_func = flash_attn_qkvpacked_func
    monkeypatch.setitem(sys.modules, home.__name__, home)
    return home


def heads_first(*tensors):
    return [tensor.transpose(1, 2) for tensor in tensors]


def test_flash_attention_has_its_own_layout_and_alignment(flash_attn):
    q, k = random(2, 5, 6, 4), random(2, 11, 2, 4, seed=1)
    original = flash_attn.flash_attn_func
    with Watch(every=1, store=(readings := [])):
        flash_attn.flash_attn_func(
            q, k, k, 0.1, causal=True, window_size=(3, -1), softcap=1.5, softmax_scale=0.3
        )
    assert_reads(
        readings[0],
        *heads_first(q, k),
        is_causal=True,
        causal_align="bottom_right",
        window=(3, None),
        softcap=1.5,
        scale=0.3,
        enable_gqa=True,
    )
    assert flash_attn.flash_attn_func is original


def test_packed_projections_and_packed_sequences(flash_attn):
    qkv = random(2, 5, 3, 2, 4)
    with Watch(every=1, store=(readings := [])):
        flash_attn.flash_attn_qkvpacked_func(qkv)
    assert_reads(readings[0], *heads_first(qkv[:, :, 0], qkv[:, :, 1]))
    q, k = random(7, 2, 4), random(7, 2, 4, seed=1)
    lengths = torch.tensor([0, 3, 7], dtype=torch.int32)
    with Watch(every=1, store=(readings := [])):
        flash_attn.flash_attn_varlen_func(q, k, k, lengths, lengths, 4, 4, causal=True)
    assert_reads(readings[0], q, k, is_causal=True, cu_seqlens=(lengths, lengths))


def test_what_the_watch_does_not_follow_is_named(flash_attn):
    q = random(2, 5, 2, 4)
    with Watch(every=1, store=(readings := [])) as watch:
        flash_attn.flash_attn_func(q, q, q, alibi_slopes=torch.ones(2))
    assert not readings
    assert "the watch does not follow alibi_slopes" in str(watch.coverage())


class Call(nn.Module):
    """A function, called by a module as models do."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **keywords):
        return self.function(*args, **keywords)


def read_in_a_graph(model, *args, **keywords):
    """The readings of two steps in one graph, of which the first and the third are due."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    fast = torch.compile(model, backend=counter, fullgraph=True)
    plain = fast(*args, **keywords)
    torch._dynamo.reset()
    with Watch(model, every=2, store=(readings := [])) as watch:
        for _ in range(3):
            assert torch.equal(fast(*args, **keywords), plain)
            watch.step()
    torch._dynamo.reset()
    assert counter.frame_count == 2  # one before the watch, one under it
    return readings, watch


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore")
def test_flash_attention_in_a_graph(flash_attn):
    q, k = random(2, 5, 6, 4), random(2, 11, 2, 4, seed=1)
    model = Call(lambda *args, **keywords: flash_attn.flash_attn_func(*args, **keywords))
    keywords = {"causal": True, "window_size": (3, -1), "softcap": 1.5, "softmax_scale": 0.3}
    readings, watch = read_in_a_graph(model, q, k, k, 0.1, **keywords)
    assert [reading.step for reading in readings] == [0, 2]
    assert_reads(
        readings[0],
        *heads_first(q, k),
        is_causal=True,
        causal_align="bottom_right",
        window=(3, None),
        softcap=1.5,
        scale=0.3,
        enable_gqa=True,
    )
    assert str(watch.coverage()) == "1 of 1 attention layer watched"
    readings, watch = read_in_a_graph(model, q, k, k, alibi_slopes=torch.ones(6))
    assert not readings
    assert "the watch does not follow alibi_slopes" in str(watch.coverage())


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore")
def test_packed_sequences_in_a_graph(flash_attn):
    q, k = random(7, 2, 4), random(7, 2, 4, seed=1)
    lengths = torch.tensor([0, 3, 7], dtype=torch.int32)
    model = Call(lambda *args, **keywords: flash_attn.flash_attn_varlen_func(*args, **keywords))
    readings, _ = read_in_a_graph(model, q, k, k, lengths, lengths, 4, 4, causal=True)
    assert_reads(readings[0], q, k, is_causal=True, cu_seqlens=(lengths, lengths))


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore")
def test_what_another_probe_has_seen_is_neither_read_again_nor_named(flash_attn, caplog):
    q = random(2, 5, 2, 4)

    def seen(q, **keywords):
        return compiled.seen(flash_attn.flash_attn_func, q, q, q, **keywords)

    for keywords in ({}, {"alibi_slopes": torch.ones(2)}):
        readings, watch = read_in_a_graph(Call(seen), q, **keywords)
        assert not readings
        assert not watch.coverage().reasons
    assert not [record for record in caplog.records if record.name == "scaledot.watch"]


class Flex(nn.Module):
    def forward(self, q, k, **keywords):
        from torch.nn.attention import flex_attention

        return flex_attention.flex_attention(q, k, k, **keywords)


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore")  # torch's own, about running it uncompiled
def test_flex_attention_with_a_block_mask():
    from torch.nn.attention.flex_attention import create_block_mask

    q, k = random(1, 4, 16, 8), random(1, 2, 16, 8, seed=1)
    causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, 16, 16, device="cpu")
    model = Flex()
    plain = model(q, k, block_mask=causal, enable_gqa=True, scale=0.5)
    with Watch(model, every=1, store=(readings := [])):
        watched = model(q, k, block_mask=causal, enable_gqa=True, scale=0.5)
    assert torch.equal(plain, watched)
    assert_reads(readings[0], q, k, is_causal=True, enable_gqa=True, scale=0.5)


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore")
def test_flex_attention_with_a_score_mod_is_named():
    q = random(1, 2, 16, 8)
    model = Flex()
    with Watch(model, every=1, store=(readings := [])) as watch:
        out = model(q, q, score_mod=lambda score, b, h, i, j: score * 2)
    expected = (q @ q.mT * 2 / math.sqrt(8)).softmax(-1) @ q
    torch.testing.assert_close(out, expected)
    assert not readings
    assert "its score_mod may do anything to the scores" in str(watch.coverage())


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.filterwarnings("ignore")
def test_flex_attention_in_a_graph(monkeypatch):
    from torch.nn.attention.flex_attention import create_block_mask

    q, k = random(1, 4, 13, 8), random(1, 2, 13, 8, seed=1)
    causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, 13, 13, device="cpu")
    keywords = {"block_mask": causal, "enable_gqa": True, "scale": 0.5}
    with torch.no_grad():  # it has no backward pass on a CPU
        readings, watch = read_in_a_graph(Flex(), q, k, **keywords)
        assert [reading.step for reading in readings] == [0, 2]
        assert_reads(readings[0], q, k, is_causal=True, enable_gqa=True, scale=0.5)
        assert str(watch.coverage()) == "1 of 1 attention layer watched"

        readings, watch = read_in_a_graph(Flex(), q, q, score_mod=lambda s, b, h, i, j: s * 2)
        assert not readings
        assert "its score_mod may do anything to the scores" in str(watch.coverage())

        monkeypatch.setattr(flex, "LARGEST_MASK", 13 * 13 - 1)
        readings, watch = read_in_a_graph(Flex(), q, k, **keywords)
        assert not readings
        assert "inside torch.compile its mask would take more than" in str(watch.coverage())


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_flex_attention_is_read_under_the_names_of_its_callers():
    """One compiled function for all layers, as most people call it."""
    import torch.nn.attention.flex_attention as home

    torch._dynamo.reset()
    with Watch(every=1, store=(readings := [])) as watch:
        fast = torch.compile(home.flex_attention, backend="aot_eager", fullgraph=True)
        model = nn.Sequential(Call(fast), Call(fast))
        q = random(1, 2, 13, 8)
        with torch.no_grad():
            for layer in model:
                layer(q, q, q)
        watch.step()
    torch._dynamo.reset()
    assert len(readings) == 2
    for reading in readings:
        assert_reads(reading, q, q)
