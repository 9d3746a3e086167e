"""A rank that dies or hangs in the middle: the others end, say so, and the store opens."""

import os
import signal
import time

import pytest
import torch
from ranks import spawn
from watched_ranks import Lines, data, loss_of, made

from scaledot import Watch
from scaledot.watch.ranks import meeting
from scaledot.watch.store import RunReader

LAST = 6  # the step in which rank 1 is lost
LONGEST = 3.0  # seconds that a rank is waited for


def test_a_killed_rank_is_named_and_the_other_goes_on(tmp_path):
    path = tmp_path / "run.vitals"
    (found, _) = spawn(_lose_rank_1, 2, str(path), "kill", may_die=(1,))
    _assert_goes_on(found, path)
    assert found["waited"] == 0


@pytest.mark.nightly
def test_a_rank_that_hangs_is_waited_for_once(tmp_path):
    path = tmp_path / "run.vitals"
    (found, _) = spawn(_lose_rank_1, 2, str(path), "hang", may_die=(1,))
    _assert_goes_on(found, path)
    assert found["waited"] == 1


def _assert_goes_on(found, path):
    assert len(found["lines"]) == 1
    assert "the watch goes on without the other ranks: " in found["lines"][0]
    assert "nothing is heard of rank 1; readings from step" in found["lines"][0]
    run = RunReader(path)
    assert [step.step for step in run.steps()] == list(range(20))
    assert "rank 1" in run.attributes.more["ranks"]["apart"]


def _lose_rank_1(rank, world, path, how):
    meeting.LONGEST = LONGEST
    lines, waited = Lines(), 0
    with Watch(every=1, store=path, alarms=False):
        optimizer = torch.optim.SGD((model := made()).parameters(), lr=0.0)
        for step in range(20):
            if rank and step == LAST:
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(7)
                os._exit(0)
            loss_of(model(data(step)), data(step)).backward()
            began = time.monotonic()
            optimizer.step()
            waited += time.monotonic() - began >= LONGEST
    return {"lines": lines.lines, "waited": waited}
