"""A small GPT and one step of its training: what the watch is timed on."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256
SEED = 0


@dataclass(frozen=True)
class Shape:
    batch: int = 4
    tokens: int = 256
    layers: int = 4
    heads: int = 2
    width: int = 64  # of one head


class SelfAttention(nn.Module):
    """As in nanoGPT: one matrix for q, k and v, then torch's function."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        wide = shape.heads * shape.width
        self.qkv = nn.Linear(wide, 3 * wide)
        self.out = nn.Linear(wide, wide)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, wide = x.shape
        query, key, value = (
            part.view(batch, tokens, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, wide))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        wide = shape.heads * shape.width
        self.attention_norm, self.mlp_norm = nn.LayerNorm(wide), nn.LayerNorm(wide)
        self.attention = SelfAttention(shape)
        self.mlp = nn.Sequential(nn.Linear(wide, 4 * wide), nn.GELU(), nn.Linear(4 * wide, wide))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Gpt(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        wide = shape.heads * shape.width
        self.embed = nn.Embedding(VOCABULARY, wide)
        self.position = nn.Parameter(0.02 * torch.randn(shape.tokens, wide))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(wide)
        self.head = nn.Linear(wide, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Trainer:
    """Model, optimizer and data; the same ones for the same shape every time."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            self.model = Gpt(shape)
            self._tokens = torch.randint(VOCABULARY, (shape.batch, shape.tokens + 1))
            size = (shape.batch, shape.heads, shape.tokens, shape.width)
            self._upstream = torch.randn(size)
            self._qkv = [
                [torch.randn(size, requires_grad=True) for _ in range(shape.layers)]
                for _ in range(3)
            ]
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self) -> float:
        """Forward, backward, update; the loss."""
        self._optimizer.zero_grad()
        logits = self.model(self._tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), self._tokens[:, 1:].flatten())
        loss.backward()
        self._optimizer.step()
        return loss.item()

    def attend(self) -> None:
        """The attention of one step and nothing else: every layer's call, forward and backward."""
        for query, key, value in zip(*self._qkv, strict=True):
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            torch.autograd.grad(out, (query, key, value), self._upstream)

    def attend_forward(self) -> None:
        for query, key, value in zip(*self._qkv, strict=True):
            F.scaled_dot_product_attention(query, key, value, is_causal=True)
