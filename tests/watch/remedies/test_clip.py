"""QK-Clip on models of many makes: the head's logits are what was promised, the others' stay."""

import pytest
import torch
from remedied_models import BY_WEIGHTS, NORMED, TOKENS, Curved, Outside, Torchs, made, maxima
from torch import nn
from watched_models import TinyGPT

from scaledot.watch.remedies import RemedyError, apply, parse

pytest.importorskip("transformers")
EXACT = {"rtol": 1e-6, "atol": 0.0}


@pytest.fixture(params=BY_WEIGHTS)
def treated(request):
    make, layer = BY_WEIGHTS[request.param]
    return made(make), layer


def limit_between(values):
    """Some heads are above, and where there are several, some are not."""
    ordered = values.sort().values
    assert ordered[-1] > 0
    return float(ordered[-1] * 0.6 if len(ordered) == 1 else (ordered[-1] + ordered[-2]) / 2)


@pytest.mark.one_case
@pytest.mark.slow
def test_clipped_heads_end_at_the_limit_and_no_other_changes(treated):
    model, layer = treated
    before = maxima(model)[layer]
    limit = limit_between(before)
    applied = apply(f"qk-clip:{limit!r}", model, inputs=TOKENS, heads={layer: None})
    after = maxima(model)[layer]
    assert int((before > limit).sum()) >= 1
    torch.testing.assert_close(after, before.clamp(max=limit), **EXACT)
    assert layer in applied.describe()
    assert "a factor at the call" not in applied.describe()


@pytest.mark.one_case
@pytest.mark.slow
def test_undo_restores_every_bit_and_keys_never_change(treated):
    model, _ = treated
    before = {name: value.clone() for name, value in model.state_dict().items()}
    applied = apply("qk-clip:0.01", model, inputs=TOKENS)
    assert model.state_dict().keys() == before.keys()
    changed = [name for name, value in model.state_dict().items() if (value != before[name]).any()]
    assert changed
    applied.undo()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.slow
@pytest.mark.one_case
def test_a_clipped_model_resumes_from_its_checkpoint(treated):
    model, layer = treated
    apply("qk-clip:0.01", model, inputs=TOKENS)
    clipped = maxima(model)[layer]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(state)
    torch.testing.assert_close(maxima(model)[layer], clipped, rtol=0, atol=0)


def test_finding_the_rows_leaves_no_trace():
    model = made(TinyGPT).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    applied = apply("qk-clip:1e9", model, inputs=TOKENS)
    assert torch.equal(random, torch.get_rng_state())
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert "nothing had to be changed" in applied.describe()


def test_biases_are_clipped_too():
    """Without them the logit would miss the limit."""
    model = made(TinyGPT)
    bias = model.layers[0].attn.c_attn.bias.detach().clone()
    apply("qk-clip:0.01", model, inputs=TOKENS, heads={"layers.0.attn": [1]})
    changed = (model.layers[0].attn.c_attn.bias != bias).nonzero().flatten().tolist()
    assert changed == [4, 5, 6, 7, 16, 17, 18, 19]  # q and k of head 1; v is left alone


def test_grouped_keys_are_left_alone():
    model = made(BY_WEIGHTS["Llama"][0])
    attention = model.model.layers[0].self_attn
    key = attention.k_proj.weight.detach().clone()
    applied = apply("qk-clip:0.01", model, inputs=TOKENS)
    assert torch.equal(attention.k_proj.weight, key)
    assert "query rows of the head by gamma (its keys serve other heads too)" in applied.describe()


@pytest.mark.slow
def test_latent_attention_has_its_own_rule():
    """Kimi K2: the root for both compressed parts, gamma for q's rotary part, k's untouched."""
    model = made(BY_WEIGHTS["DeepSeek V3"][0])
    layer = "model.layers.1.self_attn"
    attention = model.model.layers[1].self_attn
    names = ("q_b_proj", "kv_b_proj", "kv_a_proj_with_mqa")
    before = {name: getattr(attention, name).weight.detach().clone() for name in names}
    largest = maxima(model)[layer]
    limit = float(largest.max()) / 4
    apply(f"qk-clip:{limit!r}", model, inputs=TOKENS, heads={layer: [int(largest.argmax())]})
    ratio = {name: getattr(attention, name).weight / before[name] for name in names}
    head = int(largest.argmax())
    query = ratio["q_b_proj"].unflatten(0, (4, 10))
    key = ratio["kv_b_proj"].unflatten(0, (4, 10))
    half, whole, one = (torch.full((), value).double() for value in (0.5, 0.25, 1.0))
    assert_all(query[head, :6], half)
    assert_all(query[head, 6:], whole)
    assert_all(key[head, :6], half)
    assert_all(key[head, 6:], one)  # values
    assert_all(ratio["kv_a_proj_with_mqa"], one)
    others = [number for number in range(4) if number != head]
    assert_all(query[others], one)
    assert_all(key[others], one)


def assert_all(tensor, value):
    torch.testing.assert_close(tensor, value.expand_as(tensor), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", NORMED)
def test_refused_after_a_norm_of_queries_and_keys(name):
    model = made(NORMED[name])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RemedyError, match="a norm follows the weights that make its queries"):
        apply("qk-clip:0.01", model, inputs=TOKENS)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_rows_that_scale_a_head_only_roughly_fall_back_to_a_factor_at_the_call():
    model = made(Curved)
    before = maxima(model)["attend"]
    limit = limit_between(before)
    applied = apply(f"qk-clip:{limit!r}", model, inputs=TOKENS)
    assert "a factor at the call, since" in applied.describe()
    torch.testing.assert_close(maxima(model)["attend"], before.clamp(max=limit), **EXACT)
    applied.undo()
    torch.testing.assert_close(maxima(model)["attend"], before, rtol=0, atol=0)


def test_refused_where_neither_weights_nor_call_can_be_changed():
    """Weights asked for: torch multiplies the matrices itself."""

    class Biased(Torchs):
        def forward(self, tokens):
            x = self.embed(tokens)
            bias = torch.linspace(0, 1, 7 * 7).view(7, 7).to(x)
            return self.head(self.attention(x, x, x, attn_mask=bias)[0])

    with pytest.raises(RemedyError, match="a bias is added to its scores") as refused:
        apply("qk-clip:0.01", made(Biased), inputs=TOKENS)
    assert "whose arguments cannot be changed on their way" in str(refused.value)


class Adapted(Outside):
    """A low-rank addition to the query's projection, as in LoRA."""

    def __init__(self, frozen):
        super().__init__()
        self.down, self.up = nn.Linear(12, 2, bias=False), nn.Linear(2, 12, bias=False)
        self.to_q.requires_grad_(not frozen)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(self.attend(self.to_q(x) + self.up(self.down(x)), self.to_k(x), x))


@pytest.mark.parametrize("frozen", [False, True])
def test_adapters_are_scaled_along_and_frozen_weights_never(frozen):
    model = made(lambda: Adapted(frozen))
    before, weight = maxima(model)["attend"], model.to_q.weight.detach().clone()
    limit = limit_between(before)
    applied = apply(f"qk-clip:{limit!r}", model, inputs=TOKENS)
    torch.testing.assert_close(maxima(model)["attend"], before.clamp(max=limit), **EXACT)
    assert torch.equal(model.to_q.weight, weight) == frozen
    assert ("a factor at the call" in applied.describe()) == frozen
    assert ("up.weight" in applied.describe()) != frozen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_smaller_types_are_clipped_to_their_rounding(dtype):
    model = made(Outside).to(dtype)
    before = maxima(model)["attend"]
    limit = limit_between(before)
    apply(f"qk-clip:{limit!r}", model, inputs=TOKENS)
    rounding = torch.finfo(dtype).eps
    expected = before.clamp(max=limit)
    torch.testing.assert_close(maxima(model)["attend"], expected, rtol=8 * rounding, atol=0)


def test_a_head_that_is_never_positive_is_left_alone():
    """Megatron-LM 7382: a root of a negative number."""
    model = made(Outside)
    with torch.no_grad():
        model.to_q.bias.fill_(100.0)
        model.to_k.bias.fill_(-100.0)
    before = maxima(model)["attend"]
    assert (before < 0).all()
    apply("qk-clip:1", model, inputs=TOKENS)
    torch.testing.assert_close(maxima(model)["attend"], before, rtol=0, atol=0)


@pytest.mark.slow
def test_mistakes_are_named():
    model = made(TinyGPT)
    with pytest.raises(RemedyError, match=r"give one batch: apply\('qk-clip:100', model, inputs="):
        apply(parse("qk-clip"), model)
    with pytest.raises(RemedyError, match=r"no layer 'attn'; there are layers.0.attn, layers.1"):
        apply("qk-clip", model, inputs=TOKENS, heads={"attn": [0]})
    with pytest.raises(RemedyError, match="has heads 0 to 2, and no 3"):
        apply("qk-clip", model, inputs=TOKENS, heads={"layers.0.attn": [3]})
    with pytest.raises(RemedyError, match="called no attention"):
        apply("qk-clip", nn.Linear(3, 3), inputs=torch.ones(2, 3))
