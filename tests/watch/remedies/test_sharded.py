"""FSDP2: weights are DTensors between steps, and each rank scales the rows that it holds."""

import subprocess
import sys
import textwrap
from pathlib import Path

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
TESTS = Path(__file__).parents[2]


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


RANK = """
    import sys
    sys.path.insert(0, {tests!r})
    import torch, torch.distributed as dist
    from remedied_models import TOKENS, Outside, made
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from scaledot import Watch
    from scaledot.watch.remedies import install

    rank = int(sys.argv[1])
    dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
    model = fully_shard(made(Outside).train(), mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Watch(model, every=1, store=(readings := []), alarms=False) as watch:
        install(watch, "qk-clip:2", say=lambda line: None)
        for _ in range(2):
            model(TOKENS[rank : rank + 1]).sum().backward()
            optimizer.step()
    state = {{name: value.full_tensor() for name, value in model.state_dict().items()}}
    maxima = [torch.from_numpy(one.value("max_logit")) for one in readings]
    if rank == 0:
        torch.save((state, maxima), sys.argv[3])
    dist.barrier()
    dist.destroy_process_group()
"""


def test_two_ranks_clip_by_the_larger_of_their_logits(tmp_path):
    """Each has half of the rows and half of the batch."""
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(RANK.format(tests=str(TESTS))))
    saved = tmp_path / "saved.pt"
    arguments = [str(tmp_path / "meeting"), str(saved)]
    ranks = [
        subprocess.Popen([sys.executable, str(script), str(rank), *arguments]) for rank in (0, 1)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    state, readings = torch.load(saved, weights_only=True)
    model = made(Outside)
    apply("qk-clip:2", model, inputs=TOKENS)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=0)
    assert (readings[1] <= 2 * (1 + 1e-6)).all()
