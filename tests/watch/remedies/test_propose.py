"""Which remedy for which alarm; nothing is changed."""

import pytest
import torch
from remedied_models import NORMED, TOKENS, made
from watched_models import TinyGPT

from scaledot import Watch
from scaledot.watch.alarms import Alarm
from scaledot.watch.remedies import parse, propose


def alarm(kind, layer="layers.0.attn", heads=(1, 2)):
    return Alarm(9, "warn", kind, layer, heads[0], 120.0, 100.0, 5, 0.1, "it grows", "", heads)


def test_growing_heads_are_clipped():
    model = made(TinyGPT)
    (one,) = propose(model, [alarm("growth"), alarm("collapse", "layers.1.attn", (0,))])
    assert one.remedy == parse("qk-clip:100")
    assert one.layers == ("layers.0.attn", "layers.1.attn")
    assert one.heads == {"layers.0.attn": (1, 2), "layers.1.attn": (0,)}
    assert one.command == "scaledot run --remedy qk-clip:100 SCRIPT"
    assert "apply('qk-clip:100', model, heads={'layers.0.attn': [1, 2]" in one.code
    assert "it grows" in str(one)
    assert "state dict: unchanged" in str(one)


def test_fading_heads_are_sharpened_and_sinks_are_left_alone():
    found = propose(made(TinyGPT), [alarm("fading"), alarm("sink"), alarm("broken")])
    assert [str(one.remedy) for one in found] == ["log-n"]


def test_behind_a_norm_the_call_is_cooled():
    pytest.importorskip("transformers")
    model = made(NORMED["Qwen 3"])
    (one,) = propose(model, [alarm("growth", "model.layers.0.self_attn")])
    assert str(one.remedy) == "temperature:100"


def test_without_alarms_the_last_readings_speak():
    model = made(TinyGPT, sharp=20.0).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Watch(model, every=1, alarms=False) as watch:
        assert propose(watch) == []
        model(TOKENS).sum().backward()
        optimizer.step()
        (one,) = propose(watch)
    largest = watch.latest[("layers.0.attn", "train")].value("max_logit")
    above = tuple(head for head, value in enumerate(largest) if value > 100)
    assert above
    assert one.heads["layers.0.attn"] == above
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
