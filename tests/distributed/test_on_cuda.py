"""The same over ranks on a GPU: NCCL where each rank has one, gloo by the host where they share."""

import pytest
import torch
from ranks import spawn
from torch import distributed as dist

import scaledot
from scaledot import distributed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def compare(rank, world, backend, method, dtype, width):
    torch.cuda.set_device(rank % torch.cuda.device_count())
    group = dist.group.WORLD
    if backend == "nccl":
        group = dist.new_group(backend="nccl")
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(heads, tokens=517):
        return torch.randn(2, heads, tokens, width, device="cuda", generator=generator).to(dtype)

    whole = [draw(4).requires_grad_(), draw(2).requires_grad_(), draw(2).requires_grad_()]
    grad = draw(4)
    given = {"is_causal": True, "enable_gqa": True}
    out, vitals = scaledot.attention_with_vitals(*whole, **given)
    out.backward(grad)
    mine = [distributed.shard(t.detach(), group, 2, "zigzag").requires_grad_() for t in whole]
    cut = {"layout": "zigzag", "method": method}
    own, merged = distributed.attention_with_vitals(*mine, group, **given, **cut)
    own.backward(distributed.shard(grad, group, 2, "zigzag"))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2

    def close(found, expected, times=1):
        torch.testing.assert_close(
            found.float(), expected.float(), rtol=times * tolerance, atol=times * tolerance
        )

    close(own, distributed.shard(out, group, 2, "zigzag"))
    for part, all_of_it in zip(mine, whole, strict=True):
        close(part.grad, distributed.shard(all_of_it.grad, group, 2, "zigzag"), 4)
    for name in ("max_logit", "logit_std", "row_std", "entropy", "sum_p2", "sink", "k_rms"):
        torch.testing.assert_close(
            getattr(merged, name), getattr(vitals, name), rtol=2e-3, atol=2e-3
        )
    for name in ("rows", "pairs", "ratio_rows", "k_entries"):
        assert torch.equal(getattr(merged, name), getattr(vitals, name)), name
    return torch.cuda.get_device_name()


# A rank is a fresh process that compiles its kernels, most of them for two layouts when it gathers.
CASES = {
    "ring": [("float32", 40), ("bfloat16", 64), ("bfloat16", 128)],
    "all_gather": [("bfloat16", 64)],
}


def all_cases(rank, world, backend, method):
    for dtype, width in CASES[method]:
        compare(rank, world, backend, method, getattr(torch, dtype), width)


@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_one_rank_with_nccl(method):
    spawn(all_cases, 1, "nccl", method)


@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_two_ranks_share_a_gpu_by_gloo(method):
    spawn(all_cases, 2, "gloo", method)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a GPU for each rank")
@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_two_ranks_with_nccl(method):
    spawn(all_cases, 2, "nccl", method)
