"""Remedies at the call: what they promise of the logits, on every path that lets them in."""

import math
import subprocess
import sys
import textwrap

import pytest
import torch
from remedied_models import (
    BY_WEIGHTS,
    TOKENS,
    Ours,
    Outside,
    Torchs,
    made,
    maxima,
    of_transformers,
)
from torch.nn import functional as F
from watched_models import TinyGPT, record_calls

import scaledot
from scaledot import Watch, reference
from scaledot.watch.remedies import RemedyError, apply

pytest.importorskip("transformers")
EXACT = {"rtol": 1e-6, "atol": 0.0}

AT_CALL = {
    "torch's function": (TinyGPT, "layers.1.attn"),
    "grouped": BY_WEIGHTS["fused, grouped"],
    "nn.MultiheadAttention": (lambda: Torchs(need_weights=False), "attention"),
    "scaledot.nn": (Ours, "attention"),
    "scaledot.nn without vitals": (lambda: Ours(measure=False), "attention"),
    "Llama": BY_WEIGHTS["Llama"],
    "Llama, eager": BY_WEIGHTS["Llama, eager"],
    "Qwen 3 (normed)": (
        lambda: of_transformers("Qwen3", num_key_value_heads=2, head_dim=8),
        "model.layers.1.self_attn",
    ),
}


@pytest.fixture(params=AT_CALL)
def treated(request):
    make, layer = AT_CALL[request.param]
    return made(make), layer


@pytest.mark.slow
@pytest.mark.one_case
def test_temperature_brings_heads_to_the_limit(treated):
    model, layer = treated
    before = maxima(model)[layer]
    limit = float(before.max()) / 2
    applied = apply(f"temperature:{limit!r}", model, inputs=TOKENS, heads={layer: None})
    torch.testing.assert_close(maxima(model)[layer], before.clamp(max=limit), **EXACT)
    applied.undo()
    torch.testing.assert_close(maxima(model)[layer], before, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.one_case
def test_norm_bounds_every_logit(treated):
    model, _ = treated
    before = maxima(model)
    applied = apply("qk-norm:1.5", model)
    bound = 1.5 * math.sqrt(getattr(getattr(model, "config", None), "head_dim", 4))
    for values in maxima(model).values():
        assert (values.abs() <= bound * (1 + 1e-6)).all()
    applied.undo()
    for layer, values in maxima(model).items():
        assert torch.equal(values, before[layer])


def test_norm_is_the_formula(monkeypatch):
    model = made(Outside)
    calls = record_calls(monkeypatch)
    model(TOKENS)
    (query, key, _, _), *_ = calls
    applied = apply("qk-norm:2", model)
    unit = [x / x.square().mean(-1, keepdim=True).sqrt() for x in (query, key)]
    expected = reference.attention_with_vitals(2 * unit[0], unit[1], None)[1].over_batch()
    torch.testing.assert_close(maxima(model)["attend"], expected.max_logit, **EXACT)
    applied.undo()


def softcapped(query, key, value, cap):
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    return torch.softmax(cap * torch.tanh(scores / cap), -1) @ value


@pytest.mark.parametrize("make", [Outside, lambda: Ours(measure=False)])
def test_softcap_is_computed_and_logits_are_read_before_it(make):
    model = made(make, sharp=5.0)
    layer = next(iter(maxima(model)))
    before, plain = maxima(model)[layer], model(TOKENS)
    applied = apply("softcap:2", model)
    assert before.max() > 4
    torch.testing.assert_close(maxima(model)[layer], before, **EXACT)
    assert not torch.allclose(model(TOKENS), plain)
    applied.undo()
    assert torch.equal(model(TOKENS), plain)


def test_softcap_is_the_formula():
    model = made(Outside, sharp=5.0)
    x = model.embed(TOKENS)
    q, k, v = (t.unflatten(-1, (3, 4)).transpose(1, 2) for t in (model.to_q(x), model.to_k(x), x))
    expected = model.head(softcapped(q, k, v, 2.0).transpose(1, 2).flatten(2))
    apply("softcap:2", model)
    torch.testing.assert_close(model(TOKENS), expected)


def test_log_n_keeps_the_rows_that_see_all_keys(monkeypatch):
    """Causal rows of n keys: ln(n) / ln(7) of what they were."""
    model = made(TinyGPT)
    calls = record_calls(monkeypatch)
    model(TOKENS)
    monkeypatch.undo()
    query, key = calls[0][:2]
    with Watch(model, every=1, store=(seen := []), alarms=False):
        applied = apply("log-n", model)
        model(TOKENS)
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    rows = torch.arange(1, 8, dtype=torch.float64).log() / math.log(7)
    allowed = torch.ones(7, 7).tril().bool()
    expected = (scores * rows[:, None]).masked_fill(~allowed, -math.inf).amax((0, 2, 3))
    found = torch.from_numpy(seen[0].value("max_logit")).double()
    torch.testing.assert_close(found, expected, **EXACT)
    assert applied.state_dict() == {".keys": torch.tensor(7.0)}
    applied.undo()


def test_log_n_of_its_own_length_changes_nothing_without_a_mask():
    model = made(Outside)
    before = model(TOKENS)
    apply("log-n:7", model)
    torch.testing.assert_close(model(TOKENS), before)


def test_learned_gains_are_trained_and_kept():
    model = made(TinyGPT).train()
    keys = set(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    applied = apply("qk-norm", model, optimizer, inputs=TOKENS)
    added = {f"layers.{number}.attn.scaledot_qk_gain" for number in (0, 1)}
    assert set(model.state_dict()) - keys == added
    assert "scaledot_qk_gain" in applied.describe()
    gain = model.layers[0].attn.scaledot_qk_gain
    for _ in range(2):
        loss = F.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten())
        loss.backward()
        optimizer.step()
    assert (gain != 1).all()
    state, trained = model.state_dict(), maxima(model.eval())
    other = made(TinyGPT)
    apply("qk-norm", other, torch.optim.SGD(other.parameters(), 0.1), inputs=TOKENS)
    other.load_state_dict(state)
    for layer, values in maxima(other).items():
        torch.testing.assert_close(values, trained[layer], rtol=0, atol=0)
    applied.undo()
    assert set(model.state_dict()) == keys
    assert len(optimizer.param_groups) == 1
    assert gain not in optimizer.state


@pytest.mark.slow
def test_a_factor_resumes_from_its_own_state():
    model = made(TinyGPT)
    limit = float(maxima(model)["layers.0.attn"].max()) / 3
    applied = apply(f"temperature:{limit!r}", model, inputs=TOKENS)
    expected, state, factors = model(TOKENS), model.state_dict(), applied.state_dict()
    assert set(factors) == {"layers.0.attn.factor", "layers.1.attn.factor"}
    applied.undo()
    other = made(TinyGPT)
    other.load_state_dict(state)
    again = apply("temperature:1e9", other, inputs=TOKENS)
    assert not torch.allclose(other(TOKENS), expected)
    again.load_state_dict(factors)
    assert torch.equal(other(TOKENS), expected)


def test_everything_is_put_back():
    before = F.scaled_dot_product_attention, scaledot.attention, scaledot.functional.attention
    first = apply("softcap", made(TinyGPT))
    with Watch(made(TinyGPT), every=1):
        second = apply("qk-norm", made(Outside))
        first.undo()
    second.undo()
    second.undo()
    assert before == (
        F.scaled_dot_product_attention,
        scaledot.attention,
        scaledot.functional.attention,
    )


def test_another_model_is_left_alone():
    model, other = made(TinyGPT), made(TinyGPT)
    before = other(TOKENS)
    apply("qk-norm", model)
    assert torch.equal(other(TOKENS), before)
    assert not torch.allclose(model(TOKENS), before)


def test_gradients_pass_through_the_factor():
    model = made(Outside)
    limit = float(maxima(model)["attend"].max()) / 2
    apply(f"temperature:{limit!r}", model, inputs=TOKENS)
    clipped = made(Outside)
    apply(f"qk-clip:{limit!r}", clipped, inputs=TOKENS)
    for one in (model, clipped):
        one(TOKENS).square().sum().backward()
    torch.testing.assert_close(model.embed.weight.grad, clipped.embed.weight.grad)
    gamma = clipped.to_q.weight / made(Outside).to_q.weight
    assert gamma.min() < 0.8
    # The same function of a weight that is smaller by the root: its slope is steeper by it.
    steeper = clipped.to_q.weight.grad * gamma
    torch.testing.assert_close(model.to_q.weight.grad, steeper)


def test_refusals_say_what_to_do():
    with pytest.raises(RemedyError, match="with need_weights=True, whose arguments cannot be"):
        apply("softcap", made(Torchs), inputs=TOKENS)
    with pytest.raises(RemedyError, match="softcap:50 is for all heads; leave heads out"):
        apply("softcap", made(TinyGPT), heads={"layers.0.attn": [0]})
    eager = made(BY_WEIGHTS["Llama, eager"][0])
    for remedy in ("softcap", "log-n"):
        for inputs in (None, TOKENS):
            with pytest.raises(RemedyError, match='load it with attn_implementation="sdpa"'):
                apply(remedy, eager, inputs=inputs)
    eager(TOKENS)


@pytest.mark.compile
def test_a_compiled_graph_does_not_let_it_in(fresh_dynamo):
    model = torch.compile(made(TinyGPT), backend="eager")
    with pytest.raises(RemedyError, match="a compiled graph does not let it in; use qk-clip"):
        apply("temperature", model, inputs=TOKENS)


@pytest.mark.compile
def test_a_graph_that_passes_it_by_is_told(fresh_dynamo, caplog):
    model = made(TinyGPT)
    plain = model(TOKENS)
    applied = apply("softcap:1", model)
    with caplog.at_level("WARNING", "scaledot.watch"):
        out = torch.compile(model, backend="eager", fullgraph=True)(TOKENS)
    assert torch.equal(out, plain)
    assert "does not reach into a compiled graph" in caplog.text
    applied.undo()


LATE = """
    import torch, scaledot
    from scaledot.watch import remedies
    with scaledot.Watch(every=1, store=(readings := []), alarms=False) as watch:
        installed = remedies.install(watch, "qk-norm", say=lambda line: None)
        import transformers
        from transformers.modeling_utils import AttentionInterface
        placed = AttentionInterface.get_interface
        config = transformers.LlamaConfig(
            vocab_size=29, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=4, attn_implementation="eager", initializer_range=1.0,
        )
        transformers.LlamaModel(config)(torch.arange(7)[None])
    assert readings[0].value("max_logit").max() <= 2.0001, readings[0].value("max_logit")
    installed.remove()
    assert AttentionInterface.get_interface is not placed
"""


@pytest.mark.nightly
def test_transformers_imported_after_the_remedy():
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(LATE)], check=False)
    assert done.returncode == 0
