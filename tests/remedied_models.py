"""Models of many makes, in small and in float64, and their logits as a watch reads them."""

import torch
from torch import nn
from torch.nn import functional as F
from watched_models import VOCABULARY, TinyEncoder, TinyGPT

import scaledot
from scaledot import Watch

TOKENS = torch.arange(14).view(2, 7) % VOCABULARY
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}


class Ours(nn.Module):
    """scaledot.nn's attention in a model."""

    def __init__(self, heads=3, **options):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 12)
        self.attention = scaledot.nn.MultiHeadAttention(12, heads, **options)
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.attention(self.embed(tokens), is_causal=True))


class Torchs(nn.Module):
    """nn.MultiheadAttention as it comes: weights asked for, one more key."""

    def __init__(self, need_weights=True):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 12)
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True, add_bias_kv=True)
        self.head = nn.Linear(12, VOCABULARY)
        self.need_weights = need_weights

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(self.attention(x, x, x, need_weights=self.need_weights)[0])


class Outside(nn.Module):
    """The module that attends has no weights: they are its parent's."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 12)
        self.to_q, self.to_k = nn.Linear(12, 12), nn.Linear(12, 12)
        self.attend = Attend()
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(self.attend(self.to_q(x), self.to_k(x), x))


class Attend(nn.Module):
    def forward(self, q, k, v):
        q, k, v = (x.unflatten(-1, (3, 4)).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Curved(Outside):
    """Queries are no linear function of any weight: rows scale them only roughly."""

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(self.attend(3 * torch.tanh(self.to_q(x)), self.to_k(x), x))


def of_transformers(name, **options):
    import transformers

    config = getattr(transformers, f"{name}Config")
    kind = {"Bert": "BertModel", "GPT2": "GPT2LMHeadModel"}.get(name, f"{name}ForCausalLM")
    sizes = SIZES
    if name == "GPT2":
        sizes = {
            "vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32,
            "bos_token_id": 0, "eos_token_id": 0,
        }  # fmt: skip
    if name == "DeepseekV3":
        options = {
            "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 6, "v_head_dim": 4, "moe_intermediate_size": 8,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
            "first_k_dense_replace": 2,
        }  # fmt: skip
    return getattr(transformers, kind)(config(**sizes, **options))


# By name: how to make it, and the layer that is treated.
BY_WEIGHTS = {
    "fused": (lambda: TinyGPT(), "layers.1.attn"),
    "fused, grouped": (lambda: TinyGPT(width=16, heads=4, groups=2), "layers.1.attn"),
    "one head": (lambda: TinyGPT(heads=1), "layers.0.attn"),
    "nn.MultiheadAttention": (Torchs, "attention"),
    "nn.TransformerEncoder": (TinyEncoder, "encoder.layers.1.self_attn"),
    "norm first": (lambda: TinyEncoder(norm_first=True), "encoder.layers.0.self_attn"),
    "scaledot.nn": (Ours, "attention"),
    "scaledot.nn, grouped": (lambda: Ours(heads=4, num_kv_heads=2), "attention"),
    "weights outside": (Outside, "attend"),
    "Llama": (lambda: of_transformers("Llama", num_key_value_heads=2), "model.layers.1.self_attn"),
    "Llama, eager": (
        lambda: of_transformers("Llama", num_key_value_heads=2, attn_implementation="eager"),
        "model.layers.0.self_attn",
    ),
    "Qwen 2 (biases)": (
        lambda: of_transformers("Qwen2", num_key_value_heads=2),
        "model.layers.0.self_attn",
    ),
    "GPT-2": (lambda: of_transformers("GPT2"), "transformer.h.1.attn"),
    "BERT": (lambda: of_transformers("Bert"), "encoder.layer.1.attention.self"),
    "DeepSeek V3": (lambda: of_transformers("DeepseekV3"), "model.layers.1.self_attn"),
}
NORMED = {
    "scaledot.nn": lambda: Ours(qk_norm=True),
    "cosine": lambda: Ours(score="cosine"),
    "Qwen 3": lambda: of_transformers("Qwen3", num_key_value_heads=2, head_dim=8),
    "OLMo 2": lambda: of_transformers("Olmo2"),
}


def made(make, sharp=3.0):
    """In float64, with biases that are not zero and weights large enough for unequal heads."""
    torch.manual_seed(0)
    model = make().double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.copy_(torch.randn_like(parameter) * sharp / parameter.shape[-1] ** 0.5)
    return model.eval()


def maxima(model, tokens=TOKENS):
    """Each layer's largest logits, [heads], float64 of the watch's float32."""
    readings = []
    with Watch(model, every=1, store=readings, alarms=False):
        model(tokens)
    return {one.layer: torch.from_numpy(one.value("max_logit")).double() for one in readings}
