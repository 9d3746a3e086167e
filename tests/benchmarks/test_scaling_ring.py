"""The played ring, against a simulation of another kind, the closed form, and common sense."""

import heapq
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    not (ROOT / "benchmarks/scaling").exists(), reason="benchmarks are not part of this copy"
)


@pytest.fixture
def ring(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.scaling import ring

    return ring


def played_by_events(compute, transfer, buffers):
    """The same ring as a queue of events: whenever something ends, whatever can begin does."""
    ranks, steps = compute.shape
    here = [{0} for _ in range(ranks)]  # steps whose block a rank holds
    used, sent = [set() for _ in range(ranks)], [set() for _ in range(ranks)]
    computing, sending = [False] * ranks, [False] * ranks
    room = [buffers - 1] * ranks  # buffers that are free or not yet promised
    events, now = [], 0.0

    def release(rank, step):
        """A buffer is free again when its block was used and sent on."""
        if step in used[rank] and (step in sent[rank] or step == steps - 1):
            room[rank] += 1

    while True:
        for rank in range(ranks):
            step = len(used[rank])
            if not computing[rank] and step < steps and step in here[rank]:
                computing[rank] = True
                heapq.heappush(events, (now + compute[rank, step], "used", rank, step))
            step, neighbour = len(sent[rank]), (rank + 1) % ranks
            free = room[neighbour] > 0
            if not sending[rank] and step < steps - 1 and step in here[rank] and free:
                sending[rank] = True
                room[neighbour] -= 1
                heapq.heappush(events, (now + transfer[rank], "sent", rank, step))
        if not events:
            break
        now, what, rank, step = heapq.heappop(events)
        if what == "used":
            computing[rank] = False
            used[rank].add(step)
        else:
            sending[rank] = False
            sent[rank].add(step)
            here[(rank + 1) % ranks].add(step + 1)
        release(rank, step)
    assert all(len(done) == steps for done in used)
    return now


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("buffers", [2, 3])
@pytest.mark.parametrize("slow", [0.2, 1.0, 3.0])
def test_both_simulations_agree_on_random_times(ring, ranks, buffers, slow):
    random = np.random.default_rng(ranks)
    for _ in range(5):
        compute = random.uniform(0.5, 1.5, (ranks, ranks))
        transfer = random.uniform(0.5, 1.5, ranks) * slow
        expected = played_by_events(compute, transfer, buffers)
        assert ring.forward(compute, transfer, buffers).seconds == pytest.approx(expected)


@pytest.mark.parametrize("ranks", [2, 5, 64])
@pytest.mark.parametrize(("block", "message"), [(1.0, 0.3), (1.0, 1.0), (0.4, 1.0)])
def test_equal_ranks_and_links_give_the_closed_form(ring, ranks, block, message):
    compute, transfer = np.full((ranks, ranks), block), np.full(ranks, message)
    closed = (ranks - 1) * max(block, message) + block
    assert ring.forward(compute, transfer).seconds == pytest.approx(closed)


@pytest.mark.parametrize("ranks", [2, 5, 64])
@pytest.mark.parametrize(("block", "message", "sums"), [(1.0, 0.1, 0.2), (0.3, 0.4, 0.8)])
def test_backward_is_the_closed_form_up_to_one_step(ring, ranks, block, message, sums):
    """Who waits for the link has sent its first block before the first gradients exist."""
    links = np.full(ranks, message), np.full(ranks, sums)
    found = ring.backward(np.full((ranks, ranks), block), *links).seconds
    closed = (ranks - 1) * max(block, message + sums) + block + sums
    assert closed - (message + sums) <= found <= closed + 1e-9
    if block > message + sums:
        assert found == pytest.approx(closed)


def test_one_rank_has_nobody_to_wait_for(ring):
    alone = np.array([[2.0]])
    assert ring.forward(alone, np.array([9.0])) == (2.0, 0.0)
    assert ring.backward(alone, np.array([9.0]), np.array([9.0])) == (2.0, 0.0)


def test_the_slowest_link_sets_the_pace(ring):
    ranks = 24
    compute, transfer = np.full((ranks, ranks), 1.0), np.full(ranks, 0.1)
    transfer[7] = 5.0
    found = ring.forward(compute, transfer).seconds
    assert found == pytest.approx((ranks - 1) * 5.0 + 1.0, rel=0.02)


def test_a_slow_rank_holds_up_all_of_them(ring):
    ranks = 16
    compute, transfer = np.full((ranks, ranks), 1.0), np.full(ranks, 0.1)
    compute[3] *= 1.5
    played = ring.forward(compute, transfer)
    assert played.seconds == pytest.approx(ranks * 1.5)
    assert played.waited == pytest.approx(ranks * 1.5 - compute.sum() / ranks)


def test_more_buffers_never_hurt_and_help_against_jitter(ring):
    random = np.random.default_rng(3)
    compute, transfer = random.lognormal(0, 0.5, (16, 16)), np.full(16, 0.9)
    seconds = [ring.forward(compute, transfer, buffers).seconds for buffers in (2, 3, 4, 8)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < seconds[0]
