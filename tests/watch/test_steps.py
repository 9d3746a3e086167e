"""When a step ends, and what belongs to training."""

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
