"""Remedies in a watched run: after each optimizer step, from that step's largest logits."""

import logging

import pytest
import torch
from remedied_models import BY_WEIGHTS, NORMED, TOKENS, Curved, Outside, made, maxima
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from watched_models import TinyGPT, language_loss, train

from scaledot import Watch
from scaledot.watch import report
from scaledot.watch.probes import hub
from scaledot.watch.remedies import RemedyError, install
from scaledot.watch.store import RunReader
from scaledot.watch.top import picture
from scaledot.watch.top.frame import frame_of
from scaledot.watch.top.history import History

LIMIT = 2.0


def training(make):
    """In training mode, without dropout: two runs are to be the same."""
    model = made(make).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def steps(model, number=4, optimizer=None, micro_batches=1):
    """Each step's loss. Batches differ from step to step."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=3e-2)
    losses = []
    for step in range(number):
        for part in range(micro_batches):
            tokens = (TOKENS * (step * micro_batches + part + 1)) % 29
            loss = language_loss(model(tokens), tokens)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def clipped_by_hand(model, readings, rows, done):
    """QK-Clip as the paper writes it, after the step whose readings these are."""
    for reading in readings[done:]:
        attention = model.get_submodule(reading.layer)
        for head, largest in enumerate(reading.value("max_logit")):
            if largest > LIMIT:
                factor = (LIMIT / torch.tensor(float(largest), dtype=torch.float64)).sqrt()
                for part in rows(attention, head):
                    part.mul_(factor)
    return len(readings)


def fused_rows(attention, head):
    """[q; k; v], each of heads * size rows."""
    size, width = attention.size, attention.size * attention.heads
    for first in (head * size, width + head * size):
        yield attention.c_attn.weight.data[first : first + size]
        yield attention.c_attn.bias.data[first : first + size]


def test_a_run_is_clipped_as_published():
    model, twin = training(TinyGPT), training(TinyGPT)
    with Watch(model, every=1, store=(readings := []), alarms=False) as watch:
        installed = install(watch, f"qk-clip:{LIMIT}", say=(said := []).append)
        losses = steps(model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-4))
    by_hand = []
    optimizer = torch.optim.SGD(twin.parameters(), lr=1e-4)
    with Watch(twin, every=1, store=(theirs := []), alarms=False):
        done = 0
        for step in range(4):
            tokens = (TOKENS * (step + 1)) % 29
            loss = language_loss(twin(tokens), tokens)
            loss.backward()
            by_hand.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            done = clipped_by_hand(twin, theirs, fused_rows, done)
    assert losses == pytest.approx(by_hand, rel=1e-6)
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)  # a reading is float32
    clips = sum(int((one.value("max_logit") > LIMIT).sum()) for one in readings)
    assert sum(sum(heads.values()) for heads in installed.clips.values()) == clips > 0
    assert len(said) == 2  # once a layer
    assert "layers.0.attn since step 0" in said[0]
    assert f"has clipped {clips} times" in installed.describe()


def test_the_next_step_starts_at_the_limit():
    """The same batch, a learning rate of zero: what was clipped is what is read."""
    model = training(Outside)
    with Watch(model, every=1, store=(readings := []), alarms=False) as watch:
        install(watch, f"qk-clip:{LIMIT}", say=lambda line: None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(2):
            model(TOKENS).sum().backward()
            optimizer.step()
    before, after = (torch.from_numpy(one.value("max_logit")) for one in readings)
    torch.testing.assert_close(after, before.clamp(max=LIMIT), rtol=1e-6, atol=0)
    assert (before > LIMIT).any()


@pytest.mark.one_case
@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["reentrant", "hooks"])
def test_recomputation_and_micro_batches_change_nothing(recompute):
    """The largest logit over the step's micro-batches decides."""
    losses = []
    for kind in (None, recompute):
        model = training(lambda kind=kind: TinyGPT(recompute=kind))
        with Watch(model, every=1, alarms=False) as watch:
            installed = install(watch, f"qk-clip:{LIMIT}", say=lambda line: None)
            losses.append(steps(model, micro_batches=2))
        assert installed.clips
        assert not installed.refused
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


def test_two_optimizers_clip_after_the_one_that_has_the_weights():
    model = training(Outside)
    mine = [*model.to_q.parameters(), *model.to_k.parameters()]
    rest = [p for p in model.parameters() if all(p is not one for one in mine)]
    optimizers = torch.optim.SGD(rest, lr=0.1), torch.optim.SGD(mine, lr=0.1)
    with Watch(model, every=1, alarms=False) as watch:
        install(watch, "qk-clip:0.5", say=lambda line: None)
        model(TOKENS).square().sum().backward()
        key = model.to_k.weight.detach().clone()
        optimizers[0].step()
        assert torch.equal(model.to_k.weight, key)
        stepped = key - 0.1 * model.to_k.weight.grad
        largest = torch.from_numpy(watch.latest[("attend", "train")].value("max_logit")).double()
        optimizers[1].step()
    factor = (0.5 / largest).clamp(max=1).sqrt().repeat_interleave(4)[:, None]
    torch.testing.assert_close(model.to_k.weight, stepped * factor, rtol=1e-6, atol=1e-12)


def test_steps_that_are_not_measured_are_left_alone():
    model = training(Outside)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen = []
    with Watch(model, every=3, alarms=False) as watch:
        install(watch, "qk-clip:0.5", say=lambda line: None)
        for step in range(7):
            with torch.no_grad():
                model.to_q.weight.mul_(1.5)
            before = model.to_q.weight.detach().clone()
            model(TOKENS).sum().backward()
            optimizer.step()
            if not torch.equal(model.to_q.weight, before):
                seen.append(step)
    assert seen == [0, 3, 6]


def test_without_a_cadence_every_step_is_measured_in_a_dry_run_too():
    for dry_run in (False, True):
        with Watch(training(Outside), alarms=False) as watch:
            install(watch, "qk-clip", dry_run, say=lambda line: None)
            assert (watch.cadence.fixed, watch.cadence.every) == (True, 1)


@pytest.mark.parametrize("dry_run", [False, True])
def test_the_store_keeps_what_a_remedy_did_and_the_report_and_top_tell_it(tmp_path, dry_run):
    model, path = training(TinyGPT), tmp_path / "r.vitals"
    with Watch(model, store=path, alarms=False) as watch:
        installed = install(watch, f"qk-clip:{LIMIT}", dry_run, say=lambda line: None)
        steps(model)
    (note,) = RunReader(path).attributes.more["remedies"]
    assert (note["spec"], note["dry_run"], note["since"]) == ("qk-clip:2", dry_run, 0)
    assert note["words"] == installed.describe()
    facts, verdict = report.examine(path)
    story = "qk-clip:2 was tried without a change" if dry_run else "qk-clip:2 was at work"
    assert verdict.sentences[0].startswith(f"{story} since step 0 (layers.0.attn")
    assert report.data.as_data(facts, verdict)["at_work"] == [note]
    shown = "\n".join(
        line.plain for line in picture.draw(frame_of(History(path), "passes"), 160, 50)
    )
    assert ("qk-clip:2 since step 0 (dry run)" if dry_run else "qk-clip:2 since step 0") in shown


@pytest.mark.slow
def test_a_remedy_that_found_nothing_to_do_says_so(tmp_path):
    model, path = training(TinyGPT), tmp_path / "r.vitals"
    with Watch(model, store=path, alarms=False) as watch:
        install(watch, "qk-clip:1e9", say=lambda line: None)
        steps(model)
    assert report.examine(path)[1].sentences[0] == (
        "qk-clip:1e+09 was installed and had nothing to do."
    )


class NoReading(TorchDispatchMode):
    """The host waits for a device where it asks for a number."""

    def __init__(self):
        super().__init__()
        self.asked, self.seen = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.asked.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("remedy", ["qk-clip:2", "temperature:2"])
def test_the_host_reads_nothing_once_the_weights_are_known(remedy):
    model = training(Outside)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Watch(model, every=1, alarms=False) as watch:
        installed = install(watch, remedy, say=lambda line: None)
        ended, mode = installed._ends._ended, NoReading()

        def looked_at(optimizer):
            with mode:
                ended(optimizer)

        for step in range(3):
            with torch.no_grad():
                model.to_q.weight.mul_(3.0)
            model(TOKENS).sum().backward()
            if step:  # in the first the weights are found
                installed._ends._ended = looked_at
            optimizer.step()
    assert mode.seen > 0
    assert not mode.asked
    assert sum(installed.clips["attend"].values()) > 3


def test_dry_run_says_and_changes_nothing():
    plain = steps(training(TinyGPT))
    model = training(TinyGPT)
    with Watch(model, every=1, alarms=False) as watch:
        installed = install(watch, f"qk-clip:{LIMIT}", dry_run=True, say=(said := []).append)
        assert steps(model) == plain
    assert "would scale layers.0.attn since step 0: head" in said[0]
    assert "query and key rows of the head by sqrt(gamma) each: layers.0.attn.c_attn" in said[0]
    assert "(dry run): would have clipped" in installed.describe()


def test_lines_go_to_the_log_where_nobody_takes_them(caplog):
    model = training(TinyGPT)
    with caplog.at_level(logging.WARNING), Watch(model, every=1, alarms=False) as watch:
        install(watch, f"qk-clip:{LIMIT}")
        steps(model, 1)
    assert "qk-clip:2 scales layers.0.attn since step 0" in caplog.text


@pytest.mark.parametrize("name", ["Qwen 3", "scaledot.nn"])
def test_refused_after_a_norm_and_the_run_goes_on(name):
    pytest.importorskip("transformers")
    model = training(NORMED[name])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with Watch(model, every=1, alarms=False) as watch:
        installed = install(watch, "qk-clip:0.01", say=(said := []).append)
        for _ in range(2):
            out = model(TOKENS)
            getattr(out, "logits", out).sum().backward()
            optimizer.step()
    assert set(installed.refused) == set(installed.layers)
    assert all("a norm follows" in line for line in said)
    assert len(said) == len(installed.layers)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.one_case
@pytest.mark.slow
@pytest.mark.parametrize(("make", "remedy"), [(Curved, "qk-clip:2"), (Outside, "temperature:2")])
def test_a_factor_at_the_call_follows_the_readings(make, remedy):
    model = training(make)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Watch(model, every=1, store=(readings := []), alarms=False) as watch:
        installed = install(watch, remedy, say=lambda line: None)
        for _ in range(3):
            with torch.no_grad():
                model.to_k.weight.mul_(1.2)  # grows on
                model.to_k.bias.mul_(1.2)
            model(TOKENS).sum().backward()
            optimizer.step()
    first, second, third = (torch.from_numpy(one.value("max_logit")) for one in readings)
    over = first > LIMIT
    assert over.any()
    expected = torch.where(over, torch.tensor(LIMIT), first) * 1.2
    torch.testing.assert_close(second, expected, rtol=1e-6, atol=0)
    assert (third <= LIMIT * 1.2 * (1 + 1e-6)).all()
    assert "at the call" in installed.describe()
    installed.remove()
    assert maxima(model)["attend"].max() > 1.2 * LIMIT


@pytest.mark.one_case
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("remedy", ["softcap:1", "qk-norm", "log-n:3"])
def test_remedies_without_readings_begin_with_the_first_call(remedy, given):
    model = training(TinyGPT)
    plain = model(TOKENS)
    with Watch(model if given else None, every=1, alarms=False) as watch:
        installed = install(watch, remedy, say=lambda line: None)
        assert not torch.allclose(model(TOKENS), plain)
    installed.remove()
    assert torch.equal(model(TOKENS), plain)


def test_sigma_reparam_comes_with_the_first_step():
    model = training(TinyGPT)
    with Watch(every=1, alarms=False) as watch:
        install(watch, "sigma-reparam", say=(said := []).append)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        steps(model, 3, optimizer)
    gain = model.layers[0].attn.c_attn.parametrizations.weight[0].gain
    assert "gains learned" in said[0]
    assert gain in optimizer.state


def test_a_scheduled_optimizer_gets_no_further_group():
    model = training(TinyGPT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with Watch(model, every=1, alarms=False) as watch:
        install(watch, "sigma-reparam", say=(said := []).append)
        steps(model, 2, optimizer)
    assert "gains constant" in said[0]
    assert len(optimizer.param_groups) == 1


def test_the_watch_takes_everything_with_it():
    before = F.scaled_dot_product_attention
    for remedy in ("qk-clip", "temperature", "sigma-reparam"):
        with Watch(training(TinyGPT), every=1, alarms=False) as watch:
            installed = install(watch, remedy, say=lambda line: None)
        installed.remove()
        assert F.scaled_dot_product_attention is before
        assert not hub.listeners
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        optimizer.step()  # no hook is left that would stumble


@pytest.mark.slow
def test_readings_go_on_as_without_a_remedy():
    losses = []
    for remedied in (False, True):
        with Watch(every=1, store=(readings := []), alarms=False) as watch:
            if remedied:
                install(watch, "qk-clip:1e9", say=lambda line: None)
            torch.manual_seed(0)
            losses.append((train(TinyGPT(), micro_batches=2), len(readings)))
    assert losses[0] == losses[1]


@pytest.mark.compile
def test_a_compiled_model_is_clipped(fresh_dynamo):
    model, twin = training(TinyGPT), training(TinyGPT)
    losses = []
    for one, step in ((model, torch.compile(model, backend="eager")), (twin, twin)):
        with Watch(one, every=1, alarms=False) as watch:
            installed = install(watch, f"qk-clip:{LIMIT}", say=lambda line: None)
            optimizer = torch.optim.AdamW(one.parameters(), lr=3e-2)
            losses.append(steps(step, 3, optimizer))
        assert not installed.refused
        assert installed.clips
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


def stopped_and_resumed(make, remedy, batches):
    """The second half of a run, in another model, from what a checkpoint would hold."""
    model = training(make)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with Watch(model, every=1, alarms=False) as watch:
        installed = install(watch, remedy, say=lambda line: None)
        half = len(batches) // 2
        one_by_one(model, optimizer, batches[:half])
        checkpoint = {name: value.clone() for name, value in model.state_dict().items()}
        kept = installed.state_dict()
        whole = one_by_one(model, optimizer, batches[half:])
        installed.remove()
    again = training(make)
    again.load_state_dict(checkpoint)
    optimizer = torch.optim.SGD(again.parameters(), lr=1e-2)
    with Watch(again, every=1, alarms=False) as watch:
        installed = install(watch, remedy, say=lambda line: None)
        installed.load_state_dict(kept)
        resumed = one_by_one(again, optimizer, batches[half:])
        installed.remove()
    return kept, whole, resumed


def one_by_one(model, optimizer, batches):
    losses = []
    for tokens in batches:
        loss = language_loss(model(tokens), tokens)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.one_case
@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "remedy", "keys"),
    [
        (TinyGPT, "temperature:2", {"layers.0.attn.factor", "layers.1.attn.factor"}),
        (Curved, "qk-clip:2", {"attend.factor"}),
        (Outside, "qk-clip:2", set()),
        (TinyGPT, "log-n", {".keys"}),
        (TinyGPT, "softcap:1", set()),
        (TinyGPT, "qk-norm", set()),
    ],
)
def test_a_run_resumes_from_its_checkpoint_to_the_bit(make, remedy, keys):
    """The second half has longer sequences: log-n must not take its number from them."""
    batches = [(torch.arange(14) * step).view(2, 7) % 29 for step in (1, 2)]
    batches += [(torch.arange(22) * step).view(2, 11) % 29 for step in (3, 4)]
    kept, whole, resumed = stopped_and_resumed(make, remedy, batches)
    assert set(kept) == keys
    assert whole == resumed
    if any(key.endswith("factor") for key in keys):
        assert any((factor < 1).any() for factor in kept.values())


def test_factors_of_another_model_are_refused():
    with Watch(training(TinyGPT), every=1, alarms=False) as watch:
        installed = install(watch, "temperature:2", say=lambda line: None)
        with pytest.raises(RemedyError, match=r"give what the remedy's state_dict\(\) returned"):
            installed.load_state_dict({"layers.0.attn.weight": torch.ones(3)})
        installed.load_state_dict({"layers.0.attn.factor": torch.ones(5)})
        with pytest.raises(RemedyError, match="factors for 5 heads and the call has 3"):
            watch.model(TOKENS)
        installed.remove()


def test_what_is_done_goes_to_the_log_of_a_script(caplog):
    """Without `say`."""
    model = training(Outside)
    with Watch(model, every=1, alarms=False) as watch, caplog.at_level("WARNING", "scaledot.watch"):
        install(watch, f"qk-clip:{LIMIT}")
        model(TOKENS).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.0).step()
    assert "scales attend since step 0: head" in caplog.text


class Twice(Outside):
    """Two attentions in one module."""

    def forward(self, tokens):
        x = self.embed(tokens)
        q, k = (part(x)[:, None] for part in (self.to_q, self.to_k))
        first = F.scaled_dot_product_attention(q, k, x[:, None])
        return self.head((first + F.scaled_dot_product_attention(2 * q, k, x[:, None]))[:, 0])


def test_two_calls_of_one_module_get_no_factor():
    model = training(Twice)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Watch(model, every=1, alarms=False) as watch:
        installed = install(watch, "temperature:0.1", say=lambda line: None)
        model(TOKENS).sum().backward()
        optimizer.step()
    assert set(installed.refused) == {"Twice", "Twice#2"}
    assert all("more than once" in reason for reason in installed.refused.values())


@pytest.mark.one_case
@pytest.mark.compile
@pytest.mark.parametrize("remedy", ["softcap:1", "qk-norm", "log-n:3"])
@pytest.mark.parametrize("given", [True, False])
def test_a_compiled_model_refuses_what_happens_at_the_call(remedy, given, fresh_dynamo):
    model = training(TinyGPT)
    plain = model(TOKENS)
    step = torch.compile(model, backend="eager")
    with Watch(model if given else None, every=1, alarms=False) as watch:
        installed = install(watch, remedy, say=(said := []).append)
        assert torch.equal(step(TOKENS), plain)
        names = ["layers.0.attn", "layers.1.attn"]
        for name in names:
            assert any(f"is refused in {name}: a compiled graph" in line for line in said)
        note = installed.note()
    installed.remove()
    assert (note["since"], note["refused"]) == (None, names)
    assert "nothing was changed: it has met no attention call that it can" in note["words"]


@pytest.mark.nightly
@pytest.mark.compile
@pytest.mark.parametrize("remedy", ["temperature:0.01", "qk-clip:0.01"])
def test_a_compiled_function_is_refused_in_our_words_alone(remedy, fresh_dynamo, capfd):
    """Its graph takes other inputs than the function: it is not run again to look for weights."""
    model = training(TinyGPT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(lambda tokens: model(tokens), backend="aot_eager")
    with Watch(every=1, alarms=False) as watch:
        installed = install(watch, remedy, say=lambda line: None)
        for _ in range(4):
            language_loss(step(TOKENS), TOKENS).backward()
            optimizer.step()
        note = installed.note()
    assert (note["layers"], note["refused"]) == ([], ["layers.0.attn", "layers.1.attn"])
    assert capfd.readouterr().err == ""


@pytest.mark.compile
def test_what_was_refused_was_not_clipped(fresh_dynamo):
    model = training(TinyGPT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(model, backend="eager")
    with Watch(every=1, alarms=False) as watch:
        installed = install(watch, "temperature:0.01", say=lambda line: None)
        for _ in range(3):
            language_loss(step(TOKENS), TOKENS).backward()
            optimizer.step()
        note = installed.note()
    names = ["layers.0.attn", "layers.1.attn"]
    assert (note["since"], note["layers"], note["refused"]) == (None, [], names)
    assert note["words"].startswith("temperature:0.01 has clipped 0 times, 0 heads\n")


@pytest.mark.parametrize("remedy", ["softcap:1", "log-n:3"])
def test_eager_attention_of_transformers_refuses_what_ours_computes(remedy):
    model = training(BY_WEIGHTS["Llama, eager"][0])
    plain = model(TOKENS).logits
    with Watch(every=1, alarms=False) as watch:
        installed = install(watch, remedy, say=(said := []).append)
        assert torch.equal(model(TOKENS).logits, plain)
    installed.remove()
    assert 'load it with attn_implementation="sdpa"' in said[-1]
    assert installed.note()["since"] is None


def test_the_record_begins_with_the_first_call_that_is_changed():
    with Watch(every=1, alarms=False) as watch:
        installed = install(watch, "softcap:1", say=lambda line: None)
        watch.step()
        assert installed.note()["since"] is None
        training(TinyGPT)(TOKENS)
        assert installed.note()["since"] == 1
    installed.remove()
