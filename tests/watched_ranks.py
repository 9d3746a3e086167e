"""Trainings over ranks, and the same in one process, for the tests of the watch over ranks."""

import logging

import torch
from torch import nn
from torch.nn import functional as F
from watched_models import VOCABULARY, assert_same

from scaledot import Watch

BATCH, TOKENS = 5, 7  # of the whole job
STEPS = 7  # more than the readings lag behind


class Attention(nn.Module):
    """Separate projections; as many heads as its projections give it."""

    def __init__(self, width, size, attend):
        super().__init__()
        self.size, self.attend = size, attend
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.o_proj = nn.Linear(width, width)

    def forward(self, x):
        batch, tokens, _ = x.shape
        q, k, v = (
            projection(x).view(batch, tokens, -1, self.size).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = self.attend(q, k, v) if self.attend else plain(q, k, v)
        return self.o_proj(out.transpose(1, 2).reshape(batch, tokens, -1))


def plain(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Layer(nn.Module):
    def __init__(self, width=12, size=2, attend=None):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn = Attention(width, size, attend)
        self.mlp = nn.Linear(width, width)

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        return x + torch.tanh(self.mlp(x))


class Model(nn.Module):
    def __init__(self, layers=2, attend=None):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 12)
        self.layers = nn.ModuleList(Layer(attend=attend) for _ in range(layers))
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def made(layers=2, attend=None):
    torch.manual_seed(3)
    return Model(layers, attend)


def data(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (BATCH, TOKENS), generator=generator)


def loss_of(logits, targets, share=1.0):
    """share: ranks whose gradients are averaged; the sum is over the whole job's tokens."""
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total * share / (BATCH * TOKENS)


def part_of(rank, world, tensor):
    """Unequal parts of a batch: the last rank has what is left."""
    return tensor[rank:] if rank == world - 1 else tensor[rank : rank + 1]


def data_parallel(model, rank, world, steps=STEPS, lr=0.05):
    """The losses, bit by bit."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for step in range(steps):
        tokens = part_of(rank, world, data(step))
        loss = loss_of(model(tokens), tokens, world)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def alone(train, model=None):
    """What one process reads of the whole batch."""
    readings = []
    with Watch(every=1, store=readings, ranks="apart", alarms=False):
        train(model if model is not None else made(), 0, 1)
    return readings


def watched(train, **settings):
    """Readings of the job (on rank 0), losses, and the watch."""
    readings = []
    with Watch(store=readings, **{"every": 1, "alarms": False, **settings}) as watch:
        losses = train()
    return readings, losses, watch


def assert_equal_readings(found, expected):
    """The same layers, steps, phases and numbers."""
    keys = [(one.step, one.phase, one.layer) for one in found]
    wanted = {(one.step, one.phase, one.layer): one for one in expected}
    assert len(set(keys)) == len(keys)
    assert set(keys) == set(wanted), sorted(set(keys) ^ set(wanted))
    for key, one in zip(keys, found, strict=True):
        assert one.heads == wanted[key].heads, key
        assert_same(one, wanted[key])


class Lines(logging.Handler):
    """What the watch says."""

    def __init__(self):
        super().__init__()
        self.lines = []
        logging.getLogger("scaledot.watch").addHandler(self)

    def emit(self, record):
        self.lines.append(record.getMessage())
