"""Who writes where."""

from pathlib import Path
from types import SimpleNamespace

import torch
from torch.nn import functional as F

from scaledot import Watch
from scaledot.watch.ranks.files import RankStore, file_of, rank_here
from scaledot.watch.ranks.job import Traffic
from scaledot.watch.store import RunReader


def test_a_process_with_a_rank_that_meets_nobody_has_a_file_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    assert rank_here() == 3
    with Watch(every=1, store=tmp_path / "run.vitals") as watch:
        assert not list(tmp_path.iterdir())
        F.scaled_dot_product_attention(*torch.randn(3, 1, 2, 5, 4))
        watch.step()
    assert [path.name for path in tmp_path.iterdir()] == ["run.rank3.vitals"]
    run = RunReader(tmp_path / "run.rank3.vitals")
    assert [step.step for step in run.steps()] == [0]
    assert "coverage" in run.attributes.more
    assert "ranks" not in run.attributes.more


def test_the_first_rank_has_the_file_that_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with Watch(every=1, store=tmp_path / "run.vitals"):
        assert (tmp_path / "run.vitals").exists()


def test_a_silent_rank_opens_nothing():
    def opened(path):
        raise AssertionError(f"{path} was opened")

    store = RankStore(Path("run.vitals"), opened, SimpleNamespace(silent=True))
    assert store.write(["a reading"], [])
    store.note("a", 1)
    store.write_alarms(["an alarm"])
    assert store.flush()
    store.close()


def test_files_of_processes():
    wish = Path("a/run.vitals")
    assert file_of(wish, 0, main=False) == wish
    assert file_of(wish, 2, main=True) == Path("a/run.rank2.vitals")


def test_the_ranks_in_words():
    assert Traffic(1, 0, False).words() == ""
    job = Traffic(4, 0, True, 9, 12, 5000, 1, 1456)
    assert job.words() == "4 ranks, 1 collective of 1,456 bytes a reading"
    assert job.note() == {"world": 4, "bytes_a_reading": 1456, "collectives_a_reading": 1}
    gone = job._replace(apart="rank 2 is gone")
    assert gone.words() == "4 ranks, each by itself: rank 2 is gone"
    assert gone.note()["apart"] == "rank 2 is gone"
