"""`scaledot bench --watch`. Nothing here asserts a time."""

import argparse
import json
from pathlib import Path

import pytest
import torch

from scaledot import bench
from scaledot.bench import results, watch
from scaledot.bench.clock import Samples
from scaledot.bench.watch import turns
from scaledot.bench.watch.model import Shape, Trainer
from scaledot.bench.watch.turns import Times

TINY = Shape(batch=2, tokens=7, layers=3, heads=2, width=4)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def timed(monkeypatch):
    """A race that ends as it is told, without a step being timed."""

    def tell(**milliseconds: float) -> None:
        usual = {"plain": 100, "quiet": 100, "measured": 110, "attention": 20, "forward": 5}
        told = {**usual, **milliseconds}
        cadence = told.pop("cadence", 20)

        def answered(shape, rounds, steps, after_round):
            for _ in range(rounds):
                after_round()
            sides = {name: Samples((float(value),) * rounds) for name, value in told.items()}
            return Times(**sides, cadence=cadence)

        monkeypatch.setattr(watch, "race", answered)

    return tell


def _run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.run(parser.parse_args(["--watch", *arguments]))


# From arguments to exit status


def test_a_quick_try_from_end_to_end(capsys):
    assert _run("--quick", "--repeats", "2", "--out", "quick.csv") == 0
    rows = results.read(Path("quick.csv"))
    assert [row.case for row in rows] == ["watch_default", *["watch_every_step"] * 3]
    assert all(row.bar is None and row.holds is None for row in rows)
    assert all(row.repeats == 2 and (row.peer_median or 0) > 0 for row in rows)
    assert "4 rows appended to quick.csv" in capsys.readouterr().out


def test_cheap_enough_ends_with_0(timed, capsys):
    timed()  # 10 / 20 of 100 ms is 0.5 %, and 10 of 20 ms is half of attention's own time
    assert _run() == 0
    rows = results.read(Path("scaledot-bench-watch.csv"))
    assert [row.measured for row in rows] == pytest.approx([0.005, 0.5, 2, 0.1])
    assert [str(row.bar or "") for row in rows] == ["<= 0.01", "<= 1.5", "", ""]
    assert [row.holds for row in rows] == [True, True, None, None]
    assert "to the bit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("told", "holds"),
    [
        ({"cadence": 9}, [False, True]),  # looks too often
        ({"quiet": 102}, [False, True]),  # a step it does not look at costs too much
        ({"measured": 131, "cadence": 100}, [True, False]),
    ],
)
def test_too_dear_ends_with_1(timed, told, holds):
    timed(**told)
    assert _run("--out", "watch.csv") == 1
    rows = results.read(Path("watch.csv"))
    assert [row.holds for row in rows[:2]] == holds


def test_rows_go_to_the_results_of_the_repository(timed):
    timed()
    bench.RESULTS.mkdir(parents=True)
    assert _run() == 0
    assert _run() == 0
    assert len(results.read(bench.RESULTS / "watch.csv")) == 8


def test_json_alone_on_standard_output(timed, capsys):
    timed()
    assert _run("--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["red"] == []
    assert data["rows"][0]["peer"] == watch.STEP


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
    assert watch.red(TINY) == []
    monkeypatch.setattr(watch.Watch, "saw", lambda self, seen: None)
    (words,) = watch.red(TINY)
    assert "does not see all 3 layers" in words


@pytest.mark.parametrize(
    "option", [["--gpu"], ["--only", "attention"], ["--width", "64"], ["--length", "1024"]]
)
def test_options_of_other_cases_are_refused(option, capsys):
    assert _run(*option) == 2
    assert f"leave out {option[0]}" in capsys.readouterr().err


def test_a_spread_wider_than_the_bar_is_said():
    plan = watch.Plan(TINY, rounds=3)
    steady = Samples((100.0, 100.0, 100.0))
    noisy = Samples((80.0, 101.0, 120.0))
    for quiet, words in ((steady, False), (noisy, True)):
        default, *_ = watch.outcomes(Times(steady, quiet, quiet, steady, steady, 20), plan)
        assert bool(watch.unresolved(default)) is words
    default, *_ = watch.outcomes(
        Times(steady, noisy, noisy, steady, steady, 20), plan._replace(judged=False)
    )
    assert watch.unresolved(default) == ""


# The race


def test_a_race_gives_one_sample_a_round():
    rounds = []
    times = turns.race(TINY, 2, 1, lambda: rounds.append(1))
    assert len(rounds) == 2
    for side in times[:5]:
        assert len(side.values) == 2
        assert min(side.values) > 0
    assert times.cadence >= 1


def test_a_step_at_the_default_cadence_is_made_of_both_kinds():
    ones = Samples((1.0,))
    times = Times(ones, Samples((2.0,)), Samples((6.0,)), ones, ones, cadence=4)
    assert times.default.values == (3.0,)


def test_the_cadence_is_counted_in_whole_cycles(monkeypatch, tmp_path):
    monkeypatch.setattr(turns, "Watch", lambda model, store: _Every(7))
    assert turns.chosen_cadence(_Counting(TINY), tmp_path / "run.vitals") == 7


def test_a_watch_that_hardly_looks_is_not_waited_for(monkeypatch, tmp_path):
    monkeypatch.setattr(turns, "Watch", lambda model, store: _Every(turns.LONGEST))
    counting = _Counting(TINY)
    assert turns.chosen_cadence(counting, tmp_path / "run.vitals") == turns.LONGEST


def test_the_slow_calls_do_not_count(monkeypatch):
    seconds = iter([0.010, 0.011, 0.5, 0.6, 0.7, 0.8])
    monkeypatch.setattr(turns.clock, "wall_seconds", lambda call, calls: next(seconds))
    made = []
    assert turns.fast(lambda: made.append(1), 6) == pytest.approx(0.011)
    assert made == [1]  # the one before the clock


def test_both_trainers_of_a_shape_are_the_same_and_learn():
    before = torch.get_rng_state()
    one, other = Trainer(TINY), Trainer(TINY)
    losses = [one.step() for _ in range(20)]
    assert losses == [other.step() for _ in range(20)]
    assert losses[-1] < losses[0]
    assert torch.equal(torch.get_rng_state(), before)


class _Every:
    """A watch whose looks are at steps 0, 1 and every so many."""

    running: "_Every"

    def __init__(self, every: int) -> None:
        self.every, self.step_number, self.cadence = every, 0, self
        _Every.running = self

    @property
    def due(self) -> bool:
        return self.step_number < 2 or self.step_number % self.every == 0

    def __enter__(self) -> "_Every":
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _Counting(Trainer):
    def step(self) -> float:
        _Every.running.step_number += 1
        return 0.0


def _refuse(*_):
    raise AssertionError("timed on a red gate")
