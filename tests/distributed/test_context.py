"""`context_parallel`: a training step as it is written for torch's own, equal to one process's."""

import copy

import pytest
import torch
from ranks import spawn
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F

from scaledot import distributed


class Block(nn.Module):
    """One causal layer over tokens, positions given from outside, and a loss."""

    def __init__(self):
        super().__init__()
        self.embed, self.qkv = nn.Embedding(11, 12), nn.Linear(12, 36)
        self.head = nn.Linear(12, 11)

    def forward(self, tokens, positions, labels):
        x = self.embed(tokens) + positions
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="sum")


def batch(tokens):
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(11, (2, tokens + 1), generator=generator)
    positions = torch.randn(tokens, 12, generator=generator, dtype=torch.float64)
    return words[:, :-1].clone(), positions, words[:, 1:].clone()


def train(rank, world, tokens, compile_it):
    torch.manual_seed(0)
    model = Block().double()
    alone = copy.deepcopy(model)
    words, positions, labels = batch(tokens)
    whole = alone(words, positions, labels)
    whole.backward()
    before = [tensor.clone() for tensor in (words, positions, labels)]
    original = F.scaled_dot_product_attention
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    with distributed.context_parallel(
        mesh,
        buffers=[words, positions, labels],
        buffer_seq_dims=[1, 0, 1],
        no_restore_buffers={labels},
    ):
        assert words.shape[1] <= tokens // world + 2
        run = torch.compile(model, backend="eager") if compile_it else model
        loss = run(words, positions, labels)
        loss.backward()
        (back,) = distributed.context_parallel_unshard(mesh, [words], [1])
        assert torch.equal(back, before[0])
        with pytest.raises(ValueError, match="takes no attn_mask"):
            F.scaled_dot_product_attention(*[torch.zeros(1, 1, 4, 4)] * 3, torch.zeros(4, 4))
        with pytest.raises(ValueError, match="no attention dropout"):
            F.scaled_dot_product_attention(*[torch.zeros(1, 1, 4, 4)] * 3, None, 0.1)
    assert F.scaled_dot_product_attention is original
    assert torch.equal(words, before[0])
    assert torch.equal(positions, before[1])
    assert labels.shape[1] < tokens
    total = loss.detach().clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total, whole.detach(), rtol=1e-12, atol=1e-12)
    for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
        dist.all_reduce(mine.grad)
        torch.testing.assert_close(mine.grad, expected.grad, rtol=1e-10, atol=1e-12)


def mistakes(rank, world):
    words, positions, _ = batch(13)
    mesh = dist.group.WORLD
    with (
        pytest.raises(ValueError, match="2 buffers but 1 buffer_seq_dims"),
        distributed.context_parallel(mesh, buffers=[words, positions], buffer_seq_dims=[1]),
    ):
        pass
    with (
        pytest.raises(ValueError, match="must be some of the buffers"),
        distributed.context_parallel(
            mesh, buffers=[words], buffer_seq_dims=[1], no_restore_buffers={positions}
        ),
    ):
        pass
    original = F.scaled_dot_product_attention
    with (
        pytest.raises(KeyError),
        distributed.context_parallel(mesh, buffers=[words], buffer_seq_dims=[1]),
    ):
        raise KeyError
    assert F.scaled_dot_product_attention is original
    assert words.shape == (2, 13)


def everything(rank, world):
    train(rank, world, 31, compile_it=False)
    train(rank, world, 29, compile_it=True)
    mistakes(rank, world)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_training_step_is_that_of_one_process_and_leaves_everything_as_it_was():
    spawn(everything, 2)
