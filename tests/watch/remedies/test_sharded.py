"""FSDP2 on one rank: weights are DTensors between steps. Several ranks are in test_ranks.py."""

import pytest
import torch
import torch.distributed
from remedied_models import TOKENS, Outside, made, maxima
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from watched_models import TinyGPT, language_loss

from scaledot import Watch
from scaledot.watch.remedies import RemedyError, apply, install

# Of a model whose output is a view, as is any Linear's of three dimensions.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")


@pytest.fixture
def mesh(tmp_path):
    """One rank."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1
    )
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def sharded(make, mesh):
    model = made(make).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for block in getattr(model, "layers", ()):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.mark.slow
def test_apply_scales_the_local_rows(mesh):
    model, twin = sharded(Outside, mesh), made(Outside)
    assert type(model.to_q.weight).__name__ == "DTensor"
    before = {name: value.full_tensor() for name, value in model.state_dict().items()}
    limit = float(maxima(twin)["attend"].max()) / 2
    expected = maxima(twin)["attend"].clamp(max=limit)
    for one in (model, twin):
        applied = apply(f"qk-clip:{limit!r}", one, inputs=TOKENS)
    apply_again = apply(f"qk-clip:{limit * 0.999!r}", model, inputs=TOKENS)
    apply_again.undo()
    assert type(model.to_q.weight).__name__ == "DTensor"
    assert model.state_dict().keys() == before.keys()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value.full_tensor(), twin.state_dict()[name], rtol=1e-12, atol=0)
    torch.testing.assert_close(maxima(twin)["attend"], expected, rtol=1e-6, atol=0)
    applied.undo()


@pytest.mark.nightly
def test_a_sharded_run_is_clipped_as_a_plain_one(mesh):
    losses = []
    for make in (lambda: sharded(TinyGPT, mesh), lambda: plain(TinyGPT)):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        with Watch(model, every=1, alarms=False) as watch:
            installed = install(watch, "qk-clip:2", say=lambda line: None)
            mine = []
            for step in range(3):
                tokens = (TOKENS * (step + 1)) % 29
                loss = language_loss(model(tokens), tokens)
                loss.backward()
                mine.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
        assert installed.clips
        assert not installed.refused
        losses.append(mine)
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


def plain(make):
    model = made(make).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def test_sigma_reparam_comes_before_sharding(mesh):
    with pytest.raises(RemedyError, match=r"apply it before fully_shard\(model\)"):
        apply("sigma-reparam", sharded(Outside, mesh))
