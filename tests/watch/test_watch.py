"""The handle: nothing changes, nothing is left behind, everything has a name."""

import gc
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import optimizer as optimizers
from watched_models import (
    VOCABULARY,
    CausalSelfAttention,
    TinyEncoder,
    TinyGPT,
    assert_reads,
    record_calls,
    train,
)

import scaledot
from scaledot import Watch


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def tiny_llama(implementation):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.1,
        attn_implementation=implementation,
    )
    return transformers.LlamaForCausalLM(config)


def tiny_bert():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
    )
    return transformers.BertForMaskedLM(config)


MODELS = {
    "nanoGPT": TinyGPT,
    "grouped": lambda: TinyGPT(heads=6, groups=2),
    "checkpointed": lambda: TinyGPT(recompute="hooks"),
    "checkpointed, reentrant": lambda: TinyGPT(recompute="reentrant"),
    "nn.TransformerEncoder": TinyEncoder,
    "scaledot": lambda: nn.Sequential(
        nn.Embedding(VOCABULARY, 12),
        scaledot.nn.MultiHeadAttention(12, 3, dropout=0.1),
        nn.Linear(12, VOCABULARY),
    ),
    "Llama": lambda: tiny_llama("sdpa"),
    "Llama, eager": lambda: tiny_llama("eager"),
    "BERT": tiny_bert,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*requires_grad=True. Gradients will be None")
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_losses_are_the_same_to_the_bit(name, micro_batches):
    """Dropout draws from the global generator: one number taken by the watch would show."""
    torch.manual_seed(0)
    model = MODELS[name]()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    expected = train(model, steps=3, micro_batches=micro_batches, evaluate=True)
    model.load_state_dict(state)
    with Watch(model, every=1, store=(readings := [])) as watch:
        found = train(model, steps=3, micro_batches=micro_batches, evaluate=True)
    assert found == expected
    layers = {reading.layer for reading in readings}
    assert str(watch.coverage()).startswith(f"{len(layers)} of {len(layers)} attention layer")
    counted = {(reading.step, reading.layer, reading.phase) for reading in readings}
    assert counted == {(s, layer, "train") for s in range(3) for layer in layers} | {
        (s, layer, "eval") for s in (1, 2, 3) for layer in layers
    }
    assert len(readings) == len(counted)
    for reading in readings:  # recomputation is not counted, micro-batches are merged
        batches = micro_batches if reading.phase == "train" else 1
        assert reading.value("rows").tolist() == [batches * 2 * 7] * reading.heads


def test_micro_batches_merge_to_the_whole_batch(monkeypatch):
    model = TinyGPT(layers=1)
    calls = record_calls(monkeypatch)
    with Watch(model, every=1, store=(readings := [])):
        train(model, steps=1, micro_batches=3)
    queries, keys = (torch.cat([call[i] for call in calls]) for i in (0, 1))
    (reading,) = readings
    assert_reads(reading, queries, keys, is_causal=True)


def test_every_is_obeyed():
    model = TinyGPT(layers=1)
    with Watch(model, every=3, store=(readings := []), budget=1e-6):
        train(model, steps=8)
    assert [reading.step for reading in readings] == [0, 3, 6]


def test_watching_may_begin_in_the_middle_of_a_run():
    model = TinyGPT()
    train(model, steps=2)
    with Watch(model, every=1, store=(readings := [])):
        train(model, steps=1)
    assert [reading.layer for reading in readings] == ["layers.0.attn", "layers.1.attn"]


def everything_that_is_patched():
    return {
        "sdpa": F.scaled_dot_product_attention,
        "multi head": F.multi_head_attention_forward,
        "fast path": torch._native_multi_head_attention,
        "fast layer": torch._transformer_encoder_layer_fwd,
        "softmax": torch.softmax,
        "softmax of tensors": torch.Tensor.softmax,
        "ours": scaledot.attention,
        "our vitals": scaledot.functional._with_vitals,
        "hooks": dict(optimizers._global_optimizer_post_hooks),
        "finders": list(sys.meta_path),
    }


def test_remove_puts_everything_back():
    model = TinyGPT()
    hooks = [dict(module._forward_pre_hooks) for module in model.modules()]
    names, before = zip(*everything_that_is_patched().items(), strict=True)
    watch = Watch(model, every=1)
    during = tuple(everything_that_is_patched().values())
    pairs = zip(names, before, during, strict=True)
    assert [name for name, one, other in pairs if one is other] == []
    train(model, steps=1)
    watch.remove()
    watch.remove()
    after = tuple(everything_that_is_patched().values())
    for name, one, other in zip(names, before, after, strict=True):
        if isinstance(one, dict | list):
            assert other == one, name
        else:
            assert other is one, name
    assert [dict(module._forward_pre_hooks) for module in model.modules()] == hooks


def test_two_watches_may_leave_in_any_order():
    before = everything_that_is_patched()
    model, other = TinyGPT(layers=1), TinyGPT(layers=1)
    first = Watch(model, every=1, store=(mine := []))
    second = Watch(other, every=1, store=(theirs := []))
    model(torch.zeros(1, 3, dtype=torch.long))
    first.remove()
    other(torch.zeros(1, 5, dtype=torch.long))
    second.remove()
    assert [reading.value("rows")[0] for reading in mine] == [3]
    assert [reading.value("rows")[0] for reading in theirs] == [5]
    assert everything_that_is_patched() == before


def test_a_package_imported_between_two_watches_is_put_back(tmp_path, monkeypatch):
    import importlib

    from scaledot.watch.probes import flash
    from scaledot.watch.probes.patch import Attribute

    (tmp_path / "late_package.py").write_text("def attend(): return 'its own'")
    monkeypatch.syspath_prepend(tmp_path)

    def probes():
        home = sys.modules["late_package"]
        original = home.attend
        return (Attribute(home, "attend", lambda: f"watched, {original()}"),)

    monkeypatch.setattr(flash, "PLACES", (("late_package", probes),))
    with Watch(every=1):
        home = importlib.import_module("late_package")
        assert home.attend() == "watched, its own"
        with Watch(every=1):
            assert home.attend() == "watched, its own"
    assert home.attend() == "its own"
    del sys.modules["late_package"]


def test_a_wrapper_put_on_top_of_ours_is_left_alone():
    original = torch._native_multi_head_attention
    watch = Watch(every=1)
    ours = torch._native_multi_head_attention

    def theirs(*args):
        return ours(*args)

    torch._native_multi_head_attention = theirs
    try:
        watch.remove()
        assert torch._native_multi_head_attention is theirs
        module = nn.MultiheadAttention(4, 2, batch_first=True).eval()
        with torch.no_grad():  # what is left of ours passes everything through
            assert module(*[torch.randn(1, 3, 4)] * 3)[0].shape == (1, 3, 4)
    finally:
        torch._native_multi_head_attention = original


def test_a_watch_that_was_removed_says_so_and_is_not_entered_again():
    model = TinyGPT(layers=1)
    with Watch(model, every=1) as watch:
        train(model, steps=1)
    assert repr(watch).startswith("Watch: removed; 1 of 1 attention layer watched")
    with pytest.raises(RuntimeError, match="make a new one"), watch:
        pass


@pytest.mark.parametrize("wrong", [{"replace": "yes"}, {"on_alarm": 3}], ids=str)
def test_arguments_of_another_kind_are_refused_at_once(wrong):
    before = everything_that_is_patched()
    (name,) = wrong
    with pytest.raises(TypeError, match=f"{name} is .*; give"):
        Watch(TinyGPT(layers=1), **wrong)
    assert everything_that_is_patched() == before


def test_model_is_not_kept_alive():
    model = TinyGPT()
    weak = weakref.ref(model)
    watch = Watch(every=1)
    train(model, steps=1)
    del model
    gc.collect()
    assert weak() is None
    watch.remove()


def test_other_models_are_not_watched():
    model, other = TinyGPT(layers=1), TinyGPT(layers=1)
    with Watch(model, every=1, store=(readings := [])):
        other(torch.zeros(1, 3, dtype=torch.long))
    assert not readings


def test_without_a_model_everything_is_watched_under_its_own_root():
    model, other = TinyGPT(layers=1), TinyGPT(layers=1)
    with Watch(every=1, store=(readings := [])):
        model(torch.zeros(1, 3, dtype=torch.long))
        other(torch.zeros(1, 3, dtype=torch.long))
    assert [reading.layer for reading in readings] == ["layers.0.attn", "TinyGPT.layers.0.attn"]


def test_attention_outside_of_modules_has_its_functions_name():
    def attend(x):
        return F.scaled_dot_product_attention(x, x, x)

    with Watch(every=1, store=(readings := [])) as watch:
        attend(torch.randn(1, 2, 3, 4))
    (reading,) = readings
    assert reading.layer.endswith("attend")
    assert str(watch.coverage()) == "1 of 1 attention layer watched"


def test_several_attentions_of_one_module_are_told_apart():
    class SelfAndCross(nn.Module):
        def attend(self, q, k):
            return F.scaled_dot_product_attention(q, k, k)

        def forward(self, x, memory):
            for _ in range(2):  # the same line twice is the same attention
                x = self.attend(x, x)
            return self.attend(x, memory)

    model = SelfAndCross()
    with Watch(model, every=1, store=(readings := [])):
        model(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4))
    assert [(r.layer, r.value("pairs")[0]) for r in readings] == [
        ("SelfAndCross", 2 * 3 * 3),
        ("SelfAndCross#2", 3 * 5),
    ]


def test_layers_of_unequal_heads():
    model = nn.Sequential(CausalSelfAttention(12, 3), CausalSelfAttention(12, 6, 2))
    with Watch(model, every=1, store=(readings := [])):
        model(torch.randn(2, 5, 12))
    assert [(reading.layer, reading.heads) for reading in readings] == [("0", 3), ("1", 6)]


def test_batch_times_heads_is_folded_where_the_module_says_how():
    class Folded(nn.Module):
        num_heads = 3

        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x)

    model = Folded()
    x = torch.randn(6, 5, 4)  # 2 x 3 heads
    with Watch(model, every=1, store=(readings := [])):
        model(x)
    assert_reads(readings[0], x.view(2, 3, 5, 4), x.view(2, 3, 5, 4))


def test_wrappers_do_not_show_in_names():
    class Wrapper(nn.Module):
        def __init__(self, model):
            super().__init__()
            self._checkpoint_wrapped_module = model

        def forward(self, x):
            return self._checkpoint_wrapped_module(x)

    model = nn.Sequential(Wrapper(CausalSelfAttention()))
    with Watch(model, every=1, store=(readings := [])):
        model(torch.randn(2, 5, 12))
    assert [reading.layer for reading in readings] == ["0"]


def test_layers_added_later_are_named():
    model = nn.Sequential(CausalSelfAttention())
    with Watch(model, every=1, store=(readings := [])):
        model.append(CausalSelfAttention())
        model(torch.randn(2, 5, 12))
    assert [reading.layer for reading in readings] == ["0", "1"]


def test_inference_alone_is_read_when_the_watch_ends():
    model = TinyGPT().eval()
    with torch.inference_mode(), Watch(model, store=(readings := [])) as watch:
        model(torch.zeros(1, 3, dtype=torch.long))
    assert [(r.layer, r.phase) for r in readings] == [
        ("layers.0.attn", "eval"),
        ("layers.1.attn", "eval"),
    ]
    assert watch.latest["layers.0.attn", "eval"] is readings[0]


def test_step_by_hand():
    model = TinyGPT(layers=1)
    with Watch(model, every=1, store=(readings := [])) as watch:
        for _ in range(3):
            model(torch.zeros(1, 3, dtype=torch.long))
            watch.step()
    assert [reading.step for reading in readings] == [0, 1, 2]
    assert watch.step_number == 3


def test_replacing_computes_the_same_within_rounding(monkeypatch):
    torch.manual_seed(0)
    model = TinyGPT(recompute="hooks")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with Watch(model, every=1, store=(beside := [])):
        expected = train(model, steps=3)
    model.load_state_dict(state)
    calls = record_calls(monkeypatch)
    with Watch(model, store=(readings := []), replace=True):
        found = train(model, steps=3)
    assert not calls  # torch's function never ran, nor in the recomputation
    assert found == pytest.approx(expected, rel=1e-5)
    assert [r.value("rows").tolist() for r in readings] == [
        r.value("rows").tolist() for r in beside
    ]
    assert readings[0].value("entropy") == pytest.approx(beside[0].value("entropy"), rel=1e-4)


def test_trouble_in_the_watch_never_reaches_the_training(monkeypatch, caplog):
    def broken(*args, **kwargs):
        raise ArithmeticError("out of luck")

    model = TinyGPT(layers=1)
    monkeypatch.setattr(scaledot.functional, "vitals", broken)
    with Watch(model, every=1, store=(readings := [])) as watch:
        train(model, steps=2)
    assert not readings
    assert "1 layer not measured (ArithmeticError: out of luck): layers.0.attn" in repr(watch)
    assert len([r for r in caplog.records if "cannot measure" in r.message]) == 1


def test_a_failing_receiver_is_logged_and_the_others_go_on(caplog):
    class Full:
        def put(self, reading):
            raise OSError("no space left")

    with Watch(TinyGPT(layers=1), every=1, store=Full(), sinks=[readings := []]) as watch:
        train(watch.model, steps=1)
    assert len(readings) == 1
    assert "a receiver of readings failed" in caplog.text


def test_readings_and_scalars_reach_a_store(tmp_path):
    from scaledot.watch.store import RunReader

    path = tmp_path / "run.vitals"
    model = TinyGPT()
    with Watch(model, every=1, store=path):
        train(model, steps=3)
    run = RunReader(path)
    assert run.layers() == {"layers.0.attn": 3, "layers.1.attn": 3}
    assert [step.step for step in run.steps()] == [0, 1, 2]
    assert {"learning_rate", "step_time", "watch_cost"} <= set(run.scalar_names())
    assert run.attributes.more["coverage"] == "2 of 2 attention layers watched"


def test_the_store_ends_with_what_the_watch_cost_in_all(tmp_path):
    from scaledot.watch.store import RunReader

    path = tmp_path / "run.vitals"
    model = TinyGPT(layers=1)
    with Watch(model, every=5, store=path) as watch:
        train(model, steps=8)
    costs = RunReader(path).scalars("watch_cost")
    assert costs.steps.tolist() == [
        5,
        7,
    ]  # the first step's is not known yet; the last is no due one
    assert costs.values[-1] == pytest.approx(watch.cadence.share, rel=0.5)


@pytest.mark.slow
def test_memory_does_not_grow():
    model = TinyGPT(layers=1)
    data = torch.zeros(1, 3, dtype=torch.long)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def run(steps):
        for _ in range(steps):
            model(data).sum().backward()
            optimizer.step()
            with torch.no_grad():
                model(data)
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    with Watch(model, every=1):
        assert run(3) == run(20)


def test_wrong_arguments_say_what_to_do():
    with pytest.raises(ValueError, match="every=0 must be a whole number of steps, 1 or more"):
        Watch(every=0)
    with pytest.raises(ValueError, match=r"0.01 is 1 %"):
        Watch(budget=0)
    with pytest.raises(TypeError, match=r"give an nn.Module, or nothing"):
        Watch("model")
    with pytest.raises(TypeError, match="takes no readings; give the path of a file"):
        Watch(store=3)
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention


def test_import_of_the_package_does_not_bring_the_watch():
    code = "import scaledot, sys; print([name for name in sys.modules if 'scaledot.watch' in name])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert "Watch" in scaledot.__all__
