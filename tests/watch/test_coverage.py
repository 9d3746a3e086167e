"""What is watched, and what is named because it is not."""

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
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


class Anonymous(nn.Module):
    """Attention by hand, under names that say nothing; the softmax in one of four spellings."""

    def __init__(self, softmax, width=12):
        super().__init__()
        self.softmax, self.three, self.rest = softmax, nn.Linear(width, 3 * width), nn.Dropout(0.1)

    def forward(self, x):
        a, b, c = self.three(x).chunk(3, -1)
        scores = (a @ b.mT / 3).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
        return self.rest(self.softmax(scores)) @ c


SPELLINGS = {
    "torch": lambda s: torch.softmax(s, dim=-1),
    "functional": lambda s: F.softmax(s, dim=-1, dtype=torch.float32),
    "method": lambda s: s.softmax(-1),
    "module": nn.Softmax(-1),
}


def train_by_hand(model, steps=3):
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(2, 5, 12)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_attention_by_hand_is_named_without_a_model_and_nothing_changes(spelling):
    model = nn.Sequential(nn.Linear(12, 12), Anonymous(SPELLINGS[spelling]))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    expected = train_by_hand(model)
    model.load_state_dict(state)
    before = torch.softmax, torch.special.softmax, F.softmax, torch.Tensor.softmax
    with Watch(every=1) as watch:
        assert train_by_hand(model) == expected
    assert (torch.softmax, torch.special.softmax, F.softmax, torch.Tensor.softmax) == before
    assert "softmax" not in vars(torch.Tensor)
    words = "0 of 1 attention layer watched; 1 layer uses unhooked matmuls: 1"
    assert str(watch.coverage()) == words


def test_attention_by_hand_beside_attention_that_is_seen():
    model = nn.Sequential(CausalSelfAttention(), Anonymous(SPELLINGS["torch"]))
    with Watch(every=1) as watch:
        train_by_hand(model, steps=1)
    assert str(watch.coverage()) == (
        "1 of 2 attention layers watched; 1 layer uses unhooked matmuls: 1"
    )


def test_a_part_of_a_layer_is_not_one_more_layer():
    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.k_proj = nn.Linear(12, 12), nn.Linear(12, 12)
            self.weigh = nn.Softmax(-1)
            self.attend = Attend()

        def forward(self, x):
            return self.attend(self.q_proj(x), self.k_proj(x), x)

    class Attend(nn.Module):
        def forward(self, q, k, v):
            return torch.softmax(q @ k.mT, -1) @ v

    model = nn.Sequential(Split())
    with Watch(every=1) as watch:
        train_by_hand(model, steps=1)
    assert watch.coverage().unseen == ("0",)


def test_the_softmax_of_a_classifier_or_a_router_is_no_attention():
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.narrow = nn.Linear(12, 4, bias=False), nn.Linear(12, 5)

        def forward(self, x):
            return torch.softmax(self.router(x), -1) @ F.softmax(self.narrow(x), -1)[:, :4]

    model = nn.Sequential(Routed())
    with Watch(every=1) as watch:
        train_by_hand(model, steps=1)
    assert str(watch.coverage()) == "no attention found"


def test_a_script_of_plain_products_that_only_generates():
    model = nn.Sequential(ByHand()).eval()
    with Watch(every=1) as watch, torch.no_grad():
        model(torch.randn(2, 5, 12))
    assert watch.coverage().unseen == ("0",)


def test_what_torch_script_compiles_is_not_disturbed():
    def attend(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x.mT, -1) @ x.softmax(-1)

    x = torch.randn(2, 5, 12)
    with Watch(every=1), pytest.warns(DeprecationWarning, match="torch.jit"):
        scripted = torch.jit.script(attend)
    torch.testing.assert_close(scripted(x), attend(x))


def test_a_model_that_no_probe_meets_is_found_by_its_optimizer():
    """Nothing of it calls a softmax, but it looks like attention: linear attention, for one."""

    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.k_proj = nn.Linear(12, 12), nn.Linear(12, 12)

        def forward(self, x):
            return self.q_proj(x) @ (self.k_proj(x).mT @ x)

    model = nn.Sequential(Linear())
    with Watch(every=1) as watch:
        train_by_hand(model, steps=1)
        assert watch.models() == "Sequential, 312 parameters, float32, 1 attention layer"
    assert str(watch.coverage()) == (
        "0 of 1 attention layer watched; 1 layer uses unhooked matmuls: 0"
    )


def test_the_account_outlives_the_model():
    def main():
        model = nn.Sequential(CausalSelfAttention(), ByHand(), CausalSelfAttention())
        train_by_hand(model, steps=1)

    with Watch(every=1) as watch:
        main()
        gc.collect()
        assert watch.models() == ""
        words = "2 of 3 attention layers watched; 1 layer uses unhooked matmuls: 1"
        assert str(watch.coverage()) == words
    assert str(watch.coverage()) == words


def test_layers_that_are_added_later_are_counted():
    model = nn.Sequential(CausalSelfAttention(), ByHand())
    with Watch(model, every=1) as watch:
        step(watch, model, torch.randn(2, 5, 12))
        model.append(CausalSelfAttention())
        assert step(watch, model, torch.randn(2, 5, 12)).startswith("2 of 3 attention layers")


def test_models_in_words():
    with Watch(every=1) as watch:
        assert watch.models() == ""
        model = TinyGPT()
        model(torch.zeros(1, 3, dtype=torch.long))
        assert watch.models().startswith("TinyGPT, ")
        assert watch.models().endswith(" parameters, float32, 2 attention layers")


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


@pytest.mark.slow
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


@pytest.mark.parametrize(
    "attend",
    [
        torch.ops.aten.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention.default,
        lambda *args: torch._C._nn.scaled_dot_product_attention(*args),
    ],
    ids=["packet", "overload", "binding"],
)
@pytest.mark.parametrize("given", [True, False])
def test_an_operator_called_past_torchs_function_is_named(attend, given):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch(model if given else None, every=1) as watch:
        q = model(torch.randn(1, 2, 3, 4))
        attend(q, q, q).sum().backward()
        optimizer.step()
    assert "not measured (called as an operator, past torch's public function)" in str(
        watch.coverage()
    )


def test_what_cannot_be_measured_is_logged_once(caplog):
    model = CausalSelfAttention()
    parameters = {name: one.detach()[None] for name, one in model.named_parameters()}

    def call(parameters):
        return torch.func.functional_call(model, parameters, torch.ones(2, 5, 12))

    with Watch(model, every=1) as watch, sdpa_kernel(SDPBackend.MATH):
        for _ in range(3):
            torch.func.vmap(call)(parameters)
            watch.step()
    assert len(caplog.records) == 1
    assert "it runs inside a transform of torch.func" in caplog.text
