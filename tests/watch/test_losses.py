"""The loss of a run, found where backward is called."""

import math

import pytest
import torch
from torch import nn
from watched_models import TinyGPT, train

import scaledot
from scaledot.watch import report
from scaledot.watch.losses import Losses
from scaledot.watch.reading import LOSS
from scaledot.watch.store import RunReader


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


class Receiver:
    def __init__(self):
        self.losses = {}

    def write(self, readings=(), scalars=()):
        self.losses |= {scalar.step: scalar.value for scalar in scalars if scalar.name == LOSS}
        return True


def steps(model, number=3, micro_batches=1, scaler=None, broken_from=None, divided=lambda x: x):
    """The mean loss of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(number):
        if step == broken_from:
            next(model.parameters()).data.fill_(math.nan)
        optimizer.zero_grad()
        parts = []
        for _ in range(micro_batches):
            loss = model(torch.randn(2, 5, 16)).square().mean()
            parts.append(loss.item())
            loss = divided(loss)
            (loss if scaler is None else scaler.scale(loss)).backward()
        optimizer.step()
        found.append(sum(parts) / len(parts))
    return found


def encoder():
    return nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_loss_of_each_step_is_what_backward_was_called_on(micro_batches):
    receiver, model = Receiver(), encoder()
    with scaledot.Watch(model, every=1, store=receiver):
        expected = steps(model, micro_batches=micro_batches)
    assert receiver.losses == pytest.approx(dict(enumerate(expected)))


@pytest.mark.parametrize(
    "divided", [lambda loss: loss / 3, lambda loss: loss * (1 / 3)], ids=["/ 3", "* 0.33"]
)
def test_shares_of_an_accumulated_step_add_up_to_its_loss(divided):
    receiver, model = Receiver(), encoder()
    with scaledot.Watch(model, every=1, store=receiver):
        expected = steps(model, micro_batches=3, divided=divided)
        expected += steps(model, number=1, micro_batches=2, divided=divided)  # an epoch's end
    assert receiver.losses == pytest.approx(dict(enumerate(expected)))


def test_losses_that_were_divided_by_another_number_are_no_shares():
    receiver, model = Receiver(), encoder()
    with scaledot.Watch(model, every=1, store=receiver):
        expected = steps(model, micro_batches=3, divided=lambda loss: loss / 7)
        expected += steps(model, number=1, divided=lambda loss: loss / 7)
    assert receiver.losses == pytest.approx({n: loss / 7 for n, loss in enumerate(expected)})


@pytest.mark.parametrize("shares", [2, 1])
def test_under_accelerate_the_calls_of_a_step_add_up(shares):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=shares)
    receiver, model = Receiver(), encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with scaledot.Watch(model, every=1, store=receiver):
        parts = []
        for _ in range(2):
            # Trainer divides by all tokens of a step, whatever the number of its calls.
            loss = model(torch.randn(2, 5, 16)).square().sum() / (160 * 2 / shares)
            parts.append(loss.item() / shares)
            accelerator.backward(loss)
        optimizer.step()
    assert receiver.losses == pytest.approx({0: sum(parts)})


def test_the_report_says_of_what_the_loss_is_the_mean(tmp_path):
    model = encoder()
    with scaledot.Watch(model, every=1, store=tmp_path / "r.vitals"):
        steps(model, micro_batches=3)
    said = " ".join(report.examine(tmp_path / "r.vitals")[1].sentences)
    assert "Each loss is the mean of up to 3 backward calls in a step" in said


def test_steps_that_are_looked_at_keep_a_loss_and_so_does_the_last():
    receiver, model = Receiver(), encoder()
    with scaledot.Watch(model, every=3, store=receiver):
        expected = steps(model, number=6)
    kept = {0: expected[0], 3: expected[3], 5: expected[5]}
    assert receiver.losses == pytest.approx(kept)


def test_a_loss_that_is_no_number_is_told_at_once_and_once():
    receiver, model = Receiver(), encoder()
    with scaledot.Watch(model, every=100, store=receiver):
        steps(model, number=5, broken_from=2)
        assert list(receiver.losses) == [0, 2]
    assert [step for step, loss in receiver.losses.items() if math.isnan(loss)] == [2, 4]


def test_a_run_without_attention_has_no_last_loss():
    receiver = Receiver()
    with scaledot.Watch(store=receiver, every=2):
        steps(nn.Sequential(nn.Linear(16, 16)), number=4)
    assert receiver.losses == {}


def test_a_loss_that_is_no_number_is_an_alarm_without_any_attention():
    receiver = Receiver()
    with scaledot.Watch(store=receiver) as watch:
        steps(nn.Sequential(nn.Linear(16, 16)), number=6, broken_from=3)
    assert [(one.step, one.kind, one.grade, one.layer) for one in watch.alarms] == [
        (3, "loss", "act", "")
    ]
    assert watch.alarms[0].words.startswith("the loss is NaN")
    assert next(iter(receiver.losses)) == 3


def test_a_loss_that_is_no_number_is_an_alarm_between_two_readings():
    model = encoder()
    with scaledot.Watch(model, every=100) as watch:
        steps(model, number=5, broken_from=2)
    assert [(one.step, one.grade) for one in watch.alarms if one.kind == "loss"] == [(2, "act")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("every", [1, 100], ids=["due", "not due"])
def test_losses_of_every_type_are_kept_as_they_are(dtype, calls, every):
    model, receiver = encoder(), Receiver()
    weight = nn.Parameter(torch.ones((), dtype=dtype))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    with scaledot.Watch(model, every=every, store=receiver):
        steps(model, number=1)
        for factor in (0.1, 0.7):
            parts = [weight * (factor + call / 3) for call in range(calls)]
            for part in parts:
                part.backward()
            optimizer.step()
        model(torch.randn(2, 5, 16))
    kept = torch.stack([part.detach() for part in parts]).mean().float().item()
    assert receiver.losses[2] == kept


def test_a_loss_that_cannot_be_looked_at_is_the_watchs_trouble_alone(monkeypatch, caplog):
    def fails(*args):
        raise ArithmeticError("out of luck")

    monkeypatch.setattr(Losses, "add", fails)
    model = encoder()
    with scaledot.Watch(model, every=1) as watch:
        found = steps(model, number=2)
    assert all(map(math.isfinite, found))
    assert watch.step_number == 2
    assert "could not read a loss; training goes on" in caplog.text


def test_a_grad_scaler_does_not_scale_the_series():
    receiver, model = Receiver(), encoder()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with scaledot.Watch(model, every=1, store=receiver):
        expected = steps(model, scaler=scaler)
    assert receiver.losses == pytest.approx(dict(enumerate(expected)))


def test_backward_of_several_numbers_is_no_loss():
    receiver, model = Receiver(), encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with scaledot.Watch(model, every=1, store=receiver):
        out = model(torch.randn(2, 5, 16))
        out.backward(torch.ones_like(out))
        optimizer.step()
    assert receiver.losses == {}


def test_everything_is_put_back():
    backward, scale = torch.autograd.backward, torch.amp.GradScaler.scale
    first, second = scaledot.Watch(every=1), scaledot.Watch(every=1)
    assert torch.autograd.backward is not backward
    first.remove()
    assert torch.autograd.backward is not backward
    second.remove()
    assert torch.autograd.backward is backward
    assert torch.amp.GradScaler.scale is scale


def test_losses_can_be_left_out():
    backward = torch.autograd.backward
    with scaledot.Watch(every=1, losses=False):
        assert torch.autograd.backward is backward


def test_the_store_keeps_the_series(tmp_path):
    with scaledot.Watch(every=1, store=tmp_path / "run.vitals"):
        losses = train(TinyGPT(), steps=3)
    kept = RunReader(tmp_path / "run.vitals").scalars(LOSS)
    assert len(kept.values) == 3
    assert kept.values[0] == pytest.approx(float(losses[0]), rel=1e-5)
