"""Loops whose cycles are counted on a GPU are at least assembled everywhere."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    not (ROOT / "benchmarks/kernels").exists(), reason="benchmarks are not part of this copy"
)
pytest.importorskip("triton.backends.nvidia")


@pytest.fixture
def loops(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.kernels import loops

    return loops


@pytest.mark.nightly
@pytest.mark.slow
def test_all_are_assembled_as_they_are_meant(loops):
    found = loops.schedules()
    assert len({schedule.name for schedule in found}) == len(found) > 20
    for schedule in found:
        code, remarks = loops.assembled(schedule)
        assert code
        assert "Potential Performance Loss" not in remarks, (schedule.name, remarks)
        assert re.search(r"\b0 bytes spill stores", remarks), (schedule.name, remarks)


def test_a_tile_costs_what_its_sums_are(loops):
    plain, statistics = (loops.attention(128, sums) for sums in (loops.PLAIN, loops.STATISTICS))
    for loop, sums in ((plain, 64), (statistics, 64 + 2 * 64)):  # a score joins one, or three
        joins = [line for line in loop.lines if re.match(r"(add|fma.rn).f32 sum_[lpw]\d\d,", line)]
        assert len(joins) == sums
    assert sum("wgmma.mma_async" in line for line in plain.lines) == 16


def test_no_two_registers_share_a_name(loops):
    """The assembler would not say so, and drop what was written first."""
    declared = re.findall(r"\.reg \.\w+ ([^;]+);", loops.attention(64, loops.ALL).text(2))
    names = []
    for name in ", ".join(declared).split(", "):
        many = re.fullmatch(r"(\w+)<(\d+)>", name)
        names += [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]
    assert len(names) > 300
    assert len(set(names)) == len(names)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure")
def test_without_a_gpu_it_says_so(loops, capsys):
    assert loops.main([]) == 2
    assert "nothing was measured" in capsys.readouterr().out
