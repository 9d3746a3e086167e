"""`scaledot bench --gpu` from its arguments to its exit status, with a CPU in the GPU's place."""

import argparse
import functools
import json
from pathlib import Path

import pytest
import torch

from scaledot import bench, cli
from scaledot.bench import gpu, provenance, results
from scaledot.bench.clock import Samples
from scaledot.bench.gpu import cases, clock, memory, ours
from scaledot.bench.gpu.apart import Report
from scaledot.bench.gpu.engine import OnGpu

CELL = ("--width", "64", "--length", "1024")


def _run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.run(parser.parse_args(["--gpu", *arguments]))


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def on_cpu(monkeypatch):
    """One head of 1024 tokens; the CPU backend in the place of our kernels; times that are told.

    cuDNN, flash and flash-attn-4 stay what they are, and so cannot be there.
    """
    told = {"own kernel": 1.0, "own kernel with vitals": 1.05, "vitals": 0.5, "attention": 1.0}

    def race(contenders, repeats, device, *, after_round):
        for call in contenders.values():
            call()
        for _ in range(repeats):
            after_round()
        values = {name: told.get(name, 1.0) * 1e-3 for name in contenders}
        return clock.Race({n: Samples((v,) * repeats) for n, v in values.items()}, frozenset())

    class Duels:
        def __init__(self, workloads):
            list(workloads)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def ready(self):
            pass

        def race(self, workload, rounds):
            return Report({"ours": Samples((1.0,))}, [], {"peer": "ImportError: no compiler"})

    monkeypatch.setattr(gpu, "missing", lambda: None)
    monkeypatch.setattr("scaledot.bench.gpu.engine.Duels", Duels)
    monkeypatch.setattr(clock, "race", race)
    monkeypatch.setattr(clock, "Cuda", lambda: None)
    monkeypatch.setattr(memory, "peak_bytes_a_row", lambda side, load: 100.0)
    monkeypatch.setattr(ours, "HOPPER", "cpu")
    monkeypatch.setattr(ours, "TRITON", "cpu")
    monkeypatch.setattr(cases, "TOKENS", 1024)
    monkeypatch.setattr(cases, "MODEL_WIDTH", 64)
    monkeypatch.setattr(cases, "ADDITIVE", (1, 2, 32, 16))
    monkeypatch.setattr(cases, "on_gpu", functools.partial(cases.on_gpu, device="cpu"))
    monkeypatch.setattr(
        provenance, "_of_gpu", lambda: {"gpu": "A GPU", "driver": "1", "cudnn": "9.19.0"}
    )
    return told


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_ends_with_2(capsys):
    assert cli.main(["bench", "--gpu"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("scaledot bench: --gpu needs a CUDA GPU, and torch")
    assert list(Path().iterdir()) == []


def test_from_end_to_end(on_cpu, capsys):
    status = _run(*CELL, "--repeats", "2", "--out", "gpu.csv")
    shown = capsys.readouterr().out
    rows = results.read(Path("gpu.csv"))
    every = cases.on_gpu(widths=[64], lengths=[1024])
    assert sorted(row.case for row in rows) == sorted(case.name for case in every)
    by_name = {(row.case, row.causal): row for row in rows}
    cost = by_name["vitals_cost", False]
    assert (cost.ours_median, cost.peer_median) == (1.05, 1.0)
    assert cost.measured == pytest.approx(1 / 1.05, rel=1e-4)
    assert cost.gpu == "A GPU"
    assert cost.dtype == "bfloat16"
    assert cost.peer_tflops == pytest.approx(4 * 1024**2 * 64 / 1e-3 / 1e12, rel=1e-4)
    full = pytest.approx(cost.peer_tflops, rel=1e-4)
    assert 2 * by_name["vitals_cost", True].peer_tflops == full  # causal is half of the work
    assert by_name["vitals_alone", False].ours_tflops == full  # half of the work in half the time
    assert by_name["backward_cudnn", False].ours_tflops / 3.5 == full
    assert by_name["additive", False].ours_tflops is None
    fa4 = by_name["own_fa4", False]
    assert fa4.measured is fa4.holds is fa4.peer_median is None
    assert fa4.ours_median == 1.0
    assert "FA4: " in fa4.note
    for name in ("cuDNN", "flash", "FA4", "FlexAttention"):
        assert f"not there: {name}: " in shown
    assert "comparisons with float64 hold" in shown
    assert shown.splitlines()[-1].startswith("gate ")
    assert status == 1  # 1 is not 20 times faster than eager


def test_a_missing_peer_breaks_no_bar(on_cpu):
    assert _run(*CELL, "--quick", "--only", "own_fa4", "--only", "vitals_cost") == 0


def test_our_own_missing_kernel_falls_short(on_cpu, monkeypatch, capsys):
    monkeypatch.setattr(ours, "HOPPER", "no such backend")
    assert _run(*CELL, "--quick", "--only", "vitals_alone") == 1
    assert "not there: vitals: ArgumentError: backend='no such backend'" in capsys.readouterr().out


def test_a_red_gate_ends_with_2_and_nothing_is_timed(on_cpu, monkeypatch, capsys):
    right = ours.functional.attention

    def wrong(*args, **kwargs):
        return right(*args, **kwargs) * 1.1

    monkeypatch.setattr(ours.functional, "attention", wrong)
    monkeypatch.setattr(OnGpu, "measure", lambda *_: pytest.fail("timed on a red gate"))
    assert _run(*CELL, "--quick", "--only", "own_cudnn") == 2
    assert "gate is red" in capsys.readouterr().out


def test_json_has_the_columns_of_a_gpu(on_cpu, capsys):
    _run(*CELL, "--quick", "--only", "own_fa4", "--json", "--commit", "abc")
    first, *_ = json.loads(capsys.readouterr().out)["rows"]
    assert list(first) == results.GPU_HEADER
    assert first["commit"] == "abc"
    assert first["measured"] is None


@pytest.mark.parametrize(
    ("folder", "file"), [(True, "benchmarks/results/gpu.csv"), (False, "scaledot-bench-gpu.csv")]
)
def test_where_rows_go(on_cpu, folder, file):
    if folder:
        Path("benchmarks/results").mkdir(parents=True)
    _run(*CELL, "--repeats", "1", "--only", "vitals_memory")
    assert [str(path) for path in Path().rglob("*.csv")] == [file]


def test_rows_of_a_gpu_do_not_go_into_a_file_of_a_cpu(on_cpu, capsys):
    Path("cpu.csv").write_text(",".join(results.HEADER) + "\n")
    assert _run(*CELL, "--out", "cpu.csv") == 2
    assert "missing: gpu, driver" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--width", "64"], "--width and --length choose among the shapes of --gpu"),
        (["--only", "own_cudnn"], "--only own_cudnn is no case without --gpu"),
    ],
)
def test_options_of_a_gpu_need_it(arguments, words, capsys):
    assert cli.main(["bench", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_case_of_a_cpu_is_none_of_a_gpu(on_cpu, capsys):
    assert _run("--only", "tiny_call") == 2
    assert "--only tiny_call is no case with --gpu" in capsys.readouterr().err


def test_another_shape_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        _run("--width", "96")
    assert ended.value.code == 2
    assert "96" in capsys.readouterr().err
