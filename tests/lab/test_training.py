"""The training at the end of the demo: its numbers, its file, and what is said of them."""

import argparse
import dataclasses
import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from scaledot.lab import demo, terminal, training, words
from scaledot.lab.character_model import CharacterModel, rotated
from scaledot.lab.training import Size, train
from scaledot.watch import top
from scaledot.watch.store import RunReader

SMALL = Size(steps=7, layers=2, width=12, heads=3, tokens=17, batch=2)
ILL = Size(steps=60, tokens=64, batch=8)  # the demo's model, on shorter pieces


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    with demo._one_thread():
        yield


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("run") / "small.vitals"


@pytest.fixture(scope="module")
def small(file) -> training.Training:
    return train(0, SMALL, file)


@pytest.fixture(scope="module")
def ill() -> training.Training:
    return train(0, ILL)


# The model


def test_a_score_of_rotated_vectors_depends_on_the_distance_alone():
    query, key = torch.randn(2, 1, 1, 1, 6, generator=torch.Generator().manual_seed(0)).double()
    everywhere = torch.zeros(1, 1, 11, 6, dtype=torch.double)
    scores = rotated(everywhere + query) @ rotated(everywhere + key).mT
    for distance in (-3, 0, 5):
        along = scores.diagonal(distance, -2, -1)
        torch.testing.assert_close(along, along[..., :1].expand_as(along), rtol=1e-5, atol=1e-6)
    assert not torch.isclose(scores[..., 0, 0], scores[..., 5, 0])


def test_no_character_sees_the_next():
    model = CharacterModel(29, 2, 12, 3, torch.Generator().manual_seed(0))
    tokens = torch.arange(13)[None]
    changed = tokens.clone()
    changed[0, 7:] += 3
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


# The run


def test_the_same_seed_gives_the_same_run_and_leaves_torchs_generator_alone(small):
    before = torch.get_rng_state()
    assert train(0, SMALL).moments == small.moments
    assert train(1, SMALL).moments != small.moments
    assert torch.equal(torch.get_rng_state(), before)


def test_every_step_and_every_layer_is_read(small):
    assert [moment.step for moment in small.moments] == list(range(SMALL.steps))
    assert small.coverage == "2 of 2 attention layers watched"
    assert 0 < small.watch_cost < 1


def test_the_first_loss_is_that_of_a_guess(small):
    assert small.moments[0].loss == pytest.approx(math.log(small.vocabulary), rel=0.25)


def test_the_heads_close_and_the_loss_raises_no_alarm(ill):
    first, last = ill.moments[0], ill.moments[-1]
    assert (first.closed, ill.loss_alarm) == (0, None)
    assert ill.logits_leave <= last.step
    assert ill.half_closed <= last.step
    assert last.max_logit > 20 * first.max_logit
    assert last.passes < 0.2 * first.passes
    assert last.loss_mean < first.loss_mean - 1


def test_progress_is_told_step_by_step():
    told = []
    train(0, dataclasses.replace(SMALL, steps=3), None, lambda: told.append(1))
    assert len(told) == 3


@pytest.mark.parametrize(
    ("means", "step"),
    [
        ([3.0, 2.0, 2.4, 2.5], None),
        ([3.0, 2.0, 2.4, 2.6, 1.0], 3),
        ([3.0, math.nan], 1),
        ([], None),
    ],
)
def test_a_loss_alarm_rings_half_a_nat_above_the_lowest(means, step):
    assert training.loss_alarm(means) == step


# The file


def test_the_file_holds_what_the_record_says(small, file):
    assert small.store == str(file)
    run = RunReader(file)
    layers = run.layers("train")
    assert list(layers.values()) == [3, 3]
    for name, over_heads in (("max_logit", np.max), ("passes", np.mean)):
        heads = np.concatenate([run.heads(layer, name).values for layer in layers], axis=1)
        wanted = [getattr(moment, name) for moment in small.moments]
        np.testing.assert_allclose(over_heads(heads, axis=1), wanted, rtol=1e-6)
    losses = run.scalars("loss")
    assert losses.steps.tolist() == list(range(SMALL.steps))
    np.testing.assert_allclose(losses.values, [m.loss for m in small.moments], rtol=1e-6)


def test_top_opens_the_file(small, file, capsys):
    parser = argparse.ArgumentParser()
    top.add_arguments(parser)
    assert top.run(parser.parse_args([str(file), "--once"])) == 0
    shown = capsys.readouterr().out
    assert "2 of 2 attention layers watched" in " ".join(shown.split())
    assert "loss" in shown


def test_without_a_folder_to_write_to_the_training_goes_on(small, tmp_path):
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    record = train(0, SMALL, in_the_way / "run.vitals")
    assert record.moments == small.moments
    assert record.store is None
    assert str(in_the_way) in record.no_store
    assert f"left no file: {in_the_way}" in _farewell(record)


def test_a_file_of_another_kind_is_left_as_it_is(tmp_path):
    foreign = tmp_path / "notes.txt"
    foreign.write_text("not a run")
    record = train(0, dataclasses.replace(SMALL, steps=1), foreign)
    assert record.store is None
    assert str(foreign) in record.no_store
    assert foreign.read_text() == "not a run"


# What is shown


@pytest.mark.slow
@pytest.mark.one_case
@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_chapter_fits_its_terminal(ill, width):
    text = _shown(terminal.draw_training(7, ill), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text


def test_the_table_begins_with_the_first_step_and_ends_with_the_last(ill):
    chosen = terminal._chosen(ill.moments)
    assert (chosen[0], chosen[-1]) == (ill.moments[0], ill.moments[-1])
    assert len(chosen) == terminal.SHOWN_MOMENTS
    assert terminal._chosen(ill.moments[:1]) == list(ill.moments[:1])


def test_what_is_said_is_what_was_measured(ill, small):
    vitals, loss = words.training_verdicts(ill)
    assert f"passes 100 at step {ill.logits_leave}" in vitals
    assert f"at step {ill.half_closed} half of the heads are closed" in vitals
    assert "has not rung" in loss
    assert "rang at step 5" in words.training_verdicts(dataclasses.replace(ill, loss_alarm=5))[1]
    assert words.training_verdicts(small)[0] == "No score above 100 within 7 steps."


def test_the_command_to_type_next_names_the_file(small, file, tmp_path, monkeypatch):
    monkeypatch.chdir(file.parent)
    assert "scaledot top small.vitals" in _farewell(small)
    monkeypatch.chdir(tmp_path)
    assert f"scaledot top {file}" in _farewell(small)


def test_json_holds_the_training(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "as_data", lambda seed: {"seed": seed})  # the lessons: test_demo.py
    assert _run("--json", "--steps", "2", "--store", str(tmp_path / "run.vitals")) == 0
    data = json.loads(capsys.readouterr().out)["training"]
    assert [moment["step"] for moment in data["moments"]] == [0, 1]
    assert data["store"] == str(tmp_path / "run.vitals")
    assert data["title"] == words.TRAINING
    assert data["loss_says"].startswith("From ")


def test_no_steps_no_training(monkeypatch, capsys):
    monkeypatch.setattr(demo, "as_data", lambda seed: {"seed": seed})
    assert _run("--json", "--steps", "0") == 0
    assert json.loads(capsys.readouterr().out) == {"seed": 0}


def test_numbers_that_json_does_not_know_become_null():
    assert demo._finite({"a": (1.5, math.inf, [math.nan, "x"])}) == {"a": [1.5, None, [None, "x"]]}


def test_a_number_of_steps_is_a_whole_number(capsys):
    with pytest.raises(SystemExit):
        _run("--steps", "-1")
    assert "is no number of steps; use 0 or more" in capsys.readouterr().err


def _run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return demo.run(parser.parse_args(arguments))


def _farewell(record: training.Training, width: int = 300) -> str:
    return _shown(demo._farewell([], record), width)


def _shown(renderable, width: int) -> str:
    shown = io.StringIO()
    console = Console(file=shown, width=width, markup=False, highlight=False)
    console.print(renderable, width=width)
    return shown.getvalue()
