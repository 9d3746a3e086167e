"""Whole trainings as people run them: compiled, sharded, and of many families."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from watched_models import VOCABULARY, TinyEncoder, TinyGPT, assert_same, train

from scaledot import Watch

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def of_transformers(family, head="ForCausalLM", **settings):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **settings})
    return getattr(transformers, f"{family}{head}")(config)


COMPILED = {
    "checkpointed": lambda: TinyGPT(recompute="hooks"),
    "nn.TransformerEncoder": TinyEncoder,
    "Llama": lambda: of_transformers("Llama", num_key_value_heads=2),
    "BERT": lambda: of_transformers("Bert", "ForMaskedLM"),
}


@pytest.mark.slow
@pytest.mark.one_case
@pytest.mark.compile
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_losses_are_the_same_to_the_bit(name):
    """With accumulation. Graphs draw their own random numbers: the seed is the same, and so are
    they, unless the watch takes one."""
    model = COMPILED[name]()
    state = {key: value.clone() for key, value in model.state_dict().items()}

    def losses():
        torch._dynamo.reset()
        model.load_state_dict(state)
        counter = CompileCounterWithBackend("aot_eager")
        fast = torch.compile(model, backend=counter, fullgraph=True)
        return train(fast, steps=3, micro_batches=2), counter.frame_count

    expected, graphs = losses()
    with Watch(model, every=2, store=(readings := [])) as watch:
        found, watched_graphs = losses()
    torch._dynamo.reset()
    assert found == expected
    assert watched_graphs == graphs == 1
    assert str(watch.coverage()) == "2 of 2 attention layers watched"
    assert [reading.step for reading in readings] == [0, 0, 2, 2]
    assert all(r.value("rows").tolist() == [2 * 2 * 7] * r.heads for r in readings)


ZOO = {
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 4},
    "Qwen3Next": {
        "num_key_value_heads": 2,
        "head_dim": 4,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 4,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "DeepseekV3": {  # keys wider than values
        "num_key_value_heads": 4,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "n_routed_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 8,
    },
    "Mixtral": {"num_key_value_heads": 2, "num_local_experts": 2},
}
WATCHED = {"Qwen3Next": "1 of 1"}  # linear attention has no softmax to be measured


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ZOO)
def test_families_are_watched_and_unchanged(family, implementation):
    model = of_transformers(family, attn_implementation=implementation, **ZOO[family])
    state = {key: value.clone() for key, value in model.state_dict().items()}
    expected = train(model, steps=2)
    model.load_state_dict(state)
    with Watch(every=1, store=(readings := [])) as watch:
        found = train(model, steps=2)
    assert found == expected
    assert readings
    words = f"{WATCHED.get(family, '2 of 2')} attention layer"
    assert str(watch.coverage()).startswith(words)


def test_t5_is_watched_or_named():
    """Its bias of positions, and three kinds of attention."""
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4
    )
    model = transformers.T5ForConditionalGeneration(config)
    tokens = torch.arange(14).view(2, 7)
    with Watch(every=1) as watch:
        model(tokens, decoder_input_ids=tokens).logits.sum().backward()
        watch.step()
    account = watch.coverage()
    assert len(account.watched) + len(account.unseen) == 3


def test_decoding_one_token_at_a_time():
    model = of_transformers("Llama", num_key_value_heads=2).eval()
    tokens = torch.arange(5)[None]
    with torch.no_grad(), Watch(model, every=1, store=(readings := [])):
        past = model(tokens, use_cache=True).past_key_values
        model(tokens[:, :1], past_key_values=past, use_cache=True)
    reading = readings[0]  # both calls, merged: 5 rows of 1 to 5 keys, and one of 6
    assert reading.value("rows").tolist() == [6] * 4
    assert reading.value("pairs").tolist() == [15 + 6] * 4


@pytest.mark.slow
def test_fully_sharded_layers_are_named_and_read_as_ever(tmp_path):
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = TinyGPT()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with Watch(every=1, store=(whole := [])):
        train(model, steps=1)
    model.load_state_dict(state)
    where = f"file://{tmp_path / 'meeting'}"
    distributed.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with Watch(every=1, store=(readings := [])) as watch:
            train(model, steps=1)
        assert str(watch.coverage()) == "2 of 2 attention layers watched"
    finally:
        distributed.destroy_process_group()
    for one, other in zip(readings, whole, strict=True):
        assert one.layer == other.layer
        assert_same(one, other)
