"""`ranks.spawn`, on which the tests over ranks stand: what it returns, how it fails."""

import os
import signal
import time

import pytest
from ranks import spawn
from torch import distributed as dist


def meet(rank, world, word):
    found = [None] * world
    dist.all_gather_object(found, rank)
    return word, rank, found, os.getpid()


def fail_on_rank_1(rank, world):
    if rank == 1:
        print("about to fail")
        raise ValueError("rank 1 is ill")
    dist.barrier()


def die(rank, world):
    os.kill(os.getpid(), signal.SIGKILL)


def sleep_on_rank_1(rank, world):
    time.sleep(600 * rank)
    return "awake"


def test_each_rank_is_a_process_of_one_group():
    first, second = spawn(meet, 2, "hello")
    assert first[:3] == ("hello", 0, [0, 1])
    assert second[:3] == ("hello", 1, [0, 1])
    assert len({first[3], second[3], os.getpid()}) == 3


def test_the_failure_of_one_rank_ends_all_and_is_told_with_what_it_printed():
    words = "(?s)rank 1 of 2 failed.*about to fail.*ValueError: rank 1 is ill"
    with pytest.raises(AssertionError, match=words):
        spawn(fail_on_rank_1, 2)


def test_a_rank_that_is_killed_has_failed():
    with pytest.raises(AssertionError, match="rank 0 of 1 failed"):
        spawn(die, 1)


def test_ranks_that_do_not_end_are_ended():
    with pytest.raises(AssertionError, match="had not ended after 1 s"):
        spawn(sleep_on_rank_1, 2, limit=1.0)


def test_nobody_waits_for_a_rank_that_may_die():
    assert spawn(sleep_on_rank_1, 2, may_die=(1,)) == ["awake", None]
