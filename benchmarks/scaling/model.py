"""The formulas: bytes, FLOPs and seconds of one layer's attention with its sequence over R ranks.

Letters as everywhere: B batch, H query heads, G key/value heads, D width of query, key and value.
Rank r holds n / R queries and keys. Nothing here is measured: see facts.py for what goes in.
"""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from benchmarks.scaling import facts
from benchmarks.scaling.facts import NETWORK, NODE, NVLINK, Link, Speed, Speeds

Layout = Literal["all keys", "zigzag", "contiguous"]  # the last two are causal
HALF, FULL = 2, 4  # bytes of a bfloat16 and of a float32


@dataclass(frozen=True)
class Work:
    """One layer: attention of Llama 3.1 8B unless said otherwise."""

    tokens: int
    ranks: int
    layout: Layout = "zigzag"
    batch: int = 1
    heads: int = 32
    groups: int = 8
    width: int = 128

    @property
    def local(self) -> float:
        """Tokens of a rank."""
        return self.tokens / self.ranks

    def over(self, ranks: int) -> "Work":
        return replace(self, ranks=ranks)

    @property
    def key_bytes(self) -> int:
        """K and V of one token: 2 tensors of bfloat16."""
        return 2 * self.batch * self.groups * self.width * HALF

    @property
    def message(self) -> float:
        """What a rank sends in one step of the forward ring."""
        return self.local * self.key_bytes

    @property
    def gradient_message(self) -> float:
        """dK and dV are sums over ranks, so they travel in float32: twice the bytes."""
        return self.message * FULL / HALF

    @property
    def pair_flops(self) -> int:
        """Of one query and one key in all heads: d multiply-adds for q k, d for p v."""
        return 4 * self.batch * self.heads * self.width

    @property
    def block_flops(self) -> float:
        """Of the local queries with one block of keys; zigzag: half of the pairs are visible."""
        return self.pair_flops * self.local**2 * (0.5 if self.layout == "zigzag" else 1.0)

    @property
    def all_flops(self) -> float:
        """Of the whole layer: what one GPU would have to do."""
        return self.pair_flops * self.tokens**2 * (1.0 if self.layout == "all keys" else 0.5)


class Step(NamedTuple):
    """Seconds of one step of a rank."""

    kernel: float
    merge: float  # of the block's result with what is there, and putting it all into the queue
    transfer: float  # all messages of the step, on the link that is used
    home: float = 0.0  # backward: the last gradients go one hop further than keys and values

    @property
    def compute(self) -> float:
        return self.kernel + self.merge


def slowest_link(ranks: int) -> Link:
    """In a ring over several nodes every block crosses the network between two of them."""
    return NVLINK if ranks <= NODE else NETWORK


def forward_step(
    work: Work, speeds: Speeds, link: Link | None = None, entry_bytes: int | None = None
) -> Step:
    """entry_bytes: what the merge moves for each number of the output; None: as scaledot does."""
    moved = _entries(work) * (AS_IT_IS if entry_bytes is None else entry_bytes)
    return Step(
        work.block_flops / _rate(work, speeds.forward).flops,
        _besides(work, moved),
        (link or slowest_link(work.ranks)).seconds(work.message),
    )


def backward_step(work: Work, speeds: Speeds, link: Link | None = None) -> Step:
    """K, V go round again and their gradients with them; each rank adds to what comes by."""
    link = link or slowest_link(work.ranks)
    gradients = link.seconds(work.gradient_message)
    return Step(
        facts.BACKWARD_FLOPS * work.block_flops / _rate(work, speeds.backward).flops,
        _besides(work, gradient_merge_bytes(work)),
        link.seconds(work.message) + gradients,
        gradients,
    )


# Bytes that the merge moves for each number of a block's output. On a GPU one kernel
# (scaledot/backends/cuda/combine.py) reads the block's output and reads and writes the running one.
# With operators of torch it would be widened, both multiplied by their shares, and added: four
# passes over the memory.
AS_IT_IS = HALF + FULL + FULL
IN_FOUR_PASSES = (HALF + FULL) + (FULL + FULL) + (FULL + FULL) + (FULL + FULL + FULL)


def _entries(work: Work) -> float:
    return work.batch * work.heads * work.local * work.width


def gradient_merge_bytes(work: Work) -> float:
    """dQ into its sum; dK and dV into zeros, packed, and added to what comes by."""
    keys = 2 * work.batch * work.groups * work.local * work.width
    add = HALF + FULL + FULL
    return _entries(work) * add + keys * (FULL + add + (FULL + FULL) + (FULL + FULL + FULL))


def _besides(work: Work, merged: float) -> float:
    """Seconds of a step besides its kernel. One rank alone has nothing to merge."""
    return merged / facts.MEMORY_BANDWIDTH + facts.STEP_OVERHEAD if work.ranks > 1 else 0.0


def _rate(work: Work, speeds: list[Speed]) -> Speed:
    """A zigzag block is made of halves of the local sequence."""
    return facts.at(speeds, work.local / 2 if work.layout == "zigzag" else work.local)


def ring_seconds(work: Work, step: Step) -> float:
    """Every step but the last hides its messages behind its block, or waits for them.

    Contiguous and causal: the last rank sees everything, all others wait for it at the end. Its
    own block is the diagonal one, half of a full one.
    """
    own = step.compute / 2 if work.layout == "contiguous" else step.compute
    waits = step.home if work.ranks > 1 else 0.0
    return (work.ranks - 1) * max(step.compute, step.transfer) + own + waits


def serial_seconds(work: Work, step: Step) -> float:
    """The same ring without overlap: first the messages, then the block."""
    own = step.compute / 2 if work.layout == "contiguous" else step.compute
    waits = step.home if work.ranks > 1 else 0.0
    return (work.ranks - 1) * (step.compute + step.transfer) + own + waits


def double_ring_seconds(work: Work, inner: Step, outer: Step) -> float:
    """A ring of nodes around rings inside them: all eight network cards work at the same time.

    inner: over NVLink, outer: over the network. One message to the next node hides behind the
    eight blocks that go round inside. With one node it is the ring.
    """
    if work.ranks <= NODE:
        return ring_seconds(work, inner)
    nodes = work.ranks // NODE
    inside = NODE * max(inner.compute, inner.transfer)
    last = (NODE - 1) * max(inner.compute, inner.transfer) + inner.compute
    return (nodes - 1) * max(inside, outer.transfer) + last + outer.home


def gather_seconds(work: Work, speeds: Speeds, *, backward: bool = False) -> float:
    """All keys and values first, then one call of the kernel over them.

    Backward: gathered once more, and the gradients summed and scattered, which moves as many
    float32 numbers. Besides: K and V are put in order (read and written once), one merge.
    """
    share = {"all keys": 1.0, "zigzag": 0.5, "contiguous": 1 - 0.5 / work.ranks}[work.layout]
    flops = work.pair_flops * work.local * work.tokens * share
    speed = facts.at(speeds.backward if backward else speeds.forward, work.local)
    kernel = flops * (facts.BACKWARD_FLOPS if backward else 1.0) / speed.flops
    size = work.message + (work.gradient_message if backward else 0.0)
    merged = gradient_merge_bytes(work) if backward else _entries(work) * AS_IT_IS
    moved = merged + 2 * work.tokens * work.key_bytes
    calls = 2 if backward else 1
    return kernel + _besides(work, moved) + collective_seconds(work.ranks, size, calls=calls)


def collective_seconds(ranks: int, size: float, *, calls: int = 1) -> float:
    """All-gather of `size` bytes a rank, or its reverse, as NCCL's own model of a ring has it."""
    if ranks == 1:
        return 0.0
    crossings = -(-ranks // NODE) - 1  # of the network
    hops = (ranks - 1 - crossings) * facts.NVLINK_HOP + crossings * facts.NETWORK_HOP
    bandwidth = facts.GATHER_OVER_NODES if crossings else NVLINK.bandwidth
    return calls * (facts.CALL + hops) + (ranks - 1) * size / bandwidth


def efficiency(work: Work, speeds: Speeds, seconds: float, *, backward: bool = False) -> float:
    """Of R GPUs that take `seconds`: one GPU's time for all of it, over R times theirs."""
    return alone_seconds(work, speeds, backward=backward) / (work.ranks * seconds)


def alone_seconds(work: Work, speeds: Speeds, *, backward: bool = False) -> float:
    """One GPU, as fast as it was ever measured, if it had the memory."""
    flops = work.all_flops * (facts.BACKWARD_FLOPS if backward else 1.0)
    return flops / (speeds.backward if backward else speeds.forward)[-1].flops


def enough_tokens(link: Link, flops: float, heads: int, groups: int, causal: bool) -> float:
    """The fewest tokens a rank for which a block hides its message, latency and merge left out.

    pairs * 4 H D / flops >= tokens * 4 G D / bandwidth, with tokens^2 pairs, or half of them.
    """
    return flops / link.bandwidth * groups / heads * (2 if causal else 1)


class Bytes(NamedTuple):
    """Memory of one rank for one layer's call beyond query, key, value and output, at its peak."""

    ring: float
    ring_backward: float
    gather: float
    gather_backward: float


def memory(work: Work) -> Bytes:
    """As scaledot/distributed does it.

    Both: the running output and lse in float32, a block's output as it is;
    backward: dQ in float32 and of the block. Ring: the K and V at hand and those that come;
    backward: their gradients at hand, packed and coming. Gathered: K and V of everybody, and once
    more in the order of the sequence; backward: their gradients, packed, and cut for their owners.
    """
    entries = _entries(work)
    forward = entries * (FULL + HALF) + entries / work.width * FULL
    backward = entries * (FULL + HALF)
    keys = work.tokens * work.key_bytes
    gradients = keys * FULL / HALF
    return Bytes(
        forward + 2 * work.message,
        backward + 2 * work.message + 3 * work.gradient_message,
        forward + 2 * keys,
        backward + 2 * keys + 3 * gradients,
    )


def reading_bytes(layers: int, heads: int) -> int:
    """What a rank gives to one reading of the watch (scaledot/watch/ranks/parcel.py).

    A header of 64 bytes, 48 for the scalars, 16 a layer; of each head 13 float32 and 6 counts.
    """
    return 64 + 48 + layers * (16 + heads * (13 * 4 + 6 * 8))
