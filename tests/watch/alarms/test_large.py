"""The larger runs of the study, in toys on a CPU: the same path as on a GPU."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

STUDY = Path(__file__).parents[3] / "benchmarks" / "alarms"
COLUMNS = ["parameters", "device", "torch"]  # beside those of the small runs


@pytest.fixture(scope="module", autouse=True)
def _study_on_path():
    sys.path.insert(0, str(STUDY))
    yield
    sys.path.remove(str(STUDY))


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    """The rows of two runs, and the folder where they and their twins are recorded."""
    import large

    folder = tmp_path_factory.mktemp("recorded")
    jobs = large.jobs(large.TOYS, "cpu")
    return {job: large.row_with_machine(job, folder) for job in jobs}, folder


@pytest.mark.nightly
def test_a_run_and_its_twins_become_a_row(toys):
    import rates
    import runs

    rows, folder = toys
    assert len(rows) == 2
    # They are not recorded by samples.
    small = rates.read(STUDY.parent / "results" / "alarms.csv")[0]
    small = [name for name in small if not name.endswith("_sampled")]
    for job, row in rows.items():
        assert list(row) == [*small, *COLUMNS]
        assert row["set"] == "judged"
        assert row["parameters"] == 2 * 12 * 16**2 + (2 * 2 + 1) * 16 + 2 * 16 * vocabulary()
        assert row["trainings"] == 2
        run = runs.recorded(job.setup, folder)
        assert np.isfinite(run.losses).all()
        assert len(run.norms) == job.setup.steps
    adamw, muon = rows.values()
    assert (adamw["remedy"], muon["remedy"]) == ("qk-clip:30", "sqrt_dk")


def vocabulary() -> int:
    from scaledot.lab.training import python_topics

    return len(set(python_topics()))


@pytest.mark.nightly
def test_the_twins_scores_are_held_by_the_remedy(toys):
    import runs

    rows, folder = toys
    setup = next(iter(rows)).setup
    plain = runs.recorded(setup, folder).vital("max_logit")
    held = runs.recorded(replace(setup, clip=runs.CLIP), folder).vital("max_logit")
    first = int(np.argmax(plain.max(1) > runs.CLIP))
    np.testing.assert_array_equal(plain[: first + 1], held[: first + 1])
    assert held[first + 1 :].max() < plain[first + 1 :].max() / 2


def test_the_remedy_holds_a_run_as_the_studys_own_clip_does(monkeypatch):
    import clips
    import runs

    class ByRemedy(clips.Clip):
        def __init__(self, watch, model, limit, by_remedy):
            super().__init__(watch, model, limit, by_remedy=not by_remedy)

    setup = runs.Setup(width=16, heads=2, tokens=16, batch=2, steps=20, rate=0.2, clip=3.0)
    own = runs.train(setup)
    monkeypatch.setattr(runs, "Clip", ByRemedy)
    remedied = runs.train(setup)
    assert own.vital("max_logit").max() > 3.0
    np.testing.assert_allclose(remedied.losses, own.losses, rtol=1e-5)


def test_a_twin_that_was_not_held_is_no_twin(monkeypatch):
    import runs

    from scaledot.watch.remedies import discover

    monkeypatch.setattr(discover, "layers", lambda inputs, names: {})
    setup = runs.Setup(
        width=16, heads=2, tokens=16, batch=2, steps=2, rate=0.2, clip=0.1, large=True
    )
    with pytest.raises(RuntimeError, match="scores were not held: a second forward pass did not"):
        runs.train(setup)


def test_a_run_that_is_recorded_by_samples_is_the_same_training(tmp_path):
    import runs

    small = runs.Setup(layers=2, width=16, heads=2, tokens=32, batch=4, steps=6, warm_up=2)
    whole, sampled = (runs.recorded(small, tmp_path, sampled=by) for by in (False, True))
    assert np.array_equal(whole.losses, sampled.losses)
    assert whole.final == sampled.final
    rows = runs.COUNT_FIELDS.index("rows")
    assert (whole.counts[:, :, rows] == 4 * 32).all()
    assert (sampled.counts[:2, :, rows] == 4 * 32).all()  # the first steps are read whole
    assert (sampled.counts[2:, :, rows] == 32).all()
    assert len(list(tmp_path.iterdir())) == 2


def test_recordings_of_the_small_runs_keep_their_names():
    import runs

    assert runs.Setup().name == "1af64a61866f3851"
    assert runs.Setup(task="repeat").name == "2b3f1e8042d89a2a"
    names = {runs.Setup(**more).name for more in ({}, {"large": True}, {"device": "cuda"})}
    assert len(names) == 3


@pytest.mark.nightly
def test_the_command_trains_in_workers_and_writes_every_row(toys, tmp_path):
    rows, folder = toys
    csv = tmp_path / "rows.csv"
    done = command("--device", "cpu", "--csv", csv, "--recorded", folder, "--workers", "1")
    assert done.returncode == 0, done.stderr
    assert "2 of 2 runs in" in done.stdout
    lines = csv.read_text().splitlines()
    assert lines[1:] == [",".join(quoted(value) for value in row.values()) for row in rows.values()]


def quoted(value) -> str:
    return f'"{value}"' if "," in str(value) else str(value)


@pytest.mark.nightly
def test_without_a_gpu_the_command_says_so_in_a_sentence():
    import torch

    if not torch.cuda.is_available():
        assert "--large needs a CUDA device, and there is none" in command().stderr
    assert "say where their rows go: --csv FILE" in command("--device", "cpu").stderr


def command(*flags):
    return subprocess.run(
        [sys.executable, STUDY / "study.py", "--large", *flags],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={"PYTHONPATH": str(STUDY.parents[1] / "src"), "OMP_NUM_THREADS": "1"},
    )


def test_runs_are_taken_from_all_families_in_turn_and_written_in_their_order():
    import large

    jobs = large.jobs(large.FAMILIES, "cuda")
    assert [job.family for job in jobs[:4]] == list(large.FAMILIES)
    assert len(jobs) == sum(len(family.setups()) for family in large.FAMILIES) == 20
    assert not any(family.tunes for family in large.FAMILIES)
    ordered = large.in_order(reversed(jobs))
    expected = [
        (family.name, setup.seed, setup.rate)
        for family in large.FAMILIES
        for setup in family.setups()
    ]
    assert [(job.family.name, job.setup.seed, job.setup.rate) for job in ordered] == expected


@pytest.mark.nightly
def test_a_run_that_fails_costs_its_row_only(toys, monkeypatch, tmp_path, capsys):
    import large

    job, row = list(toys[0].items())[-1]
    results = [(next(iter(toys[0])), RuntimeError("no twin")), (job, row)]
    monkeypatch.setattr(large, "_results", lambda *_: iter(results))
    csv = tmp_path / "rows.csv"
    assert large.study("cpu", tmp_path, 1, csv) == 1
    assert "AdamW at 0.3, seed 0 failed: RuntimeError: no twin" in capsys.readouterr().out
    assert len(csv.read_text().splitlines()) == 2
