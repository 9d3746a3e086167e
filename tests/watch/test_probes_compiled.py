"""Inside torch.compile: one graph, watched, the same whatever the cadence."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from watched_models import TinyEncoder, TinyGPT, assert_same, train

import scaledot
from scaledot import Watch

pytestmark = [
    pytest.mark.compile,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model):
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(model, backend=counter, fullgraph=True), counter


LAYERS = ["layers.0.attn", "layers.1.attn"]


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [None, "hooks"])
def test_one_graph_and_the_readings_of_the_eager_model(recompute):
    torch.manual_seed(1)
    model = TinyGPT(recompute=recompute)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # compiled graphs draw other numbers
    with Watch(model, every=2, store=(eager := [])):
        train(model, steps=5)
    model.load_state_dict(state)
    fast, counter = compiled(model)
    with Watch(model, every=2, store=(readings := [])) as watch:
        train(fast, steps=5)
    assert counter.frame_count == 1  # one graph, and none anew when the cadence toggles
    assert [(r.step, r.layer, r.phase) for r in readings] == [
        (step, layer, "train") for step in (0, 2, 4) for layer in LAYERS
    ]
    assert str(watch.coverage()) == "2 of 2 attention layers watched"
    for one, other in zip(readings, eager, strict=True):
        assert_same(one, other)


@pytest.mark.slow
def test_losses_are_the_same_to_the_bit():
    torch.manual_seed(1)
    model = TinyGPT(layers=1)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    expected = train(compiled(model)[0], steps=3)
    torch._dynamo.reset()
    model.load_state_dict(state)
    with Watch(model, every=1, store=(readings := [])):
        found = train(compiled(model)[0], steps=3)
    assert readings
    assert found == expected


def test_a_model_that_was_compiled_before_is_watched_and_let_go():
    model = TinyGPT(layers=1)
    fast, counter = compiled(model)
    train(fast, steps=2)
    assert counter.frame_count == 1
    with Watch(model, every=1, store=(readings := [])):
        train(fast, steps=2)
    assert counter.frame_count == 2
    assert [(r.step, r.layer) for r in readings] == [(0, "layers.0.attn"), (1, "layers.0.attn")]
    train(fast, steps=2)
    assert len(readings) == 2


def test_evaluation_is_kept_apart():
    model = TinyGPT(layers=1)
    fast, _ = compiled(model)
    with Watch(model, every=1, store=(readings := [])):
        train(fast, steps=1, evaluate=True)
    assert [(r.layer, r.phase) for r in readings] == [
        ("layers.0.attn", "train"),
        ("layers.0.attn", "eval"),
    ]


def test_two_attentions_of_one_compiled_module_have_two_names():
    class Twice(nn.Module):
        def forward(self, x):
            first = F.scaled_dot_product_attention(x, x, x)
            return F.scaled_dot_product_attention(first, x, x, is_causal=True)

    model = nn.Sequential(Twice())
    fast, _ = compiled(model)
    with Watch(model, every=1, store=(readings := [])):
        fast(torch.randn(1, 2, 5, 4))
    assert [r.layer for r in readings] == ["0", "0#2"]


@pytest.mark.slow
def test_torchs_encoder_reads_what_it_reads_uncompiled():
    torch.manual_seed(1)
    model = TinyEncoder()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for layer in model.encoder.layers:
        layer.self_attn.dropout = 0.0
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with Watch(model, every=1, store=(eager := [])):
        train(model, steps=2)
    model.load_state_dict(state)
    fast, counter = compiled(model)
    with Watch(model, every=1, store=(readings := [])):
        train(fast, steps=2)
    assert counter.frame_count == 1
    layers = ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn"]
    assert [(r.step, r.layer) for r in readings] == [(s, layer) for s in (0, 1) for layer in layers]
    for one, other in zip(readings, eager, strict=True):
        assert_same(one, other)


class Own(nn.Module):
    """Calls one of scaledot's functions with every kind of argument that an operator must carry."""

    def __init__(self, attend):
        super().__init__()
        self.attend, self.qkv = attend, nn.Linear(8, 24)

    def forward(self, x):
        return self.attend(*self.qkv(x).unflatten(-1, (2, -1)).transpose(1, 2).chunk(3, -1))


def packed(q, k, v):
    lengths = torch.tensor([0, 3, 5])
    tokens = (t[0].transpose(0, 1) for t in (q, k, v))
    return scaledot.attention_varlen(*tokens, lengths, lengths, is_causal=True)


OWN = {
    "attention": lambda q, k, v: scaledot.attention(
        q, k, v, None, 0.0, True, 0.3, softcap=3.0, window=(2, 0), sinks=torch.ones(2)
    ),
    "rule": lambda q, k, v: scaledot.attention(
        q, k, v, scale="log_n", key_lengths=torch.tensor([3, 5])
    ),
    "temperature": lambda q, k, v: scaledot.attention(q, k, v, scale=torch.tensor([0.5, 2.0])),
    "mask": lambda q, k, v: scaledot.attention(q, k, v, torch.ones(5, 5).tril() > 0),
    "packed": packed,
    "additive": lambda q, k, v: scaledot.additive_attention(q, k, v, torch.arange(4.0)),
    "with vitals": lambda q, k, v: scaledot.attention_with_vitals(q, k, v, is_causal=True)[0],
    "additive, with vitals": lambda q, k, v: scaledot.additive_attention_with_vitals(
        q, k, v, torch.arange(4.0)
    )[0],
}


@pytest.mark.one_case
@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_scaledots_own_functions_read_what_they_read_uncompiled(name):
    model = nn.Sequential(Own(OWN[name]))
    x = torch.randn(2, 5, 8)
    with Watch(model, every=2, store=(eager := [])) as watch:
        for _ in range(4):
            model(x).sum().backward()
            watch.step()
    fast, counter = compiled(model)
    with Watch(model, every=2, store=(readings := [])) as watch:
        for _ in range(4):
            fast(x).sum().backward()
            watch.step()
    assert counter.frame_count == 1
    assert [(r.step, r.layer, r.phase) for r in readings] == [(0, "0", "train"), (2, "0", "train")]
    for one, other in zip(readings, eager, strict=True):
        assert_same(one, other)
    assert str(watch.coverage()) == "1 of 1 attention layer watched"


def test_scaledots_module_reads_what_it_reads_uncompiled():
    model = nn.Sequential(scaledot.nn.MultiHeadAttention(12, 3))
    x = torch.randn(2, 5, 12)
    with Watch(model, every=1, store=(eager := [])):
        model(x)
    fast, counter = compiled(model)
    with Watch(model, every=1, store=(readings := [])):
        fast(x).sum().backward()
    assert counter.frame_count == 1
    assert len(readings) == 1
    assert_same(readings[0], eager[0])


def test_replacing_in_a_graph_computes_the_same_within_rounding():
    torch.manual_seed(1)
    model = TinyGPT()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with Watch(model, every=2, store=(beside := [])):
        expected = train(model, steps=4)
    model.load_state_dict(state)
    fast, counter = compiled(model)
    with Watch(model, every=2, store=(readings := []), replace=True) as watch:
        found = train(fast, steps=4)
    assert counter.frame_count == 1
    graph = counter.graphs[0]
    assert not any("scaled_dot_product" in str(node.target) for node in graph.graph.nodes)
    assert found == pytest.approx(expected, rel=1e-5)
    assert str(watch.coverage()) == "2 of 2 attention layers watched"
    assert [(r.step, r.layer) for r in readings] == [(r.step, r.layer) for r in beside]
    for one, other in zip(readings[:2], beside, strict=False):  # Adam's steps magnify rounding
        assert_same(one, other)


def test_a_compiled_function_without_a_model_has_the_layers_names():
    model = TinyGPT()
    tokens = torch.zeros(1, 3, dtype=torch.long)
    step = torch.compile(lambda x: model(x).sum(), backend="aot_eager", fullgraph=True)
    with Watch(every=1, store=(readings := [])):
        step(tokens).backward()
    assert [r.layer for r in readings] == LAYERS


def test_plain_products_are_named_in_a_graph_too():
    class ByHand(nn.Module):
        def forward(self, q, k, v):
            return (q @ k.mT).softmax(-1) @ v

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.three, self.attend = nn.Linear(8, 24), ByHand()

        def forward(self, x):
            parts = self.three(x).unflatten(-1, (2, -1)).transpose(1, 2).chunk(3, -1)
            return self.attend(*parts)

    model = nn.Sequential(Heads())
    fast, counter = compiled(model)
    with Watch(every=1) as watch:
        fast(torch.randn(2, 5, 8)).sum().backward()
        watch.step()
        fast(torch.randn(2, 5, 8)).sum().backward()
    assert counter.frame_count == 1
    assert str(watch.coverage()) == (
        "0 of 1 attention layer watched; 1 layer uses unhooked matmuls: 0.attend"
    )


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_multihead_attention_is_read_once_whatever_runs_its_graph(backend, replace):
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
    x = torch.randn(5, 2, 8)
    expected = model(x)
    torch._dynamo.reset()
    fast = torch.compile(model, backend=backend, fullgraph=True)
    with Watch(every=1, replace=replace, store=(readings := [])) as watch:
        for _ in range(2):
            found = fast(x)
            watch.step()
    assert torch.equal(found, expected)
    assert [(one.layer, one.step) for one in readings] == [("self_attn", 0), ("self_attn", 1)]


def test_the_compilers_table_of_functions_holds_torchs_own():
    """torch.distributed empties it, and it is made anew of what lies under torch's names."""
    rules = torch._dynamo.trace_rules
    owners = {
        "multi_head_attention_forward": nn.functional,
        "softmax": torch,
        "_native_multi_head_attention": torch,
        "_transformer_encoder_layer_fwd": torch,
        "backward": torch.autograd,
    }
    # A tuple: the watch exchanges functions in sets and lists of the program.
    originals = tuple(getattr(owner, name) for name, owner in owners.items())
    for cleared in (False, True):
        rules.clear_lru_cache()
        with Watch(every=1):
            stand_ins = tuple(getattr(owner, name) for name, owner in owners.items())
            if cleared:
                rules.get_torch_obj_rule_map()
                rules.clear_lru_cache()
            during = rules.get_torch_obj_rule_map().keys()
            assert during.isdisjoint(stand_ins)
            assert during >= set(originals)
        assert rules.get_torch_obj_rule_map().keys() == during
