"""Peak memory of one call on a GPU: torch's allocator keeps the count."""

import torch

from scaledot.bench.cases import Contender
from scaledot.bench.workload import Workload, touch


def peak_bytes_a_row(contender: Contender, workload: Workload) -> float:
    """What the call adds at its peak, output included, inputs not; over the rows of all heads."""
    inputs = contender.prepare(workload.make())
    touch(contender.attend(inputs))  # compiled code and handles belong to no call
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    touch(contender.attend(inputs))
    return (torch.cuda.max_memory_allocated() - before) / workload.rows
