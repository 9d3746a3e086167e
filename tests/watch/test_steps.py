"""When a step ends, and what belongs to training."""

import gc
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from watched_models import VOCABULARY, TinyGPT, language_loss, train

from scaledot import Watch
from scaledot.watch.losses import Losses
from scaledot.watch.remedies import beside
from scaledot.watch.steps import StepEnds, learning_rate, phase_of


@pytest.fixture
def parameter():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return parameter


@pytest.fixture
def ends():
    ended = []
    steps = StepEnds(ended.append)
    yield ended
    steps.remove()


def test_every_optimizer_step_ends_a_step(ends, parameter):
    optimizer = torch.optim.AdamW([parameter])
    for _ in range(3):
        optimizer.step()
    assert ends == [optimizer] * 3


def test_two_optimizers_that_take_turns_end_one_step_between_them(ends, parameter):
    matrices, rest = torch.optim.SGD([parameter]), torch.optim.AdamW([parameter])
    for _ in range(3):
        matrices.step()
        rest.step()
    assert ends == [matrices] * 3


def test_an_optimizer_that_takes_over_ends_steps_again(ends, parameter):
    first, second = torch.optim.SGD([parameter]), torch.optim.SGD([parameter])
    first.step()
    for _ in range(3):
        second.step()
    assert ends == [first, second, second]


def trained(optimizer, parameter):
    optimizer.zero_grad()
    parameter.square().sum().backward()
    optimizer.step()
    return optimizer


def test_two_optimizers_that_share_a_pass_end_one_step_between_them(ends, parameter):
    matrices, rest = torch.optim.SGD([parameter]), torch.optim.AdamW([parameter])
    for _ in range(3):
        trained(matrices, parameter)
        rest.step()
    assert ends == [matrices] * 3


def test_two_optimizers_with_passes_of_their_own_end_a_step_each(ends, parameter):
    generator, critic = torch.optim.SGD([parameter]), torch.optim.AdamW([parameter])
    for _ in range(3):
        trained(critic, parameter)
        trained(generator, parameter)
    assert ends == [critic, generator] * 3


@pytest.mark.parametrize("before", ["kept", "dropped", "collected"])
def test_an_optimizer_that_takes_the_place_of_another_loses_no_step(ends, parameter, before):
    first = torch.optim.SGD([parameter])
    for _ in range(3):
        trained(first, parameter)
    ends.clear()
    if before != "kept":
        del first
    if before == "collected":
        gc.collect()
    second = torch.optim.SGD([parameter])
    for _ in range(3):
        trained(second, parameter)
    assert ends == [second] * 3


@pytest.mark.parametrize("kept", [True, False])
def test_a_new_optimizer_in_each_step_ends_each(parameter, kept):
    number = 0

    def ended(optimizer):
        nonlocal number
        number += 1

    steps, all_of_them = StepEnds(ended), []
    for _ in range(20):
        optimizer = trained(torch.optim.SGD([parameter]), parameter)
        if kept:
            all_of_them.append(optimizer)
    steps.remove()
    assert number == 20


def test_a_pass_backward_through_a_kept_graph_is_a_pass(parameter):
    losses, ended = Losses(), []
    steps = StepEnds(ended.append)
    loss = parameter.sum()
    optimizers = [torch.optim.SGD([parameter]) for _ in range(2)]
    for optimizer in optimizers:
        loss.backward(retain_graph=True)
        optimizer.step()
    steps.remove()
    losses.remove()
    assert ended == optimizers


def test_two_threads_that_train_end_steps_of_their_own(ends):
    """Each with two optimizers that share a pass; the other's passes come in between."""
    meeting, failed = threading.Barrier(2), []

    def trains():
        try:
            parameter = nn.Parameter(torch.ones(2))
            matrices, rest = torch.optim.SGD([parameter]), torch.optim.AdamW([parameter])
            for _ in range(5):
                trained(matrices, parameter)
                meeting.wait(60)
                rest.step()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=trains) for _ in range(2)]
    losses = Losses()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    losses.remove()
    assert not failed
    assert len(ends) == 10


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("ignore:.*requires_grad=True. Gradients will be None")
def test_optimizers_inside_a_backward_pass_end_one_step_between_them(ends, parameter, reentrant):
    """Checkpoints run forward again between them."""
    layers = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    optimizers = {one: torch.optim.SGD([one]) for one in layers.parameters()}
    for one in optimizers:
        one.register_post_accumulate_grad_hook(lambda one: optimizers[one].step())
    for _ in range(3):
        out = torch.ones(1, 3, requires_grad=True)
        for layer in layers:
            out = checkpoint(layer, out, use_reentrant=reentrant)
        out.sum().backward()
    assert len(ends) == 3
    last = trained(torch.optim.SGD([parameter]), parameter)
    assert ends[3:] == [last]


def test_passes_that_try_a_remedy_end_no_step(parameter):
    matrices, rest = torch.optim.SGD([parameter]), torch.optim.AdamW([parameter])

    @torch.enable_grad()
    def tried(optimizer):
        parameter.square().sum().backward()

    with Watch(every=1, alarms=False) as watch:
        remedy = beside.StepEnd(watch, tried)
        for _ in range(3):
            trained(matrices, parameter)
            rest.step()
        remedy.remove()
        assert watch.step_number == 3


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, about torch.jit
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_compiled_steps_end_too(ends, parameter):
    torch._dynamo.reset()
    optimizers = torch.optim.SGD([parameter]), torch.optim.AdamW([parameter])
    steps = [torch.compile(optimizer.step, backend="aot_eager") for optimizer in optimizers]
    for _ in range(3):
        for step in steps:
            step()
    assert len(ends) == 3
    torch._dynamo.reset()


def test_removed_means_removed(parameter):
    ended = []
    StepEnds(ended.append).remove()
    torch.optim.SGD([parameter]).step()
    assert not ended


def test_phases():
    module = nn.Linear(1, 1)
    assert phase_of(module, False) == "train"
    assert phase_of(None, False) == "train"
    with torch.no_grad():
        assert phase_of(module, False) == "eval"
        assert phase_of(module, True) == "train"  # reentrant checkpointing
    assert phase_of(module.eval(), False) == "eval"


def test_learning_rate(parameter):
    assert learning_rate(torch.optim.SGD([parameter], lr=0.25)) == 0.25
    assert learning_rate(torch.optim.SGD([parameter], lr=torch.tensor(0.5))) == 0.5


@pytest.mark.filterwarnings("ignore:.*requires_grad=True. Gradients will be None")
@pytest.mark.parametrize("recompute", ["hooks", "reentrant"])
def test_recomputation_is_not_counted_twice(recompute):
    def readings_of(recompute):
        torch.manual_seed(0)
        model = TinyGPT(recompute=recompute)
        with Watch(model, every=1, store=(readings := [])):
            train(model, steps=2)
        return readings

    plain, recomputed = readings_of(None), readings_of(recompute)
    assert [(r.step, r.layer, r.phase) for r in recomputed] == [
        (r.step, r.layer, r.phase) for r in plain
    ]
    for one, other in zip(recomputed, plain, strict=True):
        assert one.value("rows").tolist() == other.value("rows").tolist()
        assert one.value("entropy").tolist() == other.value("entropy").tolist()


def test_selective_checkpointing_keeps_its_own_results():
    """It hands out kept results in the order of the operators: ours must not be among them."""

    def policy(context, operator, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE

    def gradients(watched):
        torch.manual_seed(0)
        model = TinyGPT(layers=1)
        model.layers[0].drop.p = 0.0
        tokens = torch.randint(VOCABULARY, (2, 7))

        def run():
            out = checkpoint(
                model,
                tokens,
                use_reentrant=False,
                context_fn=lambda: create_selective_checkpoint_contexts(policy),
            )
            language_loss(out, tokens).backward()

        if watched:
            with Watch(model, every=1, store=(readings := [])):
                run()
            assert len(readings) == 1
        else:
            run()
        return [parameter.grad for parameter in model.parameters()]

    for plain, watched in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(plain, watched)


def test_steps_that_a_scaler_skips_do_not_end():
    model = TinyGPT(layers=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    tokens = torch.randint(VOCABULARY, (2, 7))
    with Watch(model, every=1, store=(readings := [])):
        for broken in (True, False):
            loss = language_loss(model(tokens), tokens)
            scaler.scale(loss).backward()
            if broken:
                model.head.bias.grad.fill_(torch.inf)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    (reading,) = readings
    assert reading.value("rows").tolist() == [2 * 2 * 7] * 3


def test_frozen_parts_are_evaluation():
    model = nn.ModuleDict({"frozen": TinyGPT(layers=1).eval(), "trained": TinyGPT(layers=1)})
    tokens = torch.randint(VOCABULARY, (2, 7))
    with Watch(model, every=1, store=(readings := [])):
        for part in model.values():
            part(tokens)
    assert {reading.layer: reading.phase for reading in readings} == {
        "frozen.layers.0.attn": "eval",
        "trained.layers.0.attn": "train",
    }
