"""Models whose heads can be dealt out to ranks, and ways to shard them."""

import torch
from remedied_models import made
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F
from watched_models import VOCABULARY

from scaledot import distributed

WIDTH, SIZE = 12, 3  # four heads of three as a rule; with `groups` fewer keys


class Split(nn.Module):
    """Query, key and value of their own; heads are counted by what arrives."""

    def __init__(self, heads=4, groups=4):
        super().__init__()
        self.to_q, self.to_k = nn.Linear(WIDTH, heads * SIZE), nn.Linear(WIDTH, groups * SIZE)
        self.to_v, self.out = nn.Linear(WIDTH, groups * SIZE), nn.Linear(heads * SIZE, WIDTH)

    def forward(self, x):
        q, k, v = (
            part(x).unflatten(-1, (-1, SIZE)).transpose(1, 2)
            for part in (self.to_q, self.to_k, self.to_v)
        )
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
        return self.out(y.transpose(1, 2).flatten(2))


class Fused(nn.Module):
    """One matrix, head after head, each with its query, key and value: whole heads in a shard."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        each = self.qkv(x).unflatten(-1, (-1, 3, SIZE)).permute(3, 0, 2, 1, 4)
        y = F.scaled_dot_product_attention(*each)
        return self.out(y.transpose(1, 2).flatten(2))


class Normed(Split):
    """A norm of each query and key: weights are refused, a factor at the call is not."""

    def forward(self, x):
        q, k, v = (
            part(x).unflatten(-1, (-1, SIZE)).transpose(1, 2)
            for part in (self.to_q, self.to_k, self.to_v)
        )
        q, k = F.rms_norm(q, (SIZE,)) * 3, F.rms_norm(k, (SIZE,))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Causal(Split):
    """With a mesh, over sequences that are cut between its ranks."""

    mesh = None

    def forward(self, x):
        q, k, v = (
            part(x).unflatten(-1, (-1, SIZE)).transpose(1, 2)
            for part in (self.to_q, self.to_k, self.to_v)
        )
        if self.mesh is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = distributed.attention(q, k, v, self.mesh, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, attention=Split, layers=2, **options):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(attention(**options) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(F.rms_norm(x, (WIDTH,)))
        return self.head(x)


class Stage(nn.Module):
    """Of a pipeline: hidden states in and out."""

    def __init__(self, layers):
        super().__init__()
        self.blocks = nn.ModuleList(Split() for _ in range(layers))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


class Growing(Model):
    """Uses as many of its layers as `depth` says."""

    depth = staticmethod(lambda: 2)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks[: self.depth()]:
            x = x + block(F.rms_norm(x, (WIDTH,)))
        return self.head(x)


MAKES = {
    "split": lambda: Model(Split),
    "fused": lambda: Model(Fused),
    "grouped": lambda: Model(Split, groups=2),
    "one key": lambda: Model(Split, groups=1),
    "two heads, one key": lambda: Model(Split, heads=2, groups=1),
    "causal": lambda: Model(Causal),
    "normed": lambda: Model(Normed),
}


def fresh(name):
    return made(MAKES[name]).train()


def batches(number):
    """Of five sequences, seven tokens each; some follow the same rule, some do not."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (5, 7), generator=generator) for _ in range(number)]


def fsdp(model, mesh, **options):
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def by_columns(parameter):
    return Shard(1) if parameter.dim() > 1 else Shard(0)


def tensor_parallel(model, mesh, attention=True):
    """Heads are shared out; keys that serve all of them lie on every rank.

    attention=False: only the model's head is, and every rank has all of attention's.
    """
    if not attention:
        plan = {"head": ColwiseParallel(output_layouts=Replicate())}
        return parallelize_module(model, mesh, plan)
    for block in model.blocks:
        plan = {"out": RowwiseParallel()}
        for name in ("qkv", "to_q", "to_k", "to_v"):
            rows = getattr(block, name).weight.shape[0] if hasattr(block, name) else 0
            if rows > SIZE:
                plan[name] = ColwiseParallel()
        parallelize_module(block, mesh, plan)
    return model


def by_hand(model, rank, world):
    """Plain tensors with a part of the heads, as Megatron has them; no mesh tells."""
    for block in model.blocks:
        for name in ("to_q", "to_k", "to_v"):
            linear = getattr(block, name)
            if linear.out_features > SIZE:
                linear.weight = nn.Parameter(linear.weight.detach().chunk(world)[rank].clone())
                linear.bias = nn.Parameter(linear.bias.detach().chunk(world)[rank].clone())
        out = block.out.weight.detach().chunk(world, 1)[rank].clone()
        block.out.weight = nn.Parameter(out)
    return model


def meshes(world):
    return init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))


def whole(model):
    """The model's weights as one process has them."""
    with torch.no_grad():
        return {
            name: value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
            for name, value in model.state_dict().items()
        }
