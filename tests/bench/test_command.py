"""`scaledot bench` from its arguments to its exit status. Nothing here asserts a time."""

import argparse
import dataclasses
import json
from pathlib import Path

import pytest
import torch

from scaledot import bench
from scaledot.bench import cases, ours, outcome, results
from scaledot.bench.bars import Bar
from scaledot.bench.cases import Contender
from scaledot.bench.clock import Samples
from scaledot.bench.outcome import Outcome
from scaledot.bench.workload import Answer


def _run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.run(parser.parse_args(arguments))


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """In an empty folder, with one thread: several test processes share the cores."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # for the processes that are weighed
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def timed(monkeypatch):
    """Ratios told to the bench instead of measured: `timed[name] = ours / peer`."""
    told: dict[str, float] = {}

    def measure(case, repeats, after_round):
        for _ in range(repeats):
            after_round()
        return Outcome(case, Samples((told[case.name],) * repeats), Samples((1.0,) * repeats))

    monkeypatch.setattr(outcome, "measure", measure)
    return told


@pytest.mark.nightly
def test_a_quick_try_from_end_to_end(capsys):
    kinds = ("tiny_call", "attention_with_vitals", "vitals", "vitals_memory", "additive_attention")
    only = [word for kind in kinds for word in ("--only", kind)]
    status = _run("--quick", "--repeats", "1", "--out", "quick.csv", *only)
    shown = capsys.readouterr().out
    rows = results.read(Path("quick.csv"))
    wanted = [case.name for case in cases.on_cpu(quick=True) if case.name in kinds]
    assert [row.case for row in rows] == wanted
    assert set(wanted) == set(kinds)
    assert status == (1 if any(row.holds is False for row in rows) else 0)
    assert "comparisons with float64 hold" in shown
    assert f"{len(rows)} rows appended to quick.csv" in shown
    assert all(row.repeats == 1 and row.ours_median > 0 for row in rows if row.unit == "ms")


def test_every_bar_that_holds_ends_with_0(timed, capsys):
    timed["tiny_call"] = 1.001
    assert _run("--quick", "--only", "tiny_call") == 0
    assert "pass" in capsys.readouterr().out


def test_one_bar_that_falls_short_ends_with_1(timed, capsys):
    timed["tiny_call"] = 1.1  # 100 microseconds more
    assert _run("--quick", "--only", "tiny_call") == 1
    assert "falls short" in capsys.readouterr().out


def test_what_has_no_bar_cannot_fall_short(timed):
    timed["additive_attention"] = 1000.0
    assert _run("--quick", "--only", "additive_attention") == 0


def test_a_red_gate_ends_with_2_and_nothing_is_timed_or_written(monkeypatch, capsys):
    def wrong(inputs):
        return Answer(ours.attention(inputs).out * 1.01, None)

    def refuse(*_):
        raise AssertionError("timed on a red gate")

    injected = dataclasses.replace(
        cases.on_cpu(quick=True)[0], ours=Contender("wrong", wrong), bar=Bar("<=", 1e9)
    )
    monkeypatch.setattr(cases, "on_cpu", lambda quick=False: [injected])
    monkeypatch.setattr(outcome, "measure", refuse)
    assert _run("--out", "cpu.csv") == 2
    shown = capsys.readouterr().out
    assert "gate is red" in shown
    assert "wrong" in shown
    assert not Path("cpu.csv").exists()


def test_what_was_measured_outlives_an_interruption(timed, monkeypatch):
    timed["tiny_call"] = 1.0
    told = outcome.measure

    def interrupted(case, repeats, after_round):
        if case.workload.causal:
            raise KeyboardInterrupt
        return told(case, repeats, after_round)

    monkeypatch.setattr(outcome, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _run("--quick", "--only", "tiny_call", "--out", "cpu.csv")
    assert [row.causal for row in results.read(Path("cpu.csv"))] == [False]


def test_json_alone_on_standard_output(timed, capsys):
    timed["tiny_call"] = 1.1
    assert _run("--quick", "--json", "--only", "tiny_call") == 1
    printed = capsys.readouterr()
    data = json.loads(printed.out)
    assert data["red"] == []
    assert [(row["case"], row["bar"], row["holds"]) for row in data["rows"]] == [
        ("tiny_call", "<= 25", False),
        ("tiny_call", None, None),
    ]
    assert "comparisons" in printed.err


def test_progress_is_drawn_on_a_terminal(timed, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes the output for a terminal
    timed["tiny_call"] = 1.0
    assert _run("--quick", "--only", "tiny_call") == 0
    assert "tiny_call" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("folder", "arguments", "file"),
    [
        (True, [], "benchmarks/results/cpu.csv"),
        (False, [], "scaledot-bench.csv"),
        (True, ["--out", "mine.csv"], "mine.csv"),
        (True, ["--quick"], None),
        (True, ["--quick", "--out", "mine.csv"], "mine.csv"),
    ],
)
def test_where_rows_go(timed, folder, arguments, file):
    if folder:
        Path("benchmarks/results").mkdir(parents=True)
    timed["tiny_call"] = 1.0
    _run("--only", "tiny_call", *arguments)
    written = [str(path) for path in Path().rglob("*.csv")]
    assert written == ([] if file is None else [file])


def test_a_foreign_file_is_refused_before_anything_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(bench, "bench", lambda *_, **__: pytest.fail("measured"))
    Path("foreign.csv").write_text("a,b\n")
    assert _run("--out", "foreign.csv") == 2
    assert "foreign.csv has another header" in capsys.readouterr().err


def test_a_table_is_made_from_the_file_alone(timed, monkeypatch, capsys):
    timed["tiny_call"] = 1.001
    _run("--quick", "--only", "tiny_call", "--out", "cpu.csv")
    capsys.readouterr()
    monkeypatch.setattr(bench, "bench", lambda *_, **__: pytest.fail("measured"))
    assert _run("--table", "cpu.csv") == 0
    assert "| tiny_call | 1x1x8x8 | no |" in capsys.readouterr().out


def test_a_table_from_no_file_says_so(capsys):
    assert _run("--table", "nowhere.csv") == 2
    assert "nowhere.csv" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--only", "atention"], ["--repeats", "0"], ["--repeats", "x"]]
)
def test_wrong_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        _run(*arguments)
    assert ended.value.code == 2
    assert arguments[1] in capsys.readouterr().err


def test_memory_is_never_measured_more_often_than_its_case_says():
    time, memory = (
        next(case for case in cases.on_cpu() if case.measures == kind)
        for kind in ("time", "memory")
    )
    assert [bench._rounds(time, asked) for asked in (None, 2, 50)] == [time.repeats, 2, 50]
    assert [bench._rounds(memory, asked) for asked in (None, 2, 50)] == [3, 2, 3]
