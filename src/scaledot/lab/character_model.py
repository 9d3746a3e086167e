"""A small language model of characters, written as models of today are: RoPE, pre-norm, no biases.

The details matter to what is shown: with learned positions and torch's own initial weights, the
same learning rate does no harm.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROPE_BASE = 10_000.0  # Su et al. 2021, arXiv 2104.09864


class CharacterModel(nn.Module):
    def __init__(
        self, vocabulary: int, layers: int, width: int, heads: int, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:  # matrices [out, in]; both kinds here end with their fan-in
                draw = nn.init.normal_ if name == "embed.weight" else nn.init.trunc_normal_
                draw(weight, std=weight.shape[1] ** -0.5, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T] -> logits of the next character, [B, T, vocabulary]."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = SelfAttention(width, heads)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width, bias=False),
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(x)


class SelfAttention(nn.Module):
    """torch's own function: the watch has to find it, as in anybody's model."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        query, key, value = (
            part.view(batch, tokens, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(rotated(query), rotated(key), value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


def rotated(x: Tensor) -> Tensor:
    """[B, H, T, D]: each pair (i, i + D/2) turned by an angle that grows with the position."""
    half = x.shape[-1] // 2
    speed = ROPE_BASE ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * speed  # [T, D/2]
    first, second = x.split(half, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
