"""transformers inside torch.compile: one graph whatever the cadence, measured as it is eager."""

import shutil

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from watched_models import VOCABULARY, assert_same, train

from scaledot import Watch

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.compile,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
LAYERS = ["model.layers.0.self_attn", "model.layers.1.self_attn"]
WATCHED = "2 of 2 attention layers watched"


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def of(family, implementation, head="ForCausalLM", **settings):
    config = getattr(transformers, f"{family}Config")(
        **{**SIZES, **settings}, attn_implementation=implementation
    )
    return getattr(transformers, f"{family}{head}")(config)


def llama(implementation):
    return of("Llama", implementation, num_key_value_heads=2)


def bert(implementation):
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return of("Bert", implementation, "ForMaskedLM", **quiet)


def compiled(model, backend="aot_eager"):
    counter = CompileCounterWithBackend(backend)
    return torch.compile(model, backend=counter, fullgraph=True), counter


def losses_of(model, state, run, **options):
    torch._dynamo.reset()
    model.load_state_dict(state)
    return train(run, steps=4, **options)


@pytest.mark.nightly
@pytest.mark.slow
def test_one_graph_same_losses_and_the_eager_readings():
    model = llama("eager")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    expected = losses_of(model, state, compiled(model)[0])
    with Watch(model, every=2, store=(eager := [])):
        losses_of(model, state, model)
    fast, counter = compiled(model)
    with Watch(model, every=2, store=(readings := [])) as watch:
        found = losses_of(model, state, fast)
    assert found == expected  # to the bit
    assert counter.frame_count == 1  # none anew when the cadence toggles
    assert str(watch.coverage()) == WATCHED
    assert [(r.step, r.phase) for r in readings] == [(step, "train") for step in (0, 0, 2, 2)]
    for one, other in zip(readings, eager, strict=True):
        assert one.layer == other.layer
        assert_same(one, other)


class Layer(nn.Module):
    """One attention of Llama without the model around it: a graph that is soon compiled."""

    def __init__(self, implementation):
        super().__init__()
        config = llama("eager").config
        config._attn_implementation = implementation
        self.attend = transformers.models.llama.modeling_llama.LlamaAttention(config, 0)

    def forward(self, x, mask=None):
        angles = x.new_ones(*x.shape[:2], 4), x.new_zeros(*x.shape[:2], 4)
        return self.attend(x, angles, mask)[0]


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")  # inductor's own
def test_generated_kernels_compute_the_same():
    model = Layer("eager")
    x = torch.randn(2, 7, 16)

    def found():
        torch._dynamo.reset()
        model.zero_grad()
        out = compiled(model, "inductor")[0](x)
        out.sin().sum().backward()
        return [out, *(parameter.grad for parameter in model.parameters())]

    plain = found()
    with Watch(model, every=1, store=(readings := [])):
        watched = found()
    assert all(torch.equal(one, other) for one, other in zip(watched, plain, strict=True))
    assert [(r.layer, r.phase) for r in readings] == [("attend", "train")]


@pytest.mark.nightly
@pytest.mark.slow
def test_other_lengths_are_compiled_as_often_as_without_the_watch():
    model = Layer("eager")

    def graphs():
        torch._dynamo.reset()
        fast, counter = compiled(model)
        for length in (7, 11, 13):
            fast(torch.randn(2, length, 16))
        return counter.frame_count

    expected = graphs()
    with Watch(model, every=1, store=(readings := [])):
        assert graphs() == expected
    # The rows of the step's three calls are merged.
    assert [r.value("rows").tolist() for r in readings] == [[2 * (7 + 11 + 13)] * 4]


def read_twice(model, **inputs):
    """What is read of one forward pass, uncompiled and compiled, and the second watch."""
    with Watch(model, every=1, store=(eager := [])):
        plain = first(model(**inputs))
    fast, counter = compiled(model)
    with Watch(model, every=1, store=(readings := [])) as watch:
        torch.testing.assert_close(first(fast(**inputs)), plain)
    assert counter.frame_count == 1
    return eager, readings, watch


def first(out):
    return out if isinstance(out, torch.Tensor) else out[0]


TOKENS = torch.arange(14).view(2, 7)
PADDED = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1]])


@pytest.mark.one_case
@pytest.mark.slow
@pytest.mark.parametrize(("family", "implementation"), [(llama, "sdpa"), (bert, "eager")])
def test_padding_is_followed(family, implementation):
    model = family(implementation)
    eager, readings, watch = read_twice(model, input_ids=TOKENS, attention_mask=PADDED)
    assert str(watch.coverage()) == WATCHED
    pairs = 28 + 10 if family is llama else 7 * 7 + 7 * 4
    for one, other in zip(readings, eager, strict=True):
        # Causal rows of padding see nothing, or what the model puts in the place of nothing.
        assert one.value("pairs")[0] >= pairs
        assert_same(one, other)


@pytest.mark.nightly
@pytest.mark.slow
def test_caps_windows_and_padding_are_followed():
    model = of(
        "Gemma2",
        "eager",
        num_key_value_heads=2,
        head_dim=4,
        query_pre_attn_scalar=5,
        attn_logit_softcapping=1.5,
        sliding_window=3,
        pad_token_id=0,
    )
    eager, readings, watch = read_twice(
        model, input_ids=TOKENS, attention_mask=PADDED, use_cache=False
    )
    assert [r.layer for r in readings] == LAYERS
    # Three of seven keys, less where the padding or the beginning leaves fewer.
    assert readings[0].value("pairs").tolist() == [1 + 2 + 5 * 3 + 1 + 2 + 2 * 3] * 4
    for one, other in zip(readings, eager, strict=True):
        assert_same(one, other)
    assert str(watch.coverage()) == WATCHED


@pytest.mark.slow
def test_a_bias_of_positions_is_added_where_a_step_is_due():
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=4,
        d_ff=16,
        num_layers=1,
        num_heads=4,
        dropout_rate=0.0,
        attn_implementation="eager",
    )
    model = transformers.T5EncoderModel(config)
    eager, readings, _ = read_twice(model, input_ids=TOKENS, attention_mask=PADDED)
    assert len(readings) == 1
    for one, other in zip(readings, eager, strict=True):
        assert_same(one, other)


def flash_like(module, query, key, value, attention_mask, **kwargs):
    """Stands in for the flash_attn package, which needs a GPU."""
    return query.transpose(1, 2).contiguous(), None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flash_attention_2", "sage"])
def test_what_is_followed_is_read_and_the_rest_is_named(monkeypatch, name):
    from transformers.modeling_utils import AttentionInterface

    monkeypatch.setitem(AttentionInterface._global_mapping, name, flash_like)
    eager, readings, watch = read_twice(Layer(name), x=torch.randn(2, 7, 16), mask=PADDED)
    if name == "sage":
        assert not readings
        assert "the watch does not know what 'sage' computes" in str(watch.coverage())
        return
    assert len(readings) == 1
    assert readings[0].value("pairs").tolist() == [28 + 10] * 4
    assert_same(readings[0], eager[0])


@pytest.mark.nightly
@pytest.mark.slow
def test_a_block_mask_is_followed_as_it_changes():
    """Without gradients: FlexAttention has no backward pass on a CPU."""
    from torch.nn.attention.flex_attention import create_block_mask

    model = llama("flex_attention").eval()
    fast, _ = compiled(model)
    tokens, pairs = torch.arange(26).view(2, 13), []

    def masks():
        for length in (11, 7, 5):
            kept = torch.tensor([length, 13])
            yield create_block_mask(
                lambda b, h, i, j, kept=kept: (i >= j) & (j < kept[b]), 2, None, 13, 13, "cpu"
            )

    with torch.no_grad():
        plain = [fast(tokens, attention_mask=mask, use_cache=False).logits for mask in masks()]
        torch._dynamo.reset()
        for found, mask in zip(plain, masks(), strict=True):
            with Watch(model, every=1, store=(readings := [])) as watch:
                out = fast(tokens, attention_mask=mask, use_cache=False).logits
            assert torch.equal(out, found)
            assert str(watch.coverage()) == WATCHED
            pairs += [reading.value("pairs").tolist() for reading in readings]
    whole = 13 * 14 // 2
    hidden = {length: (13 - length) * (14 - length) // 2 for length in (11, 7, 5)}
    assert pairs == [[2 * whole - hidden[length]] * 4 for length in (11, 7, 5) for _ in range(2)]
