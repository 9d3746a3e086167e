"""The watch on a GPU: nothing changes, nobody waits, and what is read is right."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from watched_models import (
    VOCABULARY,
    TinyEncoder,
    TinyGPT,
    assert_reads,
    language_loss,
    record_calls,
)

from scaledot import Watch

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def gpt(dtype=torch.float32, **keywords):
    torch.manual_seed(0)
    return TinyGPT(width=64, heads=4, **keywords).to("cuda", dtype)


def without_dropout(model):
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def train(
    model, steps=4, micro_batches=1, tokens=33, before=None, optimizer_type=torch.optim.AdamW
):
    """The losses, on the device until the end: a step never waits for one."""
    torch.manual_seed(5)
    data = torch.randint(VOCABULARY, (steps * micro_batches, 2, tokens), device="cuda")
    optimizer = optimizer_type(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        if before is not None:
            before(step)
        for micro_batch in range(micro_batches):
            batch = data[step * micro_batches + micro_batch]
            loss = language_loss(model(batch).float(), batch)
            (loss / micro_batches).backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.set_sync_debug_mode("default")
    return torch.stack(losses).tolist()


def twice(model, **keywords):
    """The losses without a watch, then under one, from the same weights; and the readings."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    watching = {name: keywords.pop(name) for name in ("replace", "every") if name in keywords}
    expected = train(model, **keywords)
    model.load_state_dict(state)
    with Watch(model, **{"every": 1, **watching}, store=(readings := [])) as watch:
        found = train(model, **keywords)
    return expected, found, readings, watch


@pytest.fixture(autouse=True)
def same_again():
    """Kernels that add in the same order each time, and no debugging left switched on."""
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.cuda.set_sync_debug_mode("default")


MODELS = {
    "nanoGPT": gpt,
    "bfloat16": lambda: gpt(torch.bfloat16),
    "checkpointed": lambda: gpt(recompute="hooks"),
    "checkpointed, reentrant": lambda: gpt(recompute="reentrant"),
    "nn.TransformerEncoder": lambda: TinyEncoder().cuda(),
}


@pytest.mark.filterwarnings("ignore:.*requires_grad=True. Gradients will be None")
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_losses_are_the_same_to_the_bit(name, micro_batches):
    expected, found, readings, watch = twice(MODELS[name](), micro_batches=micro_batches)
    assert found == expected
    assert str(watch.coverage()) == "2 of 2 attention layers watched"
    assert len(readings) == 2 * 4
    for reading in readings:
        assert reading.value("rows").tolist() == [micro_batches * 2 * 33] * reading.heads


@pytest.mark.parametrize("replace", [False, True])
def test_readings_equal_the_reference(monkeypatch, replace):
    calls = record_calls(monkeypatch)
    model = gpt(torch.bfloat16)
    with Watch(model, every=1, store=(beside := [])):
        model(torch.arange(26, device="cuda").view(2, 13))
    with Watch(model, every=1, replace=replace, store=(readings := [])):
        model(torch.arange(26, device="cuda").view(2, 13))
    for measured in (beside, readings):
        for reading, (query, key, _, _) in zip(measured[:1], calls, strict=False):
            assert_reads(reading, query.cpu(), key.cpu(), is_causal=True)


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_step_waits_for_the_device(dtype, replace):
    def strict(step):
        if step == 3:  # kernels are compiled and memory is pinned once
            torch.cuda.set_sync_debug_mode("error")

    model = gpt(dtype)
    with Watch(model, every=1, store=(readings := []), replace=replace) as watch:
        train(model, steps=12, before=strict)
    assert len(readings) == 2 * 12
    assert str(watch.coverage()) == "2 of 2 attention layers watched"  # nothing raised inside


def test_torchs_encoder_in_evaluation_does_not_wait():
    model = TinyEncoder().cuda().eval()
    tokens = torch.zeros(2, 33, dtype=torch.long, device="cuda")
    with torch.no_grad(), Watch(model, every=1, store=(readings := [])) as watch:
        model(tokens)
        torch.cuda.set_sync_debug_mode("error")
        model(tokens)
        torch.cuda.set_sync_debug_mode("default")
    assert {reading.phase for reading in readings} == {"eval"}
    assert str(watch.coverage()) == "2 of 2 attention layers watched"


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("replace", [False, True])
def test_one_graph_with_the_readings_of_the_eager_model(mode, replace):
    torch._dynamo.reset()
    model = without_dropout(gpt())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with Watch(model, every=2, store=(eager := [])):
        expected = train(model, steps=5)
    model.load_state_dict(state)
    fast = torch.compile(model, fullgraph=True, mode=mode)
    torch._dynamo.utils.counters.clear()
    with Watch(model, every=2, store=(readings := []), replace=replace):
        found = train(fast, steps=5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()
    assert found == pytest.approx(expected, rel=1e-3)
    assert [(r.step, r.layer) for r in readings] == [(r.step, r.layer) for r in eager]
    for reading, other in zip(readings, eager, strict=True):
        assert reading.value("rows").tolist() == other.value("rows").tolist()
        assert reading.value("entropy") == pytest.approx(other.value("entropy"), rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replacing_computes_the_same_within_rounding(dtype):
    expected, found, readings, watch = twice(without_dropout(gpt(dtype)), replace=True)
    assert found == pytest.approx(expected, rel=1e-3 if dtype == torch.float32 else 2e-2)
    assert len(readings) == 2 * 4
    assert str(watch.coverage()) == "2 of 2 attention layers watched"


def test_gradients_of_a_replaced_call():
    class Attend(nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    found = []
    for replace in (False, True):
        torch.manual_seed(0)
        tensors = [torch.randn(2, 4, 65, 64, device="cuda") for _ in range(3)]
        tensors = [tensor.bfloat16().requires_grad_() for tensor in tensors]
        with Watch(model := Attend(), every=1, replace=replace):
            model(*tensors).sin().sum().backward()
        found.append([tensor.grad for tensor in tensors])
    for own, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, own, rtol=2e-2, atol=2e-2)


def test_a_call_that_is_recorded_into_a_cuda_graph_is_named():
    model = gpt().eval()
    tokens = torch.zeros(2, 33, dtype=torch.long, device="cuda")
    with torch.no_grad():
        expected = model(tokens)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model(tokens)
        torch.cuda.current_stream().wait_stream(side)
        with Watch(model, every=1) as watch:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = model(tokens)
            graph.replay()
    torch.testing.assert_close(out, expected)
    assert "2 layers not measured (it is being recorded into a CUDA graph)" in str(watch.coverage())


def test_attention_on_a_stream_of_the_users(monkeypatch):
    calls = record_calls(monkeypatch)
    model = gpt(torch.bfloat16)
    tokens = torch.arange(26, device="cuda").view(2, 13)
    side = torch.cuda.Stream()
    with Watch(model, every=1, store=(readings := [])) as watch:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)  # the merge must wait for it
            model(tokens)
        watch.step()
        torch.cuda.current_stream().wait_stream(side)
    assert_reads(readings[0], calls[0][0].cpu(), calls[0][1].cpu(), is_causal=True)


def test_numbers_arrive_where_cuda_is_the_default_device():
    class Kept(list):
        def write(self, readings=(), scalars=()):
            self += [*readings, *scalars]
            return True

    torch.set_default_device("cuda")
    try:
        model = gpt()
        with Watch(model, every=1, store=(kept := Kept())):
            # AdamW would put its count of steps on the default device, and refuse it there.
            losses = train(model, steps=3, optimizer_type=torch.optim.SGD)
    finally:
        torch.set_default_device(None)
    series = [one.value for one in kept if getattr(one, "name", "") == "loss"]
    assert series == pytest.approx(losses)
    assert sum(hasattr(one, "layer") for one in kept) == 2 * 3


def test_transformers_on_a_gpu():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 64}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).cuda()

    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = llama

        def forward(self, tokens):
            return self.model(tokens).logits

    expected, found, readings, _ = twice(Logits())
    assert found == expected
    assert len(readings) == 2 * 4
