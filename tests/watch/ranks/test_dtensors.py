"""Queries that are DTensors: which heads and rows a rank measures, and what it refuses."""

import torch
from ranks import spawn
from torch.distributed.device_mesh import init_device_mesh

import scaledot
from scaledot import distributed
from scaledot.measure import COUNT_FIELDS, FLOAT_FIELDS
from scaledot.watch.probes import sharded
from scaledot.watch.ranks.shares import WHOLE, Share, share_of

SHAPE = (2, 6, 8, 5)  # 8 tokens: torch's own context_parallel wants a multiple of twice the ranks


def test_a_rank_measures_what_it_holds():
    spawn(_look, 2)


def _look(rank, world):
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(7)
    q, k = torch.randn(SHAPE), torch.randn(SHAPE)

    def look(placement, mask=None, key=None, **arguments):
        tensors = [distribute_tensor(one, mesh, [placement]) for one in (q, k)]
        arguments = {"is_causal": False, "scale": None, "enable_gqa": False, **arguments}
        return sharded.look(
            "a test", tensors[0], tensors[1] if key is None else key, mask, **arguments
        )

    heads = look(Shard(1))
    assert (heads.first, heads.counts, heads.over_ranks) == (3 * rank, True, False)
    own = slice(3 * rank, 3 * rank + 3)
    _assert_same(heads.measure(), scaledot.vitals(q[:, own], k[:, own]))
    rows = look(Shard(0))
    assert (rows.first, rows.counts) == (0, True)
    mask = torch.rand(8, 8) > 0.3
    _assert_same(
        look(Shard(0), mask).measure(),
        scaledot.vitals(q[rank : rank + 1], k[rank : rank + 1], mask),
    )
    same = look(Replicate())
    assert (same.first, same.counts) == (0, rank == 0)
    assert "complete" in sharded.look("a test", *_sums(mesh, Partial()), None, False, None, False)
    assert "its width" in look(Shard(3))
    assert "placed differently" in look(Shard(1), key=distribute_tensor(k, mesh, [Shard(0)]))
    assert "placed differently" in look(Shard(1), key=k)
    assert "not placed as its queries" in look(Shard(1), torch.ones(2, 6, 8, 8).bool())
    assert "and it has a mask" in look(Shard(2), mask)
    _tokens(look(Shard(2), is_causal=True), q, k, mesh)
    _balanced_tokens(q, k, mesh)
    _weights(rank, mesh)


def _sums(mesh, placement):
    from torch.distributed.tensor import DTensor

    return [DTensor.from_local(torch.ones(SHAPE), mesh, [placement]) for _ in range(2)]


def _tokens(seen, q, k, mesh):
    assert seen.over_ranks
    whole = scaledot.vitals(q, k, is_causal=True)
    _assert_same(distributed.merge_vitals(seen.measure(), mesh), whole)


def _balanced_tokens(q, k, mesh):
    """As torch's context_parallel cuts them; its attention itself needs a GPU."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.experimental import context_parallel

    whole = scaledot.vitals(q, k, is_causal=True)
    query, key = q.clone(), k.clone()
    with context_parallel(mesh, buffers=[query, key], buffer_seq_dims=[2, 2]):
        assert query.shape[2] == 4
        parts = [DTensor.from_local(one, mesh, [Shard(2)]) for one in (query, key)]
        seen = sharded.look("a test", *parts, None, True, None, False)
        _assert_same(distributed.merge_vitals(seen.measure(), mesh), whole)


def _weights(rank, mesh):
    """What a module's weights say of the heads that its attention gets."""
    from torch import nn
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def module(name, placement):
        outer = nn.Module()
        outer.inner = nn.Module()  # without parameters: it calls attention
        projection = nn.Linear(4, 12, bias=False)
        projection.weight = nn.Parameter(distribute_tensor(projection.weight, mesh, [placement]))
        setattr(outer, name, projection)
        return outer.inner, outer

    assert share_of(module("q_proj", Shard(0)), 3) == Share(3 * rank)
    assert share_of(module("c_attn", Shard(0)), 3) == Share(3 * rank)
    assert share_of(module("q_proj", Shard(1)), 3) == WHOLE
    assert share_of(module("q_proj", Replicate()), 3) == WHOLE
    assert share_of(module("up_proj", Shard(0)), 3) == WHOLE
    assert share_of((nn.MultiheadAttention(6, 3),), 3) == WHOLE
    assert share_of((), 3) == WHOLE


def _assert_same(found, expected):
    found, expected = found.over_batch(), expected.over_batch()
    for name in FLOAT_FIELDS:
        torch.testing.assert_close(
            getattr(found, name), getattr(expected, name), rtol=2e-5, atol=1e-6, msg=name
        )
    for name in COUNT_FIELDS:
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
