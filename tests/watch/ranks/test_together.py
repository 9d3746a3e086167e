"""Ranks that are not alike: what they know, when they look, who writes."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import spawn
from torch import distributed as dist
from torch import nn
from watched_ranks import (
    STEPS,
    Lines,
    alone,
    assert_equal_readings,
    data,
    data_parallel,
    loss_of,
    made,
    watched,
)

from scaledot import Watch
from scaledot.watch.ranks import meeting
from scaledot.watch.store import RunReader


@pytest.mark.nightly
@pytest.mark.slow
def test_ranks_that_differ(tmp_path):
    spawn(_differing, 2, str(tmp_path))
    assert sorted(path.name for path in tmp_path.glob("*.vitals")) == [
        "apart.rank1.vitals",
        "apart.vitals",
        "run.vitals",
    ]
    run = RunReader(tmp_path / "run.vitals")
    assert run.attributes.more["ranks"]["world"] == 2
    assert run.attributes.more["ranks"]["collectives_a_reading"] == 1
    assert run.attributes.more["ranks"]["bytes_a_reading"] > 2 * 64
    assert run.layers() == {"layers.0.attn": 6, "layers.1.attn": 6}
    assert len(run.segments()) == 1


def _differing(rank, world, folder):
    _one_file_and_the_mean_loss(rank, world, Path(folder))
    _files_of_their_own(rank, Path(folder))
    _a_rank_without_attention(rank)
    _unequal_layers(rank)
    _rank_0_evaluates_alone(rank)
    _a_slow_rank_and_a_budget(rank)
    _a_loss_that_is_no_number(rank)
    _missing(rank)


def _one_file_and_the_mean_loss(rank, world, folder):
    scalars = []

    class Numbers:
        def write(self, readings, numbers):
            scalars.extend(numbers)

    with Watch(every=1, store=folder / "run.vitals", sinks=[Numbers()]) as watch:
        losses = data_parallel(made(), rank, world)
    assert watch.silent == (rank != 0)
    everybodys = [None] * world
    dist.all_gather_object(everybodys, losses)
    if rank == 0:
        kept = [one.value for one in scalars if one.name == "loss"]
        np.testing.assert_allclose(kept, np.mean(everybodys, 0), rtol=1e-6)
        assert {one.name for one in scalars} >= {"loss", "learning_rate", "step_time"}
    else:
        assert not scalars


def _files_of_their_own(rank, folder):
    with Watch(every=1, store=folder / "apart.vitals", ranks="apart") as watch:
        data_parallel(made(), 0, 1, steps=1)
    assert not watch.silent
    assert watch.ranks.collectives == 0


def _a_rank_without_attention(rank):
    def train():
        if rank == 0:
            return data_parallel(made(), 0, 1)
        optimizer = torch.optim.SGD((model := nn.Linear(3, 3)).parameters(), lr=0.0)
        for _ in range(STEPS):
            model(torch.ones(3)).sum().backward()
            optimizer.step()
        return []

    found, _, watch = watched(train)
    assert watch.ranks.apart == ""
    if rank == 0:
        assert_equal_readings(found, alone(data_parallel))
    assert {key.layer for key in watch.latest} == {"layers.0.attn", "layers.1.attn"}


def _unequal_layers(rank):
    found, _, watch = watched(lambda: data_parallel(made(2 + rank), 0, 1))
    assert watch.ranks.apart == ""
    rows = {key.layer: int(one.value("rows")[0]) for key, one in watch.latest.items()}
    assert rows == {"layers.0.attn": 70, "layers.1.attn": 70, "layers.2.attn": 35}
    if rank == 0:
        assert {one.layer for one in found if one.step == 0} == set(rows)


def _rank_0_evaluates_alone(rank):
    model = made()

    def train():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(STEPS):
            loss_of(model(data(step)), data(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0 and step % 2:
                with torch.no_grad():
                    model(data(step))

    found, _, watch = watched(train, every=3)
    assert watch.ranks.apart == ""
    assert watch.ranks.readings == 4  # of steps 0, 3 and 6, and at the end
    if rank == 0:
        kept = {phase: [one for one in found if one.phase == phase] for phase in ("train", "eval")}
        assert {one.step for one in kept["train"]} == {0, 3, 6}
        assert all(one.value("rows").tolist() == [70] * 6 for one in kept["train"])
        assert kept["eval"]
        assert all(one.value("rows").tolist() == [35] * 6 for one in kept["eval"])


def _a_slow_rank_and_a_budget(rank):
    due = []

    def train():
        model = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for step in range(60):
            if watch.cadence.due:
                due.append(watch.cadence.step)
            if rank:
                time.sleep(0.004)
            loss_of(model(data(step)), data(step)).backward()
            optimizer.step()

    with Watch(store=(found := []), budget=0.2, alarms=False) as watch:
        train()
    everybodys = [None, None]
    dist.all_gather_object(everybodys, due)
    assert everybodys[0] == everybodys[1]
    assert due[:2] == [0, 1]
    assert 2 < len(due) < 60
    assert watch.ranks.apart == ""
    assert watch.ranks.readings in (len(due), len(due) + 1)
    if rank == 0:
        assert {one.step for one in found} == set(due)


def _a_loss_that_is_no_number(rank):
    """On one rank; all of them hear of it, and go on together."""

    def train():
        optimizer = torch.optim.SGD((model := made()).parameters(), lr=0.0)
        for step in range(STEPS):
            lost = float("nan") if rank and step == 1 else 1.0
            (loss_of(model(data(step)), data(step)) * lost).backward()
            optimizer.step()

    _, _, watch = watched(train)
    assert [(one.kind, one.step) for one in watch.guard.crashes] == [("loss", 1)]
    assert watch.ranks.apart == ""
    assert watch.ranks.readings == STEPS + 1


def _missing(rank):
    """Who does not take part, or not to the end."""
    lines = Lines()
    patience, meeting.PRESENCE = meeting.PRESENCE, 0.5
    _no_watch_on_rank_1(rank, lines)
    meeting.PRESENCE = patience
    dist.barrier()
    lines.lines.clear()
    _another_interval_on_rank_1(rank, lines)
    dist.barrier()
    lines.lines.clear()
    _a_watch_that_ends_sooner(rank, lines)


def _no_watch_on_rank_1(rank, lines):
    if rank:
        return
    found, _, watch = watched(lambda: data_parallel(made(), 0, 1))
    assert_equal_readings(found, alone(data_parallel))
    assert len(lines.lines) == 1, lines.lines
    assert "rank 0 of 2 watches for itself alone: rank 1 came with no watch" in lines.lines[0]
    assert not watch.silent


def _another_interval_on_rank_1(rank, lines):
    found, _, watch = watched(lambda: data_parallel(made(), 0, 1, steps=12), every=2 + rank)
    words = "the ranks are out of step: rank 0 is at step 2, rank 1 at step 3"
    assert words in watch.ranks.apart, watch.ranks
    if rank == 0:
        assert len(lines.lines) == 1, lines.lines
        assert (
            f"goes on without the other ranks: {words}; readings from step 2 on" in lines.lines[0]
        )
        steps = [one.step for one in found]
        assert steps == [0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10], steps
        assert [int(one.value("rows")[0]) for one in found] == [70] * 2 + [35] * 10
    else:
        assert (lines.lines, found) == ([], [])


def _a_watch_that_ends_sooner(rank, lines):
    found, *_ = watched(lambda: data_parallel(made(), 0, 1, steps=20 - 12 * rank))
    if rank == 0:
        assert len(lines.lines) == 1, lines.lines
        assert "the watch of rank 1 has ended" in lines.lines[0], lines.lines
        assert len(found) == 2 * 20
        assert found[0].value("rows").tolist() == [70] * 6
        assert found[-1].value("rows").tolist() == [35] * 6
    else:
        assert lines.lines == []
