"""The callback for transformers' Trainer, in a real training."""

import pytest
import torch
import torch.nn.functional as F
from watch.sinks_cases import needs

from scaledot.watch.sinks.attachment import Relay
from scaledot.watch.store import RunReader

LAYERS, HEADS, RATE = 2, 4, 1e-2


def tiny():
    transformers = needs("transformers", "hf")
    needs("accelerate", "hf")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=31,
        hidden_size=HEADS * 6,
        intermediate_size=29,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=23,
    )
    return transformers.LlamaForCausalLM(config)


class Lines(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        tokens = (torch.arange(7) * (index + 1)) % 31
        return {"input_ids": tokens, "labels": tokens}


def trainer(folder, callbacks=(), **more):
    from transformers import Trainer, TrainingArguments

    options = {"max_steps": 4, "logging_steps": 2, "save_strategy": "no", **more}
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=2,
        learning_rate=RATE,
        lr_scheduler_type="linear",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=0,
        **options,
    )
    return Trainer(tiny(), arguments, train_dataset=Lines(), callbacks=list(callbacks))


def callback(**options):
    needs("transformers", "hf")
    from scaledot.watch.sinks import TrainerCallback

    return TrainerCallback(**options)


def series(path, name):
    points = RunReader(path).scalars(name)
    found = dict(zip(points.steps.tolist(), points.values.tolist(), strict=True))
    assert len(found) == len(points)  # no step twice
    return found


@pytest.mark.slow
def test_the_callback_reads_every_layer_and_changes_nothing(tmp_path):
    plain = trainer(tmp_path)
    plain.train()
    original = F.scaled_dot_product_attention
    watching = callback(store=tmp_path / "run.vitals", every=1)
    watched = trainer(tmp_path, [watching])
    watched.train()

    assert F.scaled_dot_product_attention is original
    assert watching.watch is None
    for name, weight in plain.model.state_dict().items():
        assert torch.equal(watched.model.state_dict()[name], weight), name
    steps = list(RunReader(tmp_path / "run.vitals").steps())
    assert [step.step for step in steps] == [0, 1, 2, 3]
    for step in steps:
        assert [one.layer for one in step.readings] == [
            f"model.layers.{number}.self_attn" for number in range(LAYERS)
        ]
        assert all(one.heads == HEADS for one in step.readings)
    logged = {log["step"]: log["loss"] for log in watched.state.log_history if "loss" in log}
    assert series(tmp_path / "run.vitals", "loss") == pytest.approx(
        {step - 1: loss for step, loss in logged.items()}  # Trainer counts from 1
    )
    assert series(tmp_path / "run.vitals", "learning_rate") == pytest.approx(
        {step: RATE * (1 - step / 4) for step in range(4)}
    )


@pytest.mark.slow
def test_a_resumed_training_goes_on_counting(tmp_path):
    store = tmp_path / "run.vitals"
    first = trainer(
        tmp_path, [callback(store=store, every=1)], max_steps=4, save_strategy="steps", save_steps=3
    )
    first.train()
    second = trainer(tmp_path, [callback(store=store, every=1)], max_steps=5)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    found = [(step.segment, step.step) for step in RunReader(store).steps()]
    assert sorted(found) == [(1, 0), (1, 1), (1, 2), (1, 3), (2, 3), (2, 4)]


def test_a_training_that_fails_is_unwatched_when_the_context_ends(tmp_path):
    original = F.scaled_dot_product_attention
    kept = []
    with callback(every=1, sinks=[kept]) as watching:
        failing = trainer(tmp_path, [watching])
        failing.data_collator = lambda rows: 1 / 0
        with pytest.raises(ZeroDivisionError):
            failing.train()
        assert watching.watch is not None
    assert watching.watch is None
    assert F.scaled_dot_product_attention is original


def test_the_relay_does_not_repeat_what_the_watch_has_said():
    from scaledot.watch.reading import Scalar

    class Kept:
        def __init__(self):
            self.scalars = []

        def write(self, readings, scalars):
            self.scalars += scalars

    kept = Kept()
    relay = Relay(None, [kept], first_step=100)
    relay.write((), [Scalar(7, "learning_rate", 0.5)])
    relay.add([Scalar(107, "learning_rate", 0.5), Scalar(107, "loss", 2.0)])
    relay.add([Scalar(108, "learning_rate", 0.25)])
    assert kept.scalars == [
        Scalar(107, "learning_rate", 0.5),
        Scalar(107, "loss", 2.0),
        Scalar(108, "learning_rate", 0.25),
    ]
