"""`scaledot bench --watch`: the command, the race, the intervals."""

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from scaledot import bench
from scaledot.bench import watch
from scaledot.bench.watch import interval, laps, rows, turns
from scaledot.bench.watch.model import BERT_TINY, GPT2_SMALL, NANO_GPT, Shape, Trainer
from scaledot.bench.watch.turns import Times

TINY = Shape("tiny", batch=2, tokens=7, layers=3, heads=2, width=4, vocabulary=11)
PLAN = watch.Plan(TINY, rounds=2, steps=1, longest=20)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def told(cadence: float = 20.0, spread: float = 0.0, rounds: int = 9, **milliseconds: float):
    """Times as a race gives them."""
    usual = {"plain": 100.0, "quiet": 100.0, "measured": 110.0, "attention": 20.0}
    usual |= {"sampled": 105.0}
    usual |= {"small_plain": 5.0, "small_quiet": 5.1}
    noise = np.linspace(-spread, spread, rounds)
    sides = {
        name: value + (noise if name in ("measured", "sampled") else 0.0 * noise)
        for name, value in (usual | milliseconds).items()
    }
    return Times({"cpu": sides, "wall": sides}, cadence)


@pytest.fixture
def timed(monkeypatch):
    """A race that ends as it is told, without a step being timed; and small models."""
    monkeypatch.setattr(watch, "NANO_GPT", TINY)
    monkeypatch.setattr(watch, "BERT_TINY", TINY)

    def tell(**options) -> None:
        def answered(trainer, rounds, steps, longest, after_round):
            for _ in range(rounds):
                after_round()
            return told(**options)

        monkeypatch.setattr(watch, "race", answered)

    return tell


def _run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.run(parser.parse_args(["--watch", *arguments]))


def _values(found: list[rows.Row], clock: str = "cpu") -> dict[str, float]:
    return {row.case: row.value for row in found if row.clock == clock}


# From arguments to exit status


@pytest.mark.nightly
def test_a_quick_try_from_end_to_end(capsys):
    assert _run("--quick", "--repeats", "2", "--out", "quick.csv") == 0
    found = rows.read(Path("quick.csv"))
    cases = ["default cadence", "every step", "every step, of the step", "a sample, of the step"]
    cases += ["quiet step", "quiet step of 1 ms"]
    assert [row.case for row in found] == 2 * cases
    assert [row.clock for row in found] == 6 * ["cpu"] + 6 * ["wall"]
    assert all(row.verdict == "reported" and row.rounds == 2 for row in found)
    assert all(row.low <= row.high and row.step_ms > 0 and row.attention_ms > 0 for row in found)
    assert "12 rows appended to quick.csv" in capsys.readouterr().out


def test_cheap_enough_ends_with_0(timed, capsys):
    timed()
    assert _run() == 0
    found = rows.read(Path("scaledot-bench-watch.csv"))
    # A quiet step costs 0.1 of 100 ms, a sample 5 ms, one in twenty.
    assert _values(found) == pytest.approx(
        {
            "default cadence": 0.0035,
            "every step": 0.5,
            "every step, of the step": 0.1,
            "a sample, of the step": 0.05,
            "quiet step": 0.0,
            "quiet step of 1 ms": 0.1,
        }
    )
    verdicts = {row.case: (row.bar, row.verdict) for row in found if row.clock == "cpu"}
    assert verdicts["default cadence"] == ("<= 0.01", "holds")
    assert verdicts["every step"] == ("<= 1.5", "holds")
    assert {row.verdict for row in found if row.clock == "wall"} == {"reported"}
    out = capsys.readouterr().out
    assert "to the bit" in out
    assert "of the time its attention takes, forward and backward" in out


@pytest.mark.parametrize(
    ("options", "short"),
    [
        ({"cadence": 4}, "default cadence"),  # looks too often
        ({"small_quiet": 6.0}, "default cadence"),  # a step it does not look at costs too much
        ({"measured": 131.0, "cadence": 100}, "every step"),
    ],
)
def test_too_dear_ends_with_1(timed, options, short):
    timed(**options)
    assert _run("--out", "watch.csv") == 1
    found = rows.read(Path("watch.csv"))
    assert {row.case for row in found if row.verdict == "falls short"} == {short}


def test_an_interval_across_the_bar_is_undecided(timed, capsys):
    timed(spread=60.0, cadence=15)
    assert _run("--out", "watch.csv") == 0
    found = rows.read(Path("watch.csv"))
    assert found[0].verdict == "undecided"
    assert found[0].low < 0.01 < found[0].high
    assert "more --repeats" in capsys.readouterr().out


def test_rows_go_to_the_results_of_the_repository(timed, capsys):
    timed()
    bench.RESULTS.mkdir(parents=True)
    assert _run() == 0
    assert _run() == 0
    file = bench.RESULTS / "watch.csv"
    assert len(rows.read(file)) == 48
    capsys.readouterr()
    assert _run("--table", str(file)) == 0
    printed = capsys.readouterr().out
    assert printed.count("| default cadence |") == 2  # the last of each clock
    assert "forward and backward" in printed


def test_another_file_is_not_appended_to(capsys):
    Path("cpu.csv").write_text("date,commit\n")
    assert _run("--quick", "--out", "cpu.csv") == 2
    assert "--out" in capsys.readouterr().err
    assert Path("cpu.csv").read_text() == "date,commit\n"


def test_json_alone_on_standard_output(timed, capsys):
    timed()
    assert _run("--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["red"] == []
    assert data["rows"][1]["meaning"] == watch.EVERY_MEANS


def test_a_watch_that_changes_the_training_is_not_timed(monkeypatch, capsys):
    class Meddling(watch.Watch):
        def __init__(self, model, **options):
            super().__init__(model, **options)
            with torch.no_grad():
                model.head.weight.mul_(1.01)

    monkeypatch.setattr(watch, "Watch", Meddling)
    monkeypatch.setattr(watch, "race", _refuse)
    assert _run("--quick", "--out", "watch.csv") == 2
    assert "the watch changes the losses" in capsys.readouterr().out
    assert not Path("watch.csv").exists()


def test_a_layer_that_is_not_seen_is_red(monkeypatch):
    assert watch.red(PLAN) == []
    monkeypatch.setattr(watch.Watch, "saw", lambda self, seen: None)
    (words,) = watch.red(PLAN)
    assert "does not see all 3 layers" in words


@pytest.mark.parametrize(
    "option", [["--gpu"], ["--only", "attention"], ["--width", "64"], ["--length", "1024"]]
)
def test_options_of_other_cases_are_refused(option, capsys):
    assert _run(*option) == 2
    assert f"leave out {option[0]}" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused(capsys):
    assert _run("--device", "cuda") == 2
    assert "GPU" in capsys.readouterr().err


def test_device_belongs_to_the_watch(capsys):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    assert bench.run(parser.parse_args(["--device", "cpu"])) == 2
    assert "--device is for --watch" in capsys.readouterr().err


# Plans


def test_the_plans_are_the_models_of_the_bars():
    assert [plan.shape for plan in watch.plans("cpu")] == [NANO_GPT, BERT_TINY]
    (gpu,) = watch.plans("cuda")
    assert (gpu.shape, gpu.device) == (GPT2_SMALL, "cuda")
    assert (GPT2_SMALL.layers, GPT2_SMALL.heads * GPT2_SMALL.width, GPT2_SMALL.tokens) == (
        12,
        768,
        4096,
    )
    assert watch.plans("cuda", rounds=3)[0].rounds == 3


def test_on_a_gpu_the_bars_are_of_the_step():
    """The same function that judges a CPU, on times as a GPU gives them."""
    sides = {"plain": 100.0, "quiet": 100.1, "measured": 130.0, "attention": 30.0, "replaced": 102}
    sides |= {"sampled": 110.0}
    times = {name: np.full(5, value) for name, value in sides.items()}
    found = watch.findings(
        Times({"device": times, "wall": times}, 25.0), watch.Plan(GPT2_SMALL, "cuda")
    )
    judged = {one.case: (one.found.value, one.verdict) for one in found if one.bar is not None}
    assert judged == {
        "default cadence": (pytest.approx(0.005), "holds"),
        "every step, replace=True": (pytest.approx(0.02), "holds"),
    }
    assert {one.clock for one in found if one.bar is not None} == {"device"}


# The race


@pytest.mark.nightly
def test_a_race_gives_one_value_a_round_of_every_side_and_clock():
    ended = []
    times = turns.race(Trainer(TINY), 2, 1, 20, lambda: ended.append(1))
    assert len(ended) == 2
    names = {"plain", "quiet", "measured", "sampled", "attention", "small_plain", "small_quiet"}
    assert set(times.by_clock) == {"cpu", "wall"}
    for sides in times.by_clock.values():
        assert set(sides) == names
        assert all(len(values) == 2 and min(values) > 0 for values in sides.values())
    assert times.cadence >= 1


@pytest.mark.nightly
def test_replace_is_timed_where_a_gpu_would_be(monkeypatch):
    """The path of a GPU, with the processor in its place."""
    monkeypatch.setattr(turns, "laps", lambda call, calls, device: laps.laps(call, calls, "cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    trainer = Trainer(TINY)
    trainer.device = "cuda"
    times = turns.race(trainer, 1, 1, 5)
    names = {"plain", "quiet", "measured", "sampled", "attention", "replaced"}
    assert set(times.by_clock["cpu"]) == names


def test_events_of_a_gpu_become_milliseconds(monkeypatch):
    class Event:
        clock = 0.0

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = Event.clock

        def elapsed_time(self, later):
            return later.at - self.at

    def step() -> None:
        Event.clock += 7.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found = laps.laps(step, 3, "cuda")
    assert [lap["device"] for lap in found] == [7.0, 7.0, 7.0]
    assert len({lap["wall"] for lap in found}) == 1


def test_a_round_goes_there_and_back(monkeypatch):
    order = []

    def side(name):
        return lambda: order.append(name) or [{"cpu": 1.0}, {"cpu": 5.0}]

    found = turns._rounds({name: side(name) for name in "abc"}, 2, lambda: None)
    assert "".join(order) == "abccba" + "bcaacb"
    assert found["cpu"]["a"].tolist() == [1.0, 1.0]  # the lower quartile of 1, 5, 1, 5


def test_the_cadence_is_that_of_the_long_run(monkeypatch, tmp_path):
    monkeypatch.setattr(turns, "Watch", lambda model, store: _Every(7))
    assert turns.chosen_cadence(_Counting(TINY), tmp_path / "run.vitals", 300) == 7
    assert _Every.running.step_number < 300


def test_a_watch_that_hardly_looks_is_not_waited_for(monkeypatch, tmp_path):
    monkeypatch.setattr(turns, "Watch", lambda model, store: _Every(300))
    assert turns.chosen_cadence(_Counting(TINY), tmp_path / "run.vitals", 30) == 300
    assert _Every.running.step_number == 30


def test_a_cpu_is_timed_with_one_thread():
    before = torch.get_num_threads()
    with turns.one_thread("cpu"):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("classes", [0, 2])
def test_both_trainers_of_a_shape_are_the_same_and_learn(classes):
    shape = Shape("tiny", 2, 7, 3, 2, 4, vocabulary=11, classes=classes)
    before = torch.get_rng_state()
    one, other = Trainer(shape), Trainer(shape)
    losses = [float(one.step()) for _ in range(20)]
    assert losses == [float(other.step()) for _ in range(20)]
    assert losses[-1] < losses[0]
    assert torch.equal(torch.get_rng_state(), before)
    one.attend()


def test_half_precision_is_autocast():
    trainer = Trainer(Shape("tiny", 2, 7, 1, 2, 4, vocabulary=11, dtype="bfloat16"))
    assert torch.isfinite(trainer.step())
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert trainer._qkv[0].dtype == torch.bfloat16
    trainer.attend()


def test_a_shrunken_model_makes_the_same_calls():
    shrunk = BERT_TINY.shrunk()
    assert (shrunk.layers, shrunk.heads, shrunk.classes) == (2, 2, 2)
    assert shrunk.tokens < BERT_TINY.tokens


# Intervals


def test_an_interval_covers_the_truth_about_as_often_as_it_says():
    generator = np.random.default_rng(1)
    inside = 0
    for _ in range(60):
        drift = generator.normal(0, 30, size=25)  # of the machine: the same for both sides
        sides = {
            "plain": 100 + drift + generator.normal(0, 2, 25),
            "watched": 105 + drift + generator.normal(0, 2, 25),
        }
        found = interval.bootstrap(sides, lambda s: s["watched"] - s["plain"])
        inside += found.low <= 5 <= found.high
    assert inside >= 50


def test_an_interval_decides_only_where_all_of_it_agrees():
    assert interval.Interval(1.0, 0.9, 1.1).holds(1.2) is True
    assert interval.Interval(1.0, 0.9, 1.1).holds(0.8) is False
    assert interval.Interval(1.0, 0.9, 1.1).holds(1.05) is None


class _Every:
    """A watch whose looks are at steps 0, 1 and every so many."""

    running: "_Every"

    def __init__(self, every: int) -> None:
        self.steady_every, self.step_number, self.cadence = every, 0, self
        _Every.running = self

    @property
    def due(self) -> bool:
        return self.step_number < 2 or self.step_number % self.steady_every == 0

    def __enter__(self) -> "_Every":
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _Counting(Trainer):
    def step(self) -> torch.Tensor:
        _Every.running.step_number += 1
        return torch.zeros(())


def _refuse(*_):
    raise AssertionError("timed on a red gate")
