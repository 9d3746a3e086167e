"""What is watched, and what is named because it is not."""

import pytest
import torch
from torch import nn
from watched_models import CausalSelfAttention, TinyEncoder, TinyGPT, train

from scaledot import Watch
from scaledot.watch.coverage import Coverage, attention_modules


class ByHand(nn.Module):
    """softmax(q k^T) v in plain products: no probe can see it."""

    def __init__(self, width=12):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return (self.q_proj(x) @ self.k_proj(x).mT).softmax(-1) @ x


def step(watch, model, x):
    model(x)
    watch.step()
    return str(watch.coverage())


def test_before_anything_ran_nothing_is_claimed():
    with Watch(TinyGPT(), every=1) as watch:
        assert str(watch.coverage()) == "no attention seen yet; 2 layers look like attention"
    with Watch(every=1) as watch:
        assert str(watch.coverage()) == "no attention seen yet"


def test_all_watched():
    with Watch(model := TinyGPT(), every=1) as watch:
        train(model, steps=1)
        assert str(watch.coverage()) == "2 of 2 attention layers watched"


def test_plain_products_are_named():
    model = nn.Sequential(CausalSelfAttention(), ByHand(), ByHand())
    with Watch(model, every=1) as watch:
        words = step(watch, model, torch.randn(2, 5, 12))
    assert words == "1 of 3 attention layers watched; 2 layers use unhooked matmuls: 1, 2"
    assert watch.coverage().unseen == ("1", "2")


def test_nothing_but_plain_products():
    model = nn.Sequential(ByHand())
    with Watch(model, every=1) as watch:
        words = step(watch, model, torch.randn(2, 5, 12))
    assert words == "0 of 1 attention layer watched; 1 layer uses unhooked matmuls: 0"


def test_a_model_without_attention():
    model = nn.Linear(3, 3)
    with Watch(model, every=1) as watch:
        assert step(watch, model, torch.randn(2, 3)) == "no attention found"


def test_long_lists_are_cut():
    layers = tuple(f"layers.{i}" for i in range(20))
    words = str(Coverage((), layers))
    assert words.startswith("0 of 20 attention layers watched; 20 layers use unhooked matmuls: ")
    assert words.endswith("layers.7 and 12 more")


def test_reasons_are_grouped():
    coverage = Coverage(("a",), ("b", "c", "d"), {"b": "nested", "c": "nested"})
    assert str(coverage) == (
        "1 of 4 attention layers watched; 1 layer uses unhooked matmuls: d; "
        "2 layers not measured (nested): b, c"
    )


def test_the_innermost_module_is_the_attention():
    model = TinyEncoder()
    names = {module: name for name, module in model.named_modules()}
    assert [names[module] for module in attention_modules(model)] == [
        "encoder.layers.0.self_attn",
        "encoder.layers.1.self_attn",
    ]


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        ("Bert", "attention.self"),
        ("Llama", "self_attn"),
        ("GPT2", "attn"),
        ("T5", "SelfAttention"),
        ("ViT", "attention"),
    ],
)
def test_families_of_transformers_are_recognised(family, layers):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")()
    config.update({"num_hidden_layers": 2, "num_layers": 2, "num_decoder_layers": 2, "n_layer": 2})
    with torch.device("meta"):
        model = getattr(transformers, f"{family}Model")(config)
    names = {module: name for name, module in model.named_modules()}
    found = [names[module] for module in attention_modules(model)]
    assert len(found) == (6 if family == "T5" else 2)
    assert any(layers in name for name in found)
