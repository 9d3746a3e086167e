"""Small models to be watched, and what their readings are compared with."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from scaledot import reference
from scaledot.measure import COUNT_FIELDS, FLOAT_FIELDS

VOCABULARY = 29


class CausalSelfAttention(nn.Module):
    """As in nanoGPT: one matrix for q, k and v, then torch's function."""

    def __init__(self, width=12, heads=3, groups=None):
        super().__init__()
        self.heads, self.groups = heads, groups or heads
        self.size = width // heads
        self.c_attn = nn.Linear(width, (heads + 2 * self.groups) * self.size)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x):
        batch, tokens, width = x.shape
        sizes = [n * self.size for n in (self.heads, self.groups, self.groups)]
        q, k, v = (
            part.view(batch, tokens, -1, self.size).transpose(1, 2)
            for part in self.c_attn(x).split(sizes, dim=-1)
        )
        gqa = self.groups != self.heads
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
        return self.c_proj(y.transpose(1, 2).reshape(batch, tokens, width))


class Block(nn.Module):
    def __init__(self, width=12, heads=3, groups=None):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn = CausalSelfAttention(width, heads, groups)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        x = x + self.drop(self.attn(self.norm(x)))
        return x + self.mlp(x)


class TinyGPT(nn.Module):
    """nanoGPT in small: dropout (so the random numbers matter), tied to nothing."""

    def __init__(self, layers=2, width=12, heads=3, groups=None, recompute=None):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width, heads, groups) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)
        self.recompute = recompute  # None, "reentrant" or "hooks"

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            if self.recompute and self.training:
                x = checkpoint(layer, x, use_reentrant=self.recompute == "reentrant")
            else:
                x = layer(x)
        return self.head(x)


class TinyEncoder(nn.Module):
    """nn.TransformerEncoder, whose layers take a fast path in evaluation."""

    def __init__(self, norm_first=False):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        layer = nn.TransformerEncoderLayer(
            8, 2, 16, dropout=0.1, batch_first=True, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens, padding=None):
        return self.head(self.encoder(self.embed(tokens), src_key_padding_mask=padding))


def language_loss(logits, tokens):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def train(model, steps=4, micro_batches=1, batch=2, tokens=7, evaluate=False):
    """The losses, bit by bit. Data and dropout draw from one generator."""
    torch.manual_seed(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        for _ in range(micro_batches):
            data = torch.randint(VOCABULARY, (batch, tokens))
            out = model(data)
            loss = language_loss(getattr(out, "logits", out), data)
            (loss / micro_batches).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if evaluate:
            model.eval()
            with torch.no_grad():
                data = torch.randint(VOCABULARY, (batch, tokens))
                out = model(data)
                losses.append(language_loss(getattr(out, "logits", out), data).item())
            model.train()
    return losses


def record_calls(monkeypatch):
    """torch's function, keeping what it was called with. Before a watch: it wraps this one."""
    calls = []
    original = F.scaled_dot_product_attention

    def recording(query, key, value, *args, **kwargs):
        calls.append((query.detach(), key.detach(), args, kwargs))
        return original(query, key, value, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recording)
    return calls


def assert_reads(reading, query, key, *args, **kwargs):
    """The reading is what the reference finds in these queries and keys, batch merged."""
    expected = reference.attention_with_vitals(query, key, None, *args, **kwargs)[1].over_batch()
    for name in FLOAT_FIELDS:
        wanted = getattr(expected, name).reshape(-1).numpy()
        np.testing.assert_allclose(reading.value(name), wanted, rtol=2e-4, atol=2e-5, err_msg=name)
    for name in COUNT_FIELDS:
        wanted = getattr(expected, name).reshape(-1).numpy()
        np.testing.assert_array_equal(reading.value(name), wanted, err_msg=name)


def assert_same(reading, other):
    """Two readings of the same numbers."""
    for name in FLOAT_FIELDS:
        found, wanted = reading.value(name), other.value(name)
        np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-5, err_msg=name)
    for name in COUNT_FIELDS:
        np.testing.assert_array_equal(reading.value(name), other.value(name), err_msg=name)
