"""Peak memory is measured in a process of its own."""

import pytest

from scaledot.bench import memory, peers
from scaledot.bench.workload import Workload

MIB = 2**20


@pytest.mark.nightly
def test_the_plain_formula_holds_its_matrices_and_the_fused_kernel_does_not():
    workload = Workload(1, 1, 2048, 16)
    matrix = 2048**2 * 4
    assert memory.peak_extra_bytes(peers.plain, workload) >= 2 * matrix
    assert memory.peak_extra_bytes(peers.torch_sdpa, workload) <= matrix


@pytest.mark.nightly
def test_a_large_parent_does_not_count():
    ballast = bytearray(256 * MIB)
    assert memory.peak_extra_bytes(peers.torch_sdpa, Workload(1, 1, 64, 16)) < 64 * MIB
    assert len(ballast) == 256 * MIB


@pytest.mark.nightly
def test_a_failing_call_is_told_with_its_own_words():
    def unknown(inputs):
        raise AssertionError("runs in another process only")

    with pytest.raises(RuntimeError, match=r"weighing .*unknown at 1x1x64x16 ended with status 1"):
        memory.peak_extra_bytes(unknown, Workload(1, 1, 64, 16))
