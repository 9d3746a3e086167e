"""The page's questions, put to the formulas and to the played ring: rows of the CSV."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from benchmarks.scaling import model, ring
from benchmarks.scaling.facts import NETWORK, NODE, NVLINK, Link, Speeds
from benchmarks.scaling.model import Step, Work
from benchmarks.scaling.rows import Row

LENGTHS = (131_072, 1_048_576, 10_485_760)  # 128k, 1M, 10M
RANKS = tuple(2**power for power in range(11))  # 1 to 1024
LOCAL = (1_024, 4_096, 8_192, 16_384, 65_536)  # tokens a rank: weak scaling, and the steps' table
WEAK_RANKS = (8, 64, 1_024)
LAYOUT_RANKS = (2, 4, 8, 64)
SEED = 20_260


def rows(speeds: Speeds) -> list[Row]:
    return [
        *strong(speeds),
        *weak(speeds),
        *layouts(speeds),
        *troubles(speeds),
    ]


def strong(speeds: Speeds) -> Iterator[Row]:
    """The same sequence over more and more GPUs."""
    for tokens in LENGTHS:
        for ranks in RANKS:
            work = Work(tokens, ranks)
            for backward in (False, True):
                yield from _forms(work, speeds, "strong", backward)


def weak(speeds: Speeds) -> Iterator[Row]:
    """The same number of tokens a GPU: the sequence grows with the GPUs."""
    for local in LOCAL:
        for ranks in WEAK_RANKS:
            for backward in (False, True):
                yield from _forms(Work(local * ranks, ranks), speeds, "weak", backward)


def layouts(speeds: Speeds) -> Iterator[Row]:
    """Contiguous or zigzag, causal, long enough that no message is waited for."""
    for layout in ("contiguous", "zigzag"):
        for ranks in LAYOUT_RANKS:
            work = Work(65_536 * ranks, ranks, layout)
            step = model.forward_step(work, speeds)
            seconds = model.ring_seconds(work, step)
            yield _row(work, speeds, "model", "layout", "ring", False, seconds)
            played = ring.forward(_compute(work, step), _links(work, work.message))
            yield _row(work, speeds, "simulated", "layout", "ring", False, played.seconds)


class Trouble(NamedTuple):
    """What is wrong with the machine; `none` is the ring as the model has it."""

    name: str
    jitter: float = 0.0  # standard deviation of the logarithm of each block's time
    slow_rank: float = 1.0  # how many times slower rank 0 computes
    slow_nvlink: float = 1.0  # how many times slower rank 0's link is
    slow_network: float = 1.0  # and that of the last rank of the first node
    buffers: int = 2


TROUBLES = (
    Trouble("none"),
    Trouble("every block varies by 5 %", jitter=0.05),
    Trouble("every block varies by 20 %", jitter=0.2),
    Trouble("every block varies by 20 %, four buffers", jitter=0.2, buffers=4),
    Trouble("one rank computes 1.3 times slower", slow_rank=1.3),
    Trouble("one NVLink at half its speed", slow_nvlink=2.0),
    Trouble("one network card at half its speed", slow_network=2.0),
)
TROUBLED = ((1_048_576, 64), (1_048_576, 256))  # bound by the kernel; by the network


def troubles(speeds: Speeds) -> Iterator[Row]:
    for tokens, ranks in TROUBLED:
        work = Work(tokens, ranks)
        step = model.forward_step(work, speeds)
        for trouble in TROUBLES:
            compute = _compute(work, step)
            if trouble.jitter:
                # exp(N(0, s) - s^2 / 2) has mean 1: on average no block becomes slower
                noise = np.random.default_rng(SEED).normal(0, trouble.jitter, compute.shape)
                compute = compute * np.exp(noise - trouble.jitter**2 / 2)
            compute[0] *= trouble.slow_rank
            links = _links(work, work.message)
            links[0] = NVLINK.slower(trouble.slow_nvlink).seconds(work.message)
            links[NODE - 1] = NETWORK.slower(trouble.slow_network).seconds(work.message)
            played = ring.forward(compute, links, trouble.buffers)
            yield _row(
                work, speeds, "simulated", "trouble", "ring", False, played.seconds, trouble.name
            )


def form_seconds(work: Work, speeds: Speeds, backward: bool) -> dict[str, float]:
    """The closed form of each way to do it."""
    make = model.backward_step if backward else model.forward_step
    step = make(work, speeds)
    return {
        "ring": model.ring_seconds(work, step),
        "serial": model.serial_seconds(work, step),
        "double_ring": model.double_ring_seconds(
            work, make(work, speeds, NVLINK), make(work, speeds, NETWORK)
        ),
        "all_gather": model.gather_seconds(work, speeds, backward=backward),
    }


def _forms(work: Work, speeds: Speeds, question: str, backward: bool) -> Iterator[Row]:
    for form, seconds in form_seconds(work, speeds, backward).items():
        yield _row(work, speeds, "model", question, form, backward, seconds)
    make = model.backward_step if backward else model.forward_step
    played = play(work, make(work, speeds), backward)
    yield _row(work, speeds, "simulated", question, "ring", backward, played.seconds)


def play(work: Work, step: Step, backward: bool) -> ring.Played:
    """The ring in the order of the ranks: seven NVLinks, then the network, and again."""
    compute, keys = _compute(work, step), _links(work, work.message)
    if not backward:
        return ring.forward(compute, keys)
    return ring.backward(compute, keys, _links(work, work.gradient_message))


def _compute(work: Work, step: Step) -> np.ndarray:
    """Seconds of [rank, step]. Contiguous and causal: what lies ahead is not computed."""
    compute = np.full((work.ranks, work.ranks), step.compute)
    if work.layout == "contiguous":
        compute[:, 0] /= 2
        rank, number = np.indices(compute.shape)
        compute[number > rank] = 0.0  # block of rank - number, which would be negative
    return compute


def _links(work: Work, size: float) -> np.ndarray:
    def link(rank: int) -> Link:
        last_of_node = rank % NODE == NODE - 1 or rank == work.ranks - 1
        return NETWORK if work.ranks > NODE and last_of_node else NVLINK

    return np.array([link(rank).seconds(size) for rank in range(work.ranks)])


def _row(
    work: Work,
    speeds: Speeds,
    kind: str,
    question: str,
    form: str,
    backward: bool,
    seconds: float,
    case: str = "",
) -> Row:
    return Row(
        kind=kind,
        question=question,
        direction="backward" if backward else "forward",
        form=form,
        layout=work.layout,
        tokens=work.tokens,
        ranks=work.ranks,
        batch=work.batch,
        heads=work.heads,
        groups=work.groups,
        width=work.width,
        dtype="bfloat16",
        sent_bytes=sent_bytes(work, form, backward),
        seconds=seconds,
        efficiency=model.efficiency(work, speeds, seconds, backward=backward),
        case=case,
    )


def sent_bytes(work: Work, form: str, backward: bool) -> int:
    """Of one rank. In a ring the gradients make one hop more than the keys: the one home."""
    hops = work.ranks - 1
    size = hops * work.message
    if backward and hops:
        size += (hops if form == "all_gather" else hops + 1) * work.gradient_message
    return round(size)


def smallest_local(speeds: Speeds, link: Link, backward: bool, heads: int, groups: int) -> int:
    """The fewest tokens a rank, in steps of 64, whose message a zigzag block hides altogether."""
    make = model.backward_step if backward else model.forward_step
    for local in range(64, 1 << 20, 64):
        step = make(Work(local * 16, 16, heads=heads, groups=groups), speeds, link)
        if step.compute >= step.transfer:
            return local
    raise AssertionError("no block is long enough")


def most_at_half(speeds: Speeds, tokens: int, form: str, backward: bool) -> int:
    """The most GPUs that still work at 50 % or more: up to a node, then whole nodes."""
    best = 1
    for ranks in (*range(2, NODE), *range(NODE, 64 * 1024, NODE)):
        work = Work(tokens, ranks)
        seconds = form_seconds(work, speeds, backward)[form]
        if model.efficiency(work, speeds, seconds, backward=backward) < 0.5:
            return best
        best = ranks
    raise AssertionError("it never stops scaling")
