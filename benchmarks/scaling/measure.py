"""Times scaledot.distributed.attention over the ranks of this machine, and counts what they send.

python -m benchmarks.scaling.measure [--ranks 1 2] [--tokens 2048] [--repeats 9] [--dry]

Two gloo processes on a CPU; NCCL and one process a GPU where there are as many GPUs as ranks. The
ring with overlap, the same ring without, and the all-gather take turns, after a gate: the output
and gradients of each must be those of one process. Rows go to benchmarks/results/scaling.csv.
"""

import argparse
import contextlib
import datetime
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import distributed as dist
from torch import multiprocessing

import scaledot
from benchmarks.scaling import rows
from benchmarks.scaling.rows import Row
from scaledot.bench import clock, provenance

BATCH, HEADS, GROUPS, WIDTH = 1, 8, 2, 64
WAYS = {"ring": "ring", "serial": "ring", "all_gather": "all_gather"}  # form -> method
CALLS = ("forward", "both")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}  # of unit normal inputs; a gate, no bar

Samples = dict[tuple[str, str], clock.Samples]  # (form, direction) -> seconds
Sent = dict[tuple[str, str], int]  # bytes


def main() -> int:
    arguments = _arguments()
    found: list[Row] = []
    for ranks in arguments.ranks:
        found += measure(ranks, arguments.tokens, arguments.repeats)
    for row in found:
        words = f"{row.ranks} ranks, {row.form}, {row.direction}"
        print(f"{words}: {row.seconds * 1e3:.1f} ms, {row.sent_bytes} bytes sent a rank")
    if not arguments.dry:
        kept = [row for row in rows.read() if not any(_same(row, new) for new in found)]
        rows.write([*kept, *found])
        print("now: python -m benchmarks.scaling")
    return 0


def measure(ranks: int, tokens: int, repeats: int) -> list[Row]:
    on_gpu = torch.cuda.device_count() >= ranks
    origin = provenance.collect(on_gpu=on_gpu)
    samples, sent = _spawned(ranks, tokens, repeats, on_gpu)
    return [
        Row(
            kind="measured",
            question="call",
            direction=direction,
            form=form,
            layout="zigzag",
            tokens=tokens,
            ranks=ranks,
            batch=BATCH,
            heads=HEADS,
            groups=GROUPS,
            width=WIDTH,
            dtype="bfloat16" if on_gpu else "float32",
            sent_bytes=sent[form, direction],
            seconds=seconds.median,
            efficiency=None,  # cores are shared: see the page
            p20=seconds.p20,
            p80=seconds.p80,
            repeats=len(seconds.values),
            device=origin.gpu or f"{origin.cores} cores, {origin.machine}",
            load=origin.load,
            torch=origin.torch,
            date=origin.date,
            commit=origin.commit,
        )
        for (form, direction), seconds in samples.items()
    ]


def _spawned(ranks: int, tokens: int, repeats: int, on_gpu: bool) -> tuple[Samples, Sent]:
    with tempfile.TemporaryDirectory() as folder:
        answers = multiprocessing.get_context("spawn").SimpleQueue()
        multiprocessing.spawn(
            _rank, (ranks, tokens, repeats, on_gpu, folder, answers), nprocs=ranks, join=True
        )
        return answers.get()


def _rank(
    rank: int, ranks: int, tokens: int, repeats: int, on_gpu: bool, folder: str, answers: Any
) -> None:
    if on_gpu:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)  # of the cores each rank has one: else they measure each other
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{folder}/group",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=120),
    )
    result = _times(ranks, tokens, repeats, "cuda" if on_gpu else "cpu")
    if rank == 0:
        answers.put(result)
    if not on_gpu:
        # gloo's threads now and then abort a process that takes its group down beside another.
        with contextlib.suppress(RuntimeError):  # the other was quicker
            dist.barrier()
        os._exit(0)
    dist.destroy_process_group()


def _times(ranks: int, tokens: int, repeats: int, device: str) -> tuple[Samples, Sent]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(7)  # the same whole tensors on every rank
    whole = [
        torch.randn(BATCH, heads, tokens, WIDTH, dtype=dtype, device=device)
        for heads in (HEADS, GROUPS, GROUPS)
    ]
    calls = {
        (form, direction): partial(_call, form, direction, tokens, _shards(whole))
        for form in (WAYS if ranks > 1 else ["ring"])  # one rank alone sends nothing
        for direction in CALLS
    }
    _gate(whole, calls, TOLERANCE[dtype])
    sent = {}
    for name, call in calls.items():
        with counted() as total:
            call()
        sent[name] = total[0]
        if ranks > 1 and not total[0]:
            raise AssertionError(f"{name}: the ranks talked in a way that is not counted")
    named = {" ".join(name): call for name, call in calls.items()}
    found = clock.race(named, repeats, stopwatch=_together)
    return {name: found[" ".join(name)] for name in calls}, sent


def _shards(whole: list[torch.Tensor]) -> list[torch.Tensor]:
    world = dist.group.WORLD
    return [scaledot.distributed.shard(t, world, 2, layout="zigzag").detach() for t in whole]


def _call(
    form: str, direction: str, tokens: int, shards: list[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """The rank's output, and with direction both its gradients for a loss of out.sum()."""
    backward = direction == "both"
    leaves = [t.requires_grad_(backward) for t in (s.detach() for s in shards)]
    with overlapping(form != "serial"):
        out = scaledot.distributed.attention(
            *leaves,
            dist.group.WORLD,
            is_causal=True,
            enable_gqa=True,
            layout="zigzag",
            method=WAYS[form],
        )
        return (out, *torch.autograd.grad(out.sum(), leaves)) if backward else (out,)


def _gate(
    whole: list[torch.Tensor], calls: dict[tuple[str, str], Callable], tolerance: float
) -> None:
    leaves = [t.clone().requires_grad_() for t in whole]
    out = scaledot.attention(*leaves, is_causal=True, enable_gqa=True)
    expected = _shards([out, *torch.autograd.grad(out.sum(), leaves)])
    for name, call in calls.items():
        for got, want in zip(call(), expected, strict=False):
            scale = max(want.abs().max().item(), 1.0)
            worst = (got - want).abs().max().item() / scale
            if not worst <= tolerance:
                raise AssertionError(f"{name}: off by {worst:.2g}; nothing was timed")


def _together(call: clock.Call, calls: int) -> float:
    """All ranks start together, and the slowest one ends the call."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
    return (time.perf_counter() - start) / calls


@contextlib.contextmanager
def overlapping(wanted: bool) -> Iterator[None]:
    from scaledot.distributed.transport import Ring

    before = Ring.overlap
    Ring.overlap = wanted
    try:
        yield
    finally:
        Ring.overlap = before


# Where each collective has the tensor of one rank: what it gives, or what it takes.
OWN = {
    "all_gather": 1,
    "all_gather_into_tensor": 1,
    "reduce_scatter": 0,
    "reduce_scatter_tensor": 0,
}


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """One number: the bytes that this rank gives to torch.distributed while the block runs.

    A message counts once. A collective counts as a ring of ranks would send it: R - 1 times what a
    rank brings to an all-gather or takes from a reduce-scatter.
    """
    total = [0]
    originals = {name: getattr(dist, name) for name in ("batch_isend_irecv", *OWN)}

    def messages(operations: list[Any]) -> Any:
        total[0] += sum(op.tensor.nbytes for op in operations if op.op is dist.isend)
        return originals["batch_isend_irecv"](operations)

    def collective(name: str, *args: Any, **words: Any) -> Any:
        total[0] += (dist.get_world_size() - 1) * args[OWN[name]].nbytes
        return originals[name](*args, **words)

    dist.batch_isend_irecv = messages
    for name in OWN:
        setattr(dist, name, partial(collective, name))
    try:
        yield total
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)


def _same(old: Row, new: Row) -> bool:
    """A new measurement takes the place of an old one of the same thing."""
    names = ("kind", "device", "ranks", "tokens", "form", "direction", "layout")
    return all(getattr(old, name) == getattr(new, name) for name in names)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="default: 1 2")
    parser.add_argument("--tokens", type=int, default=2048, help="of the whole sequence")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--dry", action="store_true", help="write no file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
