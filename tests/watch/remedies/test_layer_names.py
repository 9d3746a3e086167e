"""A remedy that comes and goes in the middle of a run leaves the layers their names."""

import pytest
import torch
from remedied_models import TOKENS, Ours, Torchs, made
from watched_models import TinyGPT

from scaledot import Watch
from scaledot.watch.remedies import apply, install

MAKES = {
    "torch's function": TinyGPT,
    "nn.MultiheadAttention": lambda: Torchs(need_weights=False),
    "scaledot.nn": Ours,
}


@pytest.mark.one_case
@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        ("torch's function", "temperature:1"),
        ("torch's function", "log-n"),
        ("nn.MultiheadAttention", "softcap:1"),
        ("scaledot.nn", "qk-norm"),
        ("scaledot.nn", "log-n"),
    ],
)
def test_a_remedy_at_the_call_renames_no_layer(make, remedy):
    model = made(MAKES[make])
    with Watch(model, every=1, store=(readings := []), alarms=False) as watch:
        model(TOKENS)
        watch.step()
        applied = apply(remedy, model, inputs=TOKENS)
        model(TOKENS)
        watch.step()
        applied.undo()
        model(TOKENS)
    names = [[one.layer for one in readings if one.step == step] for step in range(3)]
    assert names[0] == names[1] == names[2]
    assert len(set(names[0])) == len(names[0])


def test_a_remedy_that_is_installed_late_renames_no_layer():
    model = made(TinyGPT).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Watch(model, every=1, store=(readings := []), alarms=False) as watch:
        for _step in range(2):
            model(TOKENS).sum().backward()
            optimizer.step()
            if watch.step_number == 1:
                install(watch, "qk-clip:1", say=lambda line: None)
    assert {one.layer for one in readings} == {"layers.0.attn", "layers.1.attn"}
