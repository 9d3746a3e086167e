"""Every way to spread a training over ranks: one reading, as one process reads the whole batch."""

import pytest
import torch
from ranks import spawn
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from watched_ranks import (
    STEPS,
    Layer,
    alone,
    assert_equal_readings,
    data,
    data_parallel,
    loss_of,
    made,
    part_of,
    watched,
)

from scaledot import distributed


@pytest.mark.nightly
@pytest.mark.slow
def test_two_ranks_read_as_one_process():
    spawn(_two_ranks, 2)


@pytest.mark.nightly
@pytest.mark.slow
def test_four_ranks_in_two_dimensions_read_as_one_process():
    spawn(_four_ranks, 4)


def _two_ranks(rank, world):
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    expected = alone(data_parallel)
    for form in (_ddp, _fsdp, _fsdp_of_linears):
        _assert_same_run(lambda form=form: data_parallel(form(mesh), rank, world), expected)
    _assert_same_run(lambda: data_parallel(_tensor_parallel(mesh), 0, 1), expected)
    _dtensors(mesh)
    _context_parallel(rank, world, expected)
    _pipeline(rank, world)
    _told_tensor_parallel(rank, world, mesh)


def _four_ranks(rank, world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    expected = alone(data_parallel)

    def train():
        model = _tensor_parallel(mesh["tp"])
        for layer in model.layers:
            _sharded(layer, mesh["dp"])
        return data_parallel(_sharded(model, mesh["dp"]), rank // 2, 2)

    _assert_same_run(train, expected)
    _two_pipelines(rank)


def _assert_same_run(train, expected, **settings):
    """Losses to the bit as without a watch, readings as in one process, one collective each.

    Two more for the first reading: its layers' names, its numbers. The last one is empty: it comes
    when the watch ends.
    """
    unwatched = train()
    found, losses, watch = watched(train, **settings)
    assert losses == unwatched
    traffic = watch.ranks
    assert traffic.apart == ""
    starts_empty = not any(reading.step == 0 for reading in expected)
    names = 4 if starts_empty else 3  # nothing, then layers; or layers, and nothing at the end
    assert (traffic.readings, traffic.collectives) == (STEPS + 1, STEPS + 1 + names)
    assert traffic.collectives_a_reading == 1
    assert traffic.bytes_a_reading > traffic.world * 64
    if dist.get_rank() == 0:
        assert_equal_readings(found, expected)
    else:
        assert not found  # one voice
        assert watch.latest


def _ddp(mesh):
    return nn.parallel.DistributedDataParallel(made())


def _sharded(module, mesh):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module, mesh=mesh)


def _fsdp(mesh):
    model = made()
    for layer in model.layers:
        _sharded(layer, mesh)
    return _sharded(model, mesh)


def _fsdp_of_linears(mesh):
    """Their weights are cut again when attention runs, and that is not tensor parallel."""
    model = made()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            _sharded(module, mesh)
    return _sharded(model, mesh)


def _tensor_parallel(mesh, local_output=True, attend=None):
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model = made(attend=attend)
    plan = {
        f"attn.{name}": ColwiseParallel(use_local_output=local_output)
        for name in ("q_proj", "k_proj", "v_proj")
    }
    for layer in model.layers:
        parallelize_module(layer, mesh, {**plan, "attn.o_proj": RowwiseParallel()})
    return model


def _dtensors(mesh):
    """Queries and keys know their heads. On a CPU torch spreads one kernel only, not causal."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v)

    with sdpa_kernel(SDPBackend.MATH):
        expected = alone(data_parallel, made(attend=attend))
        _assert_same_run(
            lambda: data_parallel(_tensor_parallel(mesh, False, attend), 0, 1), expected
        )


def _context_parallel(rank, world, expected):
    """The ranks' first step is without: they do not know of each other yet."""
    group = dist.group.WORLD
    wanted = [reading for reading in expected if reading.step]

    def attend(q, k, v):
        return distributed.attention(q, k, v, group, is_causal=True)

    def attend_with_vitals(q, k, v):
        return distributed.attention_with_vitals(q, k, v, group, is_causal=True)[0]

    for layout, function in (("contiguous", attend), ("contiguous", attend_with_vitals)):
        measured = expected if function is attend_with_vitals else wanted

        def train(layout=layout, function=function):
            return _over_tokens(made(attend=function), group, layout)

        _assert_same_run(train, measured)
    _assert_same_run(lambda: _over_tokens_in_context(made(), group), wanted)
    found, _, watch = watched(lambda: _over_tokens_in_context(made(), group), ranks="apart")
    assert not found
    assert "2 layers not measured (ranks that share its tokens measure together)" in str(
        watch.coverage()
    )


def _over_tokens(model, group, layout):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        tokens = distributed.shard(data(step), group, 1, layout)
        _step(model, optimizer, tokens, losses)
    return losses


def _over_tokens_in_context(model, group):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        tokens = data(step)
        with distributed.context_parallel(group, buffers=[tokens], buffer_seq_dims=[1]):
            _step(model, optimizer, tokens, losses)
    return losses


def _step(model, optimizer, tokens, losses):
    loss = loss_of(model(tokens), tokens)
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()


class Stage(nn.Module):
    """Layers of a model, under numbers from 0 or under those of the whole."""

    def __init__(self, layers, first=0):
        super().__init__()
        self.layers = nn.ModuleDict({str(first + i): one for i, one in enumerate(layers)})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


def _layers(number):
    torch.manual_seed(3)
    return [Layer() for _ in range(number)]


def _pipeline(rank, world):
    """Two layers on the first rank, one on the second."""
    expected = alone(lambda model, *_: _one_stage(model), Stage(_layers(3)))

    def told():
        return _stage(rank, Stage(_layers(3)[:2] if rank == 0 else _layers(3)[2:]))

    def by_names():
        return _stage(rank, Stage(_layers(3)[:2]) if rank == 0 else Stage(_layers(3)[2:], 2))

    _assert_same_run(told, expected, pipeline_parallel=dist.group.WORLD)
    _assert_same_run(by_names, expected)
    _assert_same_run(by_names, expected, pipeline_parallel=dist.group.WORLD)


def _inputs(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(5, 7, 12, generator=generator)


def _one_stage(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        model(_inputs(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _stage(rank, model, first=0, last=1):
    """first, last: the ranks of the pipeline."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        if rank == first:
            out = model(_inputs(step))
            dist.send(out.detach(), last)
            gradient = torch.empty_like(out)
            dist.recv(gradient, last)
            out.backward(gradient)
        else:
            x = torch.empty(5, 7, 12)
            dist.recv(x, first)
            loss = model(x.requires_grad_()).square().mean()
            loss.backward()
            losses.append(loss.item())
            dist.send(x.grad, first)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _two_pipelines(rank):
    """Ranks 0 and 1 are stages of the one, 2 and 3 of the other; both see the same rows."""
    meshes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    first = rank - rank % 2
    whole = alone(lambda model, *_: _one_stage(model), Stage(_layers(3)))
    expected = [reading.merge(reading) for reading in whole]

    def train():
        model = Stage(_layers(3)[:2] if rank == first else _layers(3)[2:])
        return _stage(rank, model, first, first + 1)

    _assert_same_run(train, expected, pipeline_parallel=meshes["pp"])
    _assert_same_run(train, expected)  # the mesh has said it


class Heads(nn.Module):
    """A rank's heads cut out by hand: plain tensors, nothing that a DTensor could tell."""

    def __init__(self, rank, world):
        super().__init__()
        whole = nn.Linear(12, 36)
        self.fused = nn.Linear(12, 36 // world)
        rows = torch.arange(36).view(3, world, -1)[:, rank].flatten()
        with torch.no_grad():
            self.fused.weight.copy_(whole.weight[rows])
            self.fused.bias.copy_(whole.bias[rows])

    def forward(self, x):
        heads = (part.unflatten(-1, (-1, 2)).transpose(1, 2) for part in self.fused(x).chunk(3, -1))
        return F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)


class ByHand(nn.Module):
    """One attention with the same heads on all ranks, one whose heads are shared out."""

    def __init__(self, rank, world):
        super().__init__()
        torch.manual_seed(3)
        self.copied, self.shared_out = Heads(0, 1), Heads(rank, world)

    def forward(self, x):
        return self.shared_out(x + self.copied(x))


def _told_tensor_parallel(rank, world, mesh):
    def train(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        losses = []
        for step in range(STEPS):
            loss = model(_inputs(step)).sum()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
        return losses

    expected = alone(lambda model, *_: train(model), ByHand(0, 1))
    _assert_same_run(lambda: train(ByHand(rank, world)), expected, tensor_parallel=mesh)


def test_parts_of_a_batch_are_the_batch():
    parts = [part_of(rank, 3, data(0)) for rank in range(3)]
    assert torch.equal(torch.cat(parts), data(0))
    assert len({len(part) for part in parts}) > 1
