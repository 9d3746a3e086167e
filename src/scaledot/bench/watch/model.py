"""Small transformers and one step of their training: what the watch is timed on."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SEED = 0


@dataclass(frozen=True)
class Shape:
    """A decoder that predicts the next token, or with classes an encoder that sorts sequences."""

    name: str
    batch: int
    tokens: int
    layers: int
    heads: int
    width: int  # of one head
    vocabulary: int = 256
    classes: int = 0
    dtype: str = "float32"  # bfloat16: autocast, the weights stay float32

    @property
    def causal(self) -> bool:
        return not self.classes

    @property
    def words(self) -> str:
        return f"{self.batch}x{self.heads}x{self.tokens}x{self.width}, {self.layers} layers"

    def shrunk(self) -> "Shape":
        """The same calls on next to no numbers: what is left of a step is what the host does."""
        few = {"batch": 1, "tokens": 4, "width": 4, "vocabulary": 16, "dtype": "float32"}
        return replace(self, name=f"{self.name}, shrunk", **few)


# nanoGPT's character model by its proportions, at a size of which a CPU trains ten steps a second.
NANO_GPT = Shape("nanoGPT-like", batch=4, tokens=256, layers=4, heads=2, width=64)
# google/bert_uncased_L-2_H-128_A-2, as it is fine-tuned on pairs of sentences.
BERT_TINY = Shape("BERT-tiny", 16, 128, layers=2, heads=2, width=64, vocabulary=30522, classes=2)
GPT2_SMALL = Shape("GPT-2 small", 4, 4096, 12, 12, 64, vocabulary=50304, dtype="bfloat16")


class SelfAttention(nn.Module):
    """As in nanoGPT: one matrix for q, k and v, then torch's function."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.causal = shape.heads, shape.causal
        wide = shape.heads * shape.width
        self.qkv = nn.Linear(wide, 3 * wide)
        self.out = nn.Linear(wide, wide)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, wide = x.shape
        query, key, value = (
            part.view(batch, tokens, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
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


class Transformer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        wide = shape.heads * shape.width
        self.classes = shape.classes
        self.embed = nn.Embedding(shape.vocabulary, wide)
        self.position = nn.Parameter(0.02 * torch.randn(shape.tokens, wide))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(wide)
        self.head = nn.Linear(wide, shape.classes or shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0] if self.classes else x))


class Trainer:
    """Model, optimizer and data; the same ones for the same shape every time."""

    def __init__(self, shape: Shape, device: str = "cpu") -> None:
        self.shape, self.device = shape, device
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            model = Transformer(shape)
            tokens = torch.randint(shape.vocabulary, (shape.batch, shape.tokens + 1))
            labels = (
                torch.randint(shape.classes, (shape.batch,)) if shape.classes else tokens[:, 1:]
            )
            size = (shape.batch, shape.heads, shape.tokens, shape.width)
            parts = torch.randn(4, *size).to(device, self._dtype)
        self.model = model.to(device)
        self._tokens, self._labels = tokens[:, :-1].to(device), labels.flatten().to(device)
        self._upstream = parts[3]
        # The tensors of all layers would do the same work; one layer's are enough to time it.
        query, key, value = (part.requires_grad_() for part in parts[:3].unbind())
        self._qkv = query, key, value
        fused = True if device == "cuda" else None
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=fused)

    @property
    def _dtype(self) -> torch.dtype:
        return getattr(torch, self.shape.dtype)

    def step(self) -> Tensor:
        """Forward, backward, update; the loss, not waited for."""
        self._optimizer.zero_grad()
        with self._precision():
            logits = self.model(self._tokens)
            loss = F.cross_entropy(logits.flatten(0, -2), self._labels)
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def attend(self) -> None:
        """The attention of one step and nothing else: every layer's call, forward and backward."""
        query, key, value = self._qkv
        for _ in range(self.shape.layers):
            out = F.scaled_dot_product_attention(query, key, value, is_causal=self.shape.causal)
            torch.autograd.grad(out, self._qkv, self._upstream)

    def _precision(self) -> AbstractContextManager[object]:
        if self._dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device, self._dtype)
