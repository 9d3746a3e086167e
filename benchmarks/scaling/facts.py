"""What the model is fed with: links and memory with their sources, kernels as measured."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from scaledot.bench import results

ROOT = Path(__file__).parents[2]
GPU_CSV = ROOT / "benchmarks" / "results" / "gpu.csv"
NODE = 8  # GPUs of an HGX H200 board, each with a network card of its own


class Link(NamedTuple):
    """One direction of a connection between two GPUs."""

    name: str
    nominal: float  # bytes a second
    share: float  # of that which a program gets
    latency: float  # seconds from the call to the first byte, for a message that is alone
    source: str

    @property
    def bandwidth(self) -> float:
        return self.nominal * self.share

    def seconds(self, size: float) -> float:
        return self.latency + size / self.bandwidth

    def slower(self, factor: float) -> "Link":
        return self._replace(share=self.share / factor)


# NCCL's own model of a ring with large messages (nccl, src/graph/tuning.cc), in seconds.
CALL, NVLINK_HOP, NETWORK_HOP = 8.4e-6, 3.4e-6, 9.6e-6

# NVIDIA of NCCL's all-gather over NVLink on eight H100: «360 GB/s is exactly what we'd expect»
# (nccl-tests#326).
NVLINK = Link(
    name="NVLink 4",
    nominal=450e9,  # 18 links, 900 GB/s both ways together (MLPerf v4.1, NVIDIA's H200 systems)
    share=0.80,
    latency=CALL + NVLINK_HOP,
    source="nccl-tests#326; NCCL's tuning.cc",
)
# NVIDIA again: «for NDR @ 400 Gbps you should see 46-48 GB/s per NIC» (nccl-tests#290).
NETWORK = Link(
    name="NDR InfiniBand",
    nominal=50e9,
    share=0.94,
    latency=CALL + NETWORK_HOP,
    source="nccl-tests#290; NCCL's tuning.cc",
)
# An all-gather over nodes uses all network cards of a node, a ring's message only one of them.
# 200 GB/s is what a user reports for 32 nodes of H100 (nccl#1218); inside a node, as above.
GATHER_OVER_NODES = 200e9  # bytes a second and GPU

MEMORY_BANDWIDTH = 0.8 * 4.8e12  # H200: 4.8 TB/s nominal; the share is assumed
MEMORY = 141e9  # bytes of an H200
STEP_OVERHEAD = 10e-6  # seconds: kernels and waits put into the queue for one step; assumed
BACKWARD_FLOPS = 2.5  # of a backward pass over a forward one: five products of matrices, not two


class Speed(NamedTuple):
    """What our kernels reached on one H200, by the length of the sequence."""

    flops: float  # a second
    length: int
    case: str  # the row of gpu.csv, with `shape` and `date`
    shape: str
    date: str


class Speeds(NamedTuple):
    forward: list[Speed]  # shortest first
    with_vitals: list[Speed]
    backward: list[Speed]


def measured(width: int = 128, path: Path = GPU_CSV) -> Speeds:
    """From the latest rows of the CSV; every row sees all keys, as most blocks of a ring do."""
    rows = [row for row in results.latest(results.read(path)) if not row.causal]
    forward = _speeds(rows, "own_cudnn", width)
    with_vitals = _speeds(rows, "vitals_cost", width)
    if not forward or not with_vitals:
        raise ValueError(f"{path} has no rows of d = {width}; type: scaledot bench --gpu")
    return Speeds(forward, with_vitals, _backward(rows, width, with_vitals))


def at(speeds: list[Speed], length: float) -> Speed:
    """Of the longest sequence measured that is not longer; the shortest one below that."""
    return max((s for s in speeds if s.length <= length), default=speeds[0], key=lambda s: s.length)


def _speeds(rows: Iterable[results.Row], case: str, width: int) -> list[Speed]:
    found = []
    for row in rows:
        length, its_width = (int(size) for size in row.shape.split("x")[2:])
        if row.case == case and its_width == width and row.ours_tflops is not None:
            flops = row.ours_tflops * 1e12
            found.append(Speed(flops, length, case, row.shape, row.date))
    return sorted(found, key=lambda speed: speed.length)


def _backward(rows: list[results.Row], width: int, forward: list[Speed]) -> list[Speed]:
    """Both passes were timed together: the forward pass with vitals is taken off again.

    Rates add as times do: 1 of forward and 2.5 of backward take (1 + 2.5) / rate of both.
    """
    found = []
    for both in _speeds(rows, "backward_cudnn", width):
        alone = at(forward, both.length)
        seconds = (1 + BACKWARD_FLOPS) / both.flops - 1 / alone.flops
        found.append(both._replace(flops=BACKWARD_FLOPS / seconds))
    return found
