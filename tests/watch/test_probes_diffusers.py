"""diffusers' attention dispatcher: the real one, with models in tiny configurations.

Its faster backends need a GPU and packages of their own: the functions of those packages are
replaced by the textbook, everything between them and the model is diffusers'.
"""

import pytest
import torch
from torch import nn
from watched_models import assert_reads, assert_same

from scaledot import Watch

pytest.importorskip("diffusers", reason="diffusers is not installed: pip install diffusers==0.42.1")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def dispatch():
    from diffusers.models import attention_dispatch

    return attention_dispatch


def random(*shape, seed=0):
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Attend(nn.Module):
    def forward(self, q, k, v, **keywords):
        # By name, as its own models do.
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        return dispatch_attention_fn(q, k, v, **keywords)


def textbook(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, **rest):
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    scores = q @ k.mT * (softmax_scale or q.shape[-1] ** -0.5)
    if causal:
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1 + k.shape[-2] - q.shape[-2])
        scores = scores.masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


@pytest.fixture
def flash(dispatch, monkeypatch):
    monkeypatch.setattr(dispatch, "flash_attn_func", textbook, raising=False)


def heads_first(*tensors):
    return [tensor.transpose(1, 2) for tensor in tensors]


@pytest.mark.parametrize("backend", ["native", "_native_math"])
def test_torchs_backends_are_seen_once(backend):
    q, k = random(2, 5, 3, 4), random(2, 7, 3, 4, seed=1)
    mask = torch.arange(7)[None] < torch.tensor([[4], [7]])
    model = Attend()
    keywords = {"attn_mask": mask[:, None, None], "scale": 0.3, "backend": backend}
    plain = model(q, k, k, **keywords)
    with Watch(model, every=1, store=(readings := [])):
        assert torch.equal(model(q, k, k, **keywords), plain)
    (reading,) = readings
    assert_reads(reading, *heads_first(q, k), mask[:, None, None], scale=0.3)


def test_other_backends_are_seen_in_their_own_layout(flash):
    q, k = random(2, 5, 3, 4), random(2, 7, 3, 4, seed=1)
    model, keywords = Attend(), {"is_causal": True, "scale": 0.3, "backend": "flash"}
    plain = model(q, k, k, **keywords)
    with Watch(model, every=1, store=(readings := [])) as watch:
        assert torch.equal(model(q, k, k, **keywords), plain)
    (reading,) = readings
    assert_reads(
        reading, *heads_first(q, k), is_causal=True, causal_align="bottom_right", scale=0.3
    )
    assert str(watch.coverage()) == "1 of 1 attention layer watched"


def test_other_backends_are_replaced(flash):
    q, k = random(2, 5, 3, 4), random(2, 7, 3, 4, seed=1)
    model, keywords = Attend(), {"is_causal": True, "backend": "flash"}
    found = []
    for replace in (False, True):
        tensors = [tensor.clone().requires_grad_() for tensor in (q, k, k)]
        with Watch(model, every=1, store=(readings := []), replace=replace) as watch:
            out = model(*tensors, **keywords)
            out.sin().sum().backward()
        found.append((out, *(tensor.grad for tensor in tensors)))
        assert str(watch.coverage()) == "1 of 1 attention layer watched"
        assert len(readings) == 1
    for own, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-5)
    assert not torch.equal(found[0][1], found[1][1])  # it was another pass


def test_what_the_watch_does_not_follow_is_named(dispatch, monkeypatch):
    q, k = random(2, 5, 3, 4), random(2, 7, 3, 4, seed=1)
    name = dispatch.AttentionBackendName.XFORMERS
    backends = dispatch._AttentionBackendRegistry._backends
    monkeypatch.setitem(backends, name, lambda query, key, value, **rest: query)
    with Watch(model := Attend(), every=1, store=(readings := [])) as watch:
        model(q, k, k, is_causal=True, backend="xformers")
    assert not readings
    assert "the watch does not know where its causal diagonal begins" in str(watch.coverage())


def test_the_registry_is_put_back(dispatch):
    registry = dispatch._AttentionBackendRegistry
    before, names = dict(registry._backends), dict(registry._supported_arg_names)
    with Watch(every=1):
        wrapped = [name.value for name in before if registry._backends[name] is not before[name]]
        assert registry._supported_arg_names == names
    assert registry._backends == before
    assert {"flash", "_flash_3", "sage", "xformers"} <= set(wrapped)
    assert "native" not in wrapped


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore")
def test_one_graph(flash):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    q, k = random(2, 5, 3, 4), random(2, 7, 3, 4, seed=1)
    model, keywords = Attend(), {"is_causal": True, "backend": "flash"}
    with Watch(model, every=1, store=(eager := [])):
        model(q, k, k, **keywords)
    counter = CompileCounterWithBackend("aot_eager")
    fast = torch.compile(model, backend=counter, fullgraph=True)
    with Watch(model, every=2, store=(readings := [])) as watch:
        for _ in range(3):
            fast(q, k, k, **keywords)
            watch.step()
    torch._dynamo.reset()
    assert counter.frame_count == 1
    assert [reading.step for reading in readings] == [0, 2]
    assert_same(readings[0], eager[0])


@pytest.mark.slow
def test_a_transformer_of_diffusers_is_watched_and_unchanged():
    from diffusers import DiTTransformer2DModel

    torch.manual_seed(0)
    model = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=4,
        in_channels=2,
        num_layers=2,
        sample_size=4,
        patch_size=2,
        norm_num_groups=2,
        num_embeds_ada_norm=3,
    )
    inputs = {
        "hidden_states": random(2, 2, 4, 4),
        "timestep": torch.tensor([1, 2]),
        "class_labels": torch.tensor([0, 1]),
    }
    model.eval()
    with torch.no_grad():
        plain = model(**inputs).sample
        with Watch(model, every=1, store=(readings := [])) as watch:
            assert torch.equal(model(**inputs).sample, plain)
    layers = ["transformer_blocks.0.attn1", "transformer_blocks.1.attn1"]
    assert [reading.layer for reading in readings] == layers
    assert str(watch.coverage()) == "2 of 2 attention layers watched"
