"""Hugging Face transformers: real models in tiny configurations, through its attention registry."""

import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F
from watched_models import VOCABULARY, assert_reads, record_calls

from scaledot import Watch, reference

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
TOKENS = torch.arange(14).view(2, 7)
LEFT_PADDED = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1]])


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def llama(implementation):
    config = transformers.LlamaConfig(
        **SIZES, num_key_value_heads=2, attn_implementation=implementation
    )
    return transformers.LlamaForCausalLM(config)


def bert(implementation):
    config = transformers.BertConfig(**SIZES, attn_implementation=implementation)
    return transformers.BertModel(config, add_pooling_layer=False)


def record_eager(monkeypatch, model):
    """The model's own eager function, keeping what it was called with."""
    home = sys.modules[type(model).__module__]
    calls, original = [], home.eager_attention_forward

    def recording(module, query, key, value, attention_mask, **kwargs):
        calls.append((module, query.detach(), key.detach(), attention_mask, kwargs))
        return original(module, query, key, value, attention_mask, **kwargs)

    monkeypatch.setattr(home, "eager_attention_forward", recording)
    return calls


def run(model, **inputs):
    with Watch(model, every=1, store=(readings := [])) as watch:
        out = model(TOKENS, **inputs)
    return out, readings, watch


LLAMA_LAYERS = ["model.layers.0.self_attn", "model.layers.1.self_attn"]


@pytest.mark.parametrize("padded", [False, True])
def test_llama_with_torchs_function(monkeypatch, padded):
    model = llama("sdpa")
    calls = record_calls(monkeypatch)
    _, readings, watch = run(model, attention_mask=LEFT_PADDED if padded else None)
    assert [reading.layer for reading in readings] == LLAMA_LAYERS
    assert str(watch.coverage()) == "2 of 2 attention layers watched"
    assert len(calls) == 2
    for reading, (query, key, args, kwargs) in zip(readings, calls, strict=True):
        kwargs = {name: kwargs[name] for name in kwargs if name != "dropout_p"}
        assert reading.heads == 4
        assert_reads(reading, query, key, *args, **kwargs)


@pytest.mark.parametrize("padded", [False, True])
def test_llama_eager_grouped(monkeypatch, padded):
    model = llama("eager")
    calls = record_eager(monkeypatch, model)
    _, readings, watch = run(model, attention_mask=LEFT_PADDED if padded else None)
    assert [reading.layer for reading in readings] == LLAMA_LAYERS
    assert str(watch.coverage()) == "2 of 2 attention layers watched"
    for reading, (_, query, key, mask, kwargs) in zip(readings, calls, strict=True):
        assert key.shape[1] == 2
        assert_reads(reading, query, key, mask, scale=kwargs["scaling"], enable_gqa=True)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_bert_sees_its_padding(implementation):
    model = bert(implementation)
    right_padded = LEFT_PADDED.flip(1)
    _, readings, watch = run(model, attention_mask=right_padded)
    assert [reading.layer for reading in readings] == [
        "encoder.layer.0.attention.self",
        "encoder.layer.1.attention.self",
    ]
    assert str(watch.coverage()) == "2 of 2 attention layers watched"
    assert readings[0].value("pairs").tolist() == [7 * 7 + 7 * 4] * 4


def test_eager_and_torchs_function_read_the_same():
    eager, sdpa = llama("eager"), llama("sdpa")
    sdpa.load_state_dict(eager.state_dict())
    _, first, _ = run(eager, attention_mask=LEFT_PADDED)
    _, second, _ = run(sdpa, attention_mask=LEFT_PADDED)
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(
            torch.from_numpy(one.value("entropy")), torch.from_numpy(other.value("entropy"))
        )
        assert one.value("pairs").tolist() == other.value("pairs").tolist()


def test_gemma_2_caps_its_scores_and_has_windows(monkeypatch):
    config = transformers.Gemma2Config(
        **SIZES,
        num_key_value_heads=2,
        head_dim=4,
        query_pre_attn_scalar=5,
        attn_logit_softcapping=1.5,
        sliding_window=3,
        attn_implementation="eager",
        pad_token_id=0,
    )
    model = transformers.Gemma2ForCausalLM(config)
    calls = record_eager(monkeypatch, model)
    _, readings, _ = run(model)
    assert [reading.layer for reading in readings] == LLAMA_LAYERS
    for reading, (_, query, key, mask, kwargs) in zip(readings, calls, strict=True):
        assert kwargs["softcap"] == 1.5
        assert_reads(reading, query, key, mask, scale=5**-0.5, enable_gqa=True, softcap=1.5)
    triangle = 7 * 8 // 2
    assert [reading.value("pairs")[0] // 2 for reading in readings] == [3 * 7 - 3, triangle]


def test_gpt_oss_has_learned_sinks(monkeypatch):
    config = transformers.GptOssConfig(
        **SIZES,
        num_key_value_heads=2,
        head_dim=4,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=3,
        attn_implementation="eager",
        pad_token_id=0,
    )
    model = transformers.GptOssForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    calls = record_eager(monkeypatch, model)
    _, readings, _ = run(model)
    assert [reading.layer for reading in readings] == LLAMA_LAYERS
    for reading, (module, query, key, mask, kwargs) in zip(readings, calls, strict=True):
        assert (reading.value("off") > 0).all()
        assert_reads(
            reading,
            query,
            key,
            mask,
            scale=kwargs["scaling"],
            enable_gqa=True,
            sinks=module.sinks.detach(),
        )


def flash_like(module, query, key, value, attention_mask, **kwargs):
    """Stands in for the flash_attn package, which needs a GPU; the output is of no interest."""
    return torch.zeros_like(query).transpose(1, 2), None


def test_flash_attention_is_read_by_its_own_rules(monkeypatch):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    monkeypatch.setitem(AttentionInterface._global_mapping, "flash_attention_2", flash_like)
    module = torch.nn.Module()
    module.is_causal = True
    query, key = torch.randn(2, 4, 7, 5), torch.randn(2, 2, 7, 5)
    with Watch(every=1, store=(readings := [])):
        attend = ALL_ATTENTION_FUNCTIONS.get_interface("flash_attention_2", None)
        attend(module, query, key, key, None, scaling=0.4, sliding_window=3, softcap=2.0)
        attend(module, query, key, key, LEFT_PADDED, scaling=0.4)
        lengths = torch.tensor([0, 3, 7], dtype=torch.int32)
        attend(
            module, query[:1], key[:1], key[:1], None, cu_seq_lens_q=lengths, cu_seq_lens_k=lengths
        )
    real = LEFT_PADDED.bool()
    shared = {"enable_gqa": True, "is_causal": True}
    # The three calls are one module's in one step: one reading, their rows merged.
    (reading,) = readings
    first = reference.attention_with_vitals(
        query, key, None, scale=0.4, window=(2, 0), softcap=2.0, **shared
    )[1].over_batch()
    mask = real[:, None, None, :] & real[:, None, :, None]
    second = reference.attention_with_vitals(query, key, None, mask, scale=0.4, **shared)[1]
    packed = [tensor[0].transpose(0, 1) for tensor in (query, key)]
    third = reference.attention_with_vitals(*packed, None, cu_seqlens=(lengths, lengths), **shared)[
        1
    ]
    merged = first.merge(second.over_batch()).merge(third.over_batch())
    for name in ("rows", "pairs"):
        assert reading.value(name).tolist() == getattr(merged, name).tolist()
    for name in ("entropy", "max_logit", "row_std", "q_rms", "k_rms"):
        found, wanted = torch.from_numpy(reading.value(name)), getattr(merged, name).float()
        torch.testing.assert_close(found, wanted)


def test_unknown_implementations_are_named(monkeypatch):
    from transformers.modeling_utils import AttentionInterface

    monkeypatch.setitem(AttentionInterface._global_mapping, "sage", flash_like)
    model = llama("eager")
    model.config._attn_implementation = "sage"
    with Watch(model, every=1) as watch:
        layer = model.model.layers[0].self_attn
        layer(torch.randn(2, 7, 16), (torch.ones(2, 7, 4), torch.zeros(2, 7, 4)), None)
    assert "the watch does not know what 'sage' computes" in str(watch.coverage())


def through_torch(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """An implementation of somebody's own, as people register them."""
    key, value = (tensor.repeat_interleave(2, 1) for tensor in (key, value))
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("compile", [False, True])
def test_unknown_implementations_that_call_torchs_function_are_read_there(monkeypatch, compile):
    from transformers.modeling_utils import AttentionInterface

    monkeypatch.setitem(AttentionInterface._global_mapping, "mine", through_torch)
    model = llama("eager")
    model.config._attn_implementation = "mine"
    layer = model.model.layers[0].self_attn
    torch._dynamo.reset()
    run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compile else layer
    with Watch(model, every=1, store=(readings := [])) as watch:
        run(torch.randn(2, 7, 16), (torch.ones(2, 7, 4), torch.zeros(2, 7, 4)), None)
    assert [reading.layer for reading in readings] == LLAMA_LAYERS[:1]
    assert readings[0].value("pairs").tolist() == [2 * 28] * 4
    assert "does not know" not in str(watch.coverage())


def test_registry_and_names_are_left_alone():
    from transformers.modeling_utils import AttentionInterface

    mapping = AttentionInterface._global_mapping
    before, entries = vars(AttentionInterface)["get_interface"], dict(mapping)
    model = llama("eager")
    with Watch(model, every=1):
        model(TOKENS)
        assert mapping == entries
        assert model.config._attn_implementation == "eager"
    assert vars(AttentionInterface)["get_interface"] is before
    assert AttentionInterface._global_mapping is mapping
    assert all(mapping[name] is entries[name] for name in entries)


@pytest.mark.nightly
@pytest.mark.slow
def test_transformers_imported_after_the_watch_began():
    code = f"""
import scaledot, sys, torch
watch = scaledot.Watch(every=1, store=(readings := []))
assert "transformers" not in sys.modules
import transformers
config = transformers.LlamaConfig(**{SIZES!r}, attn_implementation="eager")
transformers.LlamaForCausalLM(config)(torch.arange(14).view(2, 7))
watch.remove()
from transformers.modeling_utils import AttentionInterface
print([reading.layer for reading in readings], AttentionInterface.get_interface.__module__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{LLAMA_LAYERS} transformers.modeling_utils"
