"""The watch's own cost: measured, shown, and held inside the budget."""

import itertools
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from watched_models import TinyGPT, train

from scaledot import Watch
from scaledot.watch.cadence import (
    AIM,
    EARLY_SECONDS,
    EARLY_SHARE,
    EARLY_STEPS,
    MISSED,
    RAREST,
    WHOLE_STEPS,
    Cadence,
    Evaluations,
)


class Clock:
    """Stands still until it is moved."""

    now = 0.0

    def __call__(self):
        return self.now


def run(cadence, clock, steps, step_time=0.1, cost=0.01, startup=1.0):
    """Which steps were due; a sample costs `cost`, the first two steps half of `startup` each."""
    due = []
    for step in range(steps):
        clock.now += step_time
        if cadence.due:
            due.append(step)
            spent = cost if step >= WHOLE_STEPS else startup / WHOLE_STEPS
            clock.now += spent
            cadence.spend(spent)
        cadence.close_step()
    return due


def test_budget_decides_the_cadence_when_the_early_allowance_is_spent():
    clock = Clock()
    cadence = Cadence(budget=0.01, clock=clock)
    due = run(cadence, clock, 3000)
    assert due[:3] == [0, 1, 2]
    late = [after - before for before, after in itertools.pairwise(due) if before > 1000]
    assert set(late) <= {20, 21}
    assert cadence.every == cadence.steady_every == 20
    assert cadence.steady_share == pytest.approx(AIM * 0.01, rel=0.1)
    assert cadence.startup == pytest.approx(1.0)


@pytest.mark.parametrize("cost_in_steps", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("step_time", [0.0005, 0.003, 0.02])
def test_short_steps_are_read_at_least_every_few_percent_of_the_run(step_time, cost_in_steps):
    """A run that goes wrong within its first hundreds of steps is seen while it does."""
    clock = Clock()
    cadence = Cadence(clock=clock)
    cost = cost_in_steps * step_time
    due = run(cadence, clock, EARLY_STEPS, step_time, cost, startup=3 * cost)
    pairs = list(itertools.pairwise(due))
    pace = 0.035 if len(due) * cost < EARLY_SECONDS / 2 else 0.25  # what the allowance pays for
    assert all(after - before <= 1 + pace * after for before, after in pairs)
    assert len(due) * cost <= max(EARLY_SECONDS, (EARLY_SHARE + 0.01) * clock.now) + 3 * cost


@pytest.mark.parametrize("step_time", [0.1, 1.0, 10.0])
def test_dear_samples_fall_on_ever_rarer_early_steps(step_time):
    clock = Clock()
    cadence = Cadence(clock=clock)
    due = run(cadence, clock, EARLY_STEPS, step_time, cost=step_time)
    assert due[:2] == [0, 1]
    assert len([step for step in due if step <= 100]) >= 5
    spent = (len(due) - 1) * step_time
    assert spent <= max(EARLY_SECONDS, (EARLY_SHARE + 0.01) * clock.now) + step_time


def test_what_the_early_samples_cost_is_not_paid_back():
    """Their allowance is stated apart, so the steady interval is the same without them."""
    clock = Clock()
    cadence = Cadence(clock=clock)
    due = run(cadence, clock, 10_000, step_time=0.01, cost=0.002)
    assert due[-1] - due[-2] <= 41
    assert cadence.steady_every == pytest.approx(40, abs=1)


def test_a_smaller_budget_shrinks_the_early_allowance():
    spent = []
    for budget in (0.01, 0.001):
        clock = Clock()
        cadence = Cadence(budget=budget, clock=clock)
        spent.append(0.01 * len(run(cadence, clock, 500, step_time=0.01)[1:]))
    assert spent[1] < spent[0] / 5


@pytest.mark.parametrize("budget", [0.3, 0.01, 0.001])
@pytest.mark.parametrize("cost", [0.001, 0.02, 0.5])
def test_share_stays_inside_the_budget_after_the_early_steps(budget, cost):
    clock = Clock()
    cadence = Cadence(budget=budget, clock=clock)
    run(cadence, clock, 2000, cost=cost)
    before = clock.now
    due = [step for step in run(cadence, clock, 40_000, cost=cost, startup=cost)]
    # Half of the budget is left for what the watch cannot see of itself.
    assert len(due) * cost / (clock.now - before) <= 0.6 * budget


def test_the_first_whole_readings_do_not_set_the_interval():
    """They are read in full and build what is built once; later ones are samples, and cheap."""
    clock = Clock()
    cadence = Cadence(budget=0.01, clock=clock)
    assert run(cadence, clock, 3, cost=1e-5, startup=2.0) == [0, 1, 2]
    assert cadence.startup == pytest.approx(2.0)
    assert cadence.every == 1
    assert cadence.share < 0.001


def test_cheap_samples_are_taken_every_step():
    clock = Clock()
    assert run(Cadence(budget=0.01, clock=clock), clock, 50, cost=1e-4) == list(range(50))


def test_cadence_follows_a_run_that_becomes_slower():
    clock = Clock()
    cadence = Cadence(budget=0.01, clock=clock)
    run(cadence, clock, 2000, step_time=0.1)
    often = cadence.every
    run(cadence, clock, 200, step_time=1.0, startup=0.01)
    assert cadence.every < often


def test_one_long_evaluation_does_not_change_the_cadence():
    clock = Clock()
    cadence = Cadence(budget=0.01, clock=clock)
    run(cadence, clock, 2000)
    before = cadence.every
    clock.now += 1000.0
    run(cadence, clock, 3, startup=0.01)
    assert cadence.every == pytest.approx(before, abs=1)


def test_hopeless_samples_are_still_taken_now_and_then():
    clock = Clock()
    cadence = Cadence(budget=0.001, clock=clock)
    run(cadence, clock, 3, step_time=1e-6, cost=10.0)
    assert cadence.every == RAREST


def test_explicit_cadence_is_obeyed_whatever_it_costs():
    clock = Clock()
    cadence = Cadence(every=4, budget=0.001, clock=clock)
    assert run(cadence, clock, 13, cost=5.0) == [0, 4, 8, 12]
    assert cadence.share > 0.5


def test_shown_numbers_are_float32():
    """Half the bytes in the store, and still more digits than a clock is right about."""
    clock = Clock()
    cadence = Cadence(every=2, clock=clock)
    run(cadence, clock, 7, step_time=0.1, cost=0.003)
    for number in (cadence.share, cadence.step_time):
        assert number == float(np.float32(number))
    assert cadence.step_time == pytest.approx(0.103, rel=1e-6)


def test_cost_and_budget_are_shown():
    clock = Clock()
    cadence = Cadence(budget=0.02, clock=clock)
    assert str(cadence) == "watch cost not known yet (budget 2.00%), every step"
    run(cadence, clock, 500)
    assert str(cadence) == (
        f"watch cost {cadence.steady_share:.2%} of step time in the long run (budget 2.00%), "
        f"{cadence.share:.2%} of the run so far, every {cadence.every} steps"
    )
    assert 0.008 < cadence.steady_share < 0.011
    assert cadence.steady_share < cadence.share
    assert "as asked" in str(Cadence(every=3))


class Event:
    """A CUDA event that the device passes when it is told to."""

    def __init__(self, at):
        self.at, self.passed = at, False

    def query(self):
        return self.passed

    def elapsed_time(self, other):
        return (other.at - self.at) * 1000


def test_time_on_the_device_is_charged_when_it_is_known():
    clock = Clock()
    cadence = Cadence(budget=0.01, clock=clock)
    run(cadence, clock, WHOLE_STEPS)
    began, ended = Event(0.0), Event(0.25)
    cadence.spend_on_device(began, ended)
    run(cadence, clock, 1, cost=0.001, startup=0.002)
    early = cadence.share
    ended.passed = True
    run(cadence, clock, 1, cost=0.0)
    assert cadence.share > 10 * early
    assert cadence.steady_every > 100


def test_evaluation_takes_one_pass_and_then_waits_until_it_is_paid():
    clock = Clock()
    evaluations = Evaluations(Cadence(budget=0.01, clock=clock))

    def forward(cost=0.01):
        taken = []
        for layer in ("a", "b"):
            clock.now += 0.05
            if evaluations.wants() and evaluations.takes(layer):
                evaluations.spend(cost)
                taken.append(layer)
        return taken

    assert forward() == ["a", "b"]  # this pass is free: it pays for what is built once
    assert forward() == ["a", "b"]
    assert forward() == []
    clock.now += 0.02 / 0.01
    assert forward() == ["a", "b"]
    assert forward() == []


def test_fixed_cadence_counts_evaluations_by_layer():
    evaluations = Evaluations(Cadence(every=3))
    assert [evaluations.takes("a") for _ in range(7)] == [True, False, False] * 2 + [True]
    assert evaluations.takes("b")


def test_watch_measures_itself():
    model = TinyGPT()
    with Watch(model, budget=0.05, store=(readings := [])) as watch:
        train(model, steps=120)
    steps = sorted({reading.step for reading in readings})
    assert steps[:2] == [0, 1]
    assert len(steps) < 120  # this model's attention is far too small for 5 %
    assert watch.cadence.every > 1
    assert 0 < watch.cadence.share < 1
    assert "budget 5.00%" in repr(watch)


def test_what_is_spent_once_is_kept_apart_and_noted():
    class Store(list):
        def note(self, name, value):
            notes[name] = value

        write = list.append

    notes, model = {}, TinyGPT()
    with Watch(model, store=Store()) as watch:
        before = watch.cadence.startup
        assert before > 0  # the probes are in place
        train(model, steps=2)
        assert watch.cadence.startup > before
        assert watch.cadence.share is None  # nothing of it is charged
        train(model, steps=4)
        once = watch.cadence.startup
    assert notes["steady"]["startup"] == round(once, 4)


def test_steps_that_are_not_due_do_not_look(monkeypatch):
    """Between samples a call costs a comparison: no stack is read, nothing is measured."""
    from scaledot.watch.probes import place

    model = TinyGPT()
    looked = []
    here, near = place.here, place.near
    monkeypatch.setattr(place, "here", lambda: looked.append("here") or here())
    monkeypatch.setattr(place, "near", lambda ours: looked.append("near") or near(ours))
    with Watch(model, every=5):
        train(model, steps=5)
        assert looked == ["near", "here"] * 2
        train(model, steps=1)
        assert looked == ["near", "here"] * 2 + ["near"] * 2
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("every", [None, 3])
def test_a_step_that_is_passed_counts_as_one_that_is_closed(every):
    """Steps of all lengths, samples of all costs, and evaluations in between."""
    lengths = np.random.default_rng(0).lognormal(-6, 0.3, 2000)
    lengths[::300] = 2.0
    found = []
    for short in (False, True):
        clock, due = Clock(), []
        cadence = Cadence(every, clock=clock)
        for step, length in enumerate(lengths):
            clock.now += length
            if cadence.due:
                due.append(step)
                clock.now += 3 * length
                cadence.spend(3 * length)
            passed = short and not cadence.due
            (cadence.pass_step if passed else cadence.close_step)()
            cadence.spend(1e-6)
        found.append((due, cadence.share, cadence.steady_share, cadence.step_time, str(cadence)))
    assert found[0] == found[1]
    assert len(due) >= 100


def test_ranks_that_share_a_cadence_look_at_the_same_steps():
    """One affords every step, the other every hundredth; they hear of it four steps later."""
    clocks = [Clock(), Clock()]
    cadences = [Cadence(budget=0.01, clock=clock) for clock in clocks]
    wishes, due = {}, [[], []]
    for step in range(300):
        for rank, (cadence, clock) in enumerate(zip(cadences, clocks, strict=True)):
            cadence.shared = True
            clock.now += 0.1
            if cadence.due:
                due[rank].append(step)
                clock.now += (spent := (1e-5, 0.05)[rank])
                cadence.spend(spent)
            was_due = cadence.due
            cadence.close_step()
            if was_due:
                wishes.setdefault(step, []).append(cadence.wish)
        for cadence in cadences:
            if step - 4 in wishes and (agreed := max(wishes[step - 4])):
                cadence.agree(agreed)
    assert wishes[0] == wishes[1] == [0, 0]  # the first steps pay for what is built once
    assert wishes[2][0] == 1
    assert due[0] == due[1]
    assert due[0][:3] == [0, 1, 2]
    assert 10 < len(due[0]) < 30


def test_a_rank_that_is_left_alone_decides_for_itself_again():
    clock = Clock()
    cadence = Cadence(budget=0.01, clock=clock)
    cadence.shared = True
    assert run(cadence, clock, 200, cost=1e-4) == [0, 1, 2]  # nobody has said anything
    cadence.alone()
    assert run(cadence, clock, 5, cost=1e-4)


def test_an_interval_that_was_asked_for_is_kept_whatever_the_ranks_wish():
    clock = Clock()
    cadence = Cadence(every=3, clock=clock)
    cadence.shared = True
    cadence.agree(50)
    assert run(cadence, clock, 10) == [0, 3, 6, 9]
    assert cadence.wish == 0


class Attends(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


class Steps:
    """Train a weight in short steps, beside three layers of attention without any."""

    def __init__(self):
        self.model = nn.Sequential(Attends(), Attends(), Attends())
        self.x = torch.randn(2, 2, 40, 4)
        self._linear = nn.Linear(2, 2)
        self._optimizer = torch.optim.SGD(self._linear.parameters())

    def end(self):
        self._linear(torch.zeros(1, 2)).sum().backward()
        self._optimizer.step()

    def take(self, number):
        for _ in range(number):
            self.model(self.x)
            self.end()


@pytest.fixture
def ran(monkeypatch):
    """Names of the watch's functions that run, and of the functions in C that these call."""
    monkeypatch.delitem(sys.modules, "accelerate", raising=False)  # its losses are looked at closer

    def names(act):
        ours, others = [], []

        def count(frame, event, function):
            file = frame.f_code.co_filename
            if "scaledot" in file and file != __file__:
                if event == "call":
                    ours.append(frame.f_code.co_qualname)
                elif event == "c_call":
                    others.append(function.__name__)

        sys.setprofile(count)
        try:
            act()
        finally:
            sys.setprofile(None)
        return ours, others

    return names


def test_a_call_in_a_step_that_is_not_due_runs_a_handful_of_functions(ran):
    steps = Steps()
    with Watch(steps.model, every=10**6, store=[]):
        steps.take(2)
        ours, others = ran(lambda: steps.model(steps.x))
    assert 0 < len(ours) <= 3 * 5, ours
    assert "clone" not in others


def test_the_end_of_a_step_that_is_not_due_runs_a_few_functions(ran):
    """Steps may take half a millisecond, and each function costs a fraction of a microsecond."""
    steps = Steps()
    with Watch(steps.model, every=10**6, store=[]):
        steps.take(300)
        ours, others = ran(steps.end)
    assert 0 < len(ours) <= 16, ours
    assert others.count("perf_counter") == 2
    assert "detach" not in others  # the loss is read as a number, once
    assert others.count("item") == 1


def test_a_due_call_of_a_layer_that_is_known_only_copies_its_query_and_key(ran):
    steps = Steps()
    with Watch(steps.model, store=[]) as watch:
        steps.take(3)
        watch.cadence.due = True
        steps.model[0](steps.x)  # the first of its kind in the step
        ours, others = ran(lambda: steps.model[1](steps.x))
        assert len(watch._stacks._stacks) == 1
        assert 0 < len(ours) <= 23, ours
        assert others.count("clone") == 2
        tensor_work = {"contiguous", "to", "sum", "cat", "detach", "unflatten", "reshape"}
        assert tensor_work.isdisjoint(others), others


def test_what_is_not_timed_is_charged_by_what_due_steps_take_longer():
    """Hooks, the writer's thread and cold caches are no part of what the watch times."""

    def cost(untimed):
        clock = Clock()
        cadence = Cadence(budget=0.01, clock=clock)
        for _ in range(3000):
            clock.now += 0.01
            if cadence.due:
                clock.now += 0.002 + untimed
                cadence.spend(0.002)
            cadence.close_step()
        return cadence.steady_share * cadence.steady_every * 0.01

    assert cost(0.0) == pytest.approx(0.002, rel=0.01)
    assert cost(0.0003) == pytest.approx(0.0023, rel=0.01)
    assert cost(0.1) == pytest.approx(0.002 * (1 + MISSED), rel=0.05)
