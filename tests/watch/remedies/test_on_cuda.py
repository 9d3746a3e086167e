"""Remedies on a GPU: the logits are what was promised, undo restores every bit, no step waits.

With DEVICE = "cpu" the same tests run there.
"""

import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from remedied_models import TOKENS, Ours, Outside, Torchs, made, maxima
from torch.nn.attention import SDPBackend, sdpa_kernel
from watched_models import TinyEncoder, TinyGPT, language_loss

from scaledot import Watch
from scaledot.watch.remedies import apply, install
from scaledot.watch.store import RunReader

DEVICE = "cuda"
ROOT = Path(__file__).parents[3]
pytestmark = [
    pytest.mark.skipif(
        DEVICE == "cuda" and not torch.cuda.is_available(), reason="there is no CUDA device"
    ),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
# Of a largest logit: float32 as promised, bfloat16 by some roundings of weights, query and key.
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 8 * torch.finfo(torch.bfloat16).eps}
BY_WEIGHTS = {
    "fused": (lambda: TinyGPT(width=64, heads=4), "layers.1.attn"),
    "fused, grouped": (lambda: TinyGPT(width=64, heads=4, groups=2), "layers.1.attn"),
    "narrow": (TinyGPT, "layers.0.attn"),
    "nn.MultiheadAttention": (Torchs, "attention"),
    "nn.TransformerEncoder": (TinyEncoder, "encoder.layers.1.self_attn"),
    "scaledot.nn": (Ours, "attention"),
    "weights outside": (Outside, "attend"),
}
AT_CALL = {
    **{name: BY_WEIGHTS[name] for name in ("fused", "fused, grouped", "narrow", "weights outside")},
    "nn.MultiheadAttention": (lambda: Torchs(need_weights=False), "attention"),
    "scaledot.nn": BY_WEIGHTS["scaledot.nn"],
    "scaledot.nn without vitals": (lambda: Ours(measure=False), "attention"),
}


@pytest.fixture(autouse=True)
def same_again():
    """Kernels that add in the same order each time, and no debugging left switched on."""
    with sdpa_kernel(SDPBackend.MATH):
        yield
    if DEVICE == "cuda":
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(params=CLOSE, ids=str)
def dtype(request):
    return request.param


def there(make, dtype, **keywords):
    return made(make, **keywords).to(DEVICE, dtype)


def tokens():
    return TOKENS.to(DEVICE)


def largest(model):
    return maxima(model, tokens())


def bits(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same_bits(model, before):
    after = model.state_dict()
    assert after.keys() == before.keys()
    for name, value in after.items():
        assert torch.equal(value, before[name]), name


def limit_between(values):
    """Some heads are above, by more than bfloat16 rounds away, and mostly some are not."""
    ordered = values.sort().values
    return min(float(ordered[-1] + ordered[-2]) / 2, 0.8 * float(ordered[-1]))


@pytest.mark.parametrize("name", BY_WEIGHTS)
def test_clipped_heads_end_at_the_limit_and_undo_restores_every_bit(name, dtype):
    make, layer = BY_WEIGHTS[name]
    model = there(make, dtype)
    before, weights = largest(model)[layer], bits(model)
    limit = limit_between(before)
    applied = apply(f"qk-clip:{limit!r}", model, inputs=tokens(), heads={layer: None})
    assert "a factor at the call" not in applied.describe()
    assert any(not torch.equal(value, weights[name]) for name, value in bits(model).items())
    expected = before.clamp(max=limit)
    torch.testing.assert_close(largest(model)[layer], expected, rtol=CLOSE[dtype], atol=0)
    others = before <= limit
    assert torch.equal(largest(model)[layer][others], before[others])
    applied.undo()
    assert_same_bits(model, weights)


@pytest.mark.parametrize("name", AT_CALL)
def test_temperature_brings_heads_to_the_limit(name, dtype):
    make, layer = AT_CALL[name]
    model = there(make, dtype)
    before, out = largest(model)[layer], model(tokens())
    limit = float(before.max()) / 2
    applied = apply(f"temperature:{limit!r}", model, inputs=tokens(), heads={layer: None})
    expected = before.clamp(max=limit)
    torch.testing.assert_close(largest(model)[layer], expected, rtol=CLOSE[dtype], atol=0)
    assert next(iter(applied.state_dict().values())).device.type == DEVICE
    applied.undo()
    assert torch.equal(largest(model)[layer], before)
    assert torch.equal(model(tokens()), out)


@pytest.mark.parametrize("name", AT_CALL)
def test_norm_bounds_every_logit(name, dtype):
    make, _ = AT_CALL[name]
    model = there(make, dtype, sharp=5.0)
    before, weights = largest(model), bits(model)
    width = 16 if name.startswith("fused") else 4
    bound = 1.5 * math.sqrt(width)
    assert max(float(values.max()) for values in before.values()) > bound
    applied = apply("qk-norm:1.5", model)
    for values in largest(model).values():
        assert (values.abs() <= bound * (1 + CLOSE[dtype])).all()
    applied.undo()
    assert all(torch.equal(values, before[layer]) for layer, values in largest(model).items())
    assert_same_bits(model, weights)


def test_learned_gains_live_where_the_weights_do(dtype):
    model = there(TinyGPT, dtype).train()
    weights = bits(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    applied = apply("qk-norm", model, optimizer, inputs=tokens())
    gain = model.layers[0].attn.scaledot_qk_gain
    assert (gain.device.type, gain.dtype) == (DEVICE, dtype)
    applied.undo()
    assert_same_bits(model, weights)
    apply("qk-norm", model, optimizer, inputs=tokens())
    language_loss(model(tokens()).float(), tokens()).backward()
    optimizer.step()
    assert (model.layers[0].attn.scaledot_qk_gain != 1).all()


def scores_of(model):
    """Of `Outside`: its scores and values, in float64."""
    wide = made(Outside).to(DEVICE)
    wide.load_state_dict(model.state_dict())
    x = wide.embed(tokens())
    query, key, value = (
        part.unflatten(-1, (3, 4)).transpose(1, 2) for part in (wide.to_q(x), wide.to_k(x), x)
    )
    return query @ key.mT / math.sqrt(4), value, wide.head


def test_softcap_is_the_formula_and_logits_are_read_before_it(dtype):
    model = there(Outside, dtype, sharp=5.0)
    before, plain = largest(model)["attend"], model(tokens())
    assert before.max() > 4
    scores, value, head = scores_of(model)
    expected = head(
        (torch.softmax(2 * torch.tanh(scores / 2), -1) @ value).transpose(1, 2).flatten(2)
    )
    applied = apply("softcap:2", model)
    torch.testing.assert_close(largest(model)["attend"], before, rtol=CLOSE[dtype], atol=0)
    slack = CLOSE[dtype] * float(expected.abs().max())
    torch.testing.assert_close(model(tokens()).double(), expected, rtol=0, atol=slack)
    assert not torch.allclose(plain.double(), expected, rtol=0, atol=slack)
    applied.undo()
    assert torch.equal(model(tokens()), plain)


def test_log_n_turns_each_row_by_its_number_of_keys(dtype):
    """7 keys a row: with N = 49 each row's logits are halved."""
    model = there(Outside, dtype)
    before, out = largest(model)["attend"], model(tokens())
    applied = apply("log-n:49", model)
    torch.testing.assert_close(largest(model)["attend"], before / 2, rtol=CLOSE[dtype], atol=0)
    applied.undo()
    assert torch.equal(largest(model)["attend"], before)
    assert torch.equal(model(tokens()), out)


@pytest.mark.parametrize("autocast", [False, True])
def test_sigma_reparam_changes_nothing_at_first_and_undo_restores_every_bit(dtype, autocast):
    model = there(TinyGPT, dtype)
    before, weights = largest(model), bits(model)
    applied = apply("sigma-reparam", model)
    weight = weights["layers.0.attn.c_attn.weight"]
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        product = model.layers[0].attn.c_attn.weight
    torch.testing.assert_close(product, weight, rtol=CLOSE[dtype], atol=0)
    for layer, values in largest(model).items():
        slack = CLOSE[dtype] * float(before[layer].abs().max())
        torch.testing.assert_close(values, before[layer], rtol=0, atol=4 * slack)
    applied.undo()
    assert_same_bits(model, weights)


def test_sigma_reparam_holds_the_norm_while_training():
    model = there(TinyGPT, torch.float32).train()
    linear = model.layers[1].attn.c_attn
    first = float(torch.linalg.matrix_norm(linear.weight.detach(), 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    apply("sigma-reparam", model)
    for _ in range(30):
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = language_loss(model(tokens()), tokens())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    original = linear.parametrizations.weight.original.detach()
    assert float(torch.linalg.matrix_norm(original, 2)) > 1.02 * first
    with torch.autocast(DEVICE, torch.bfloat16):
        model(tokens())  # follows the last step
    assert float(torch.linalg.matrix_norm(linear.weight.detach(), 2)) == pytest.approx(first, 0.05)


def test_tensor_float_32_is_no_reason_to_refuse():
    """Its roundings are those of the user's wish, and the rows are found all the same."""
    model = there(lambda: TinyGPT(width=64, heads=4), torch.float32)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        logits = largest(model)["layers.0.attn"]
        limit = limit_between(logits)
        applied = apply(f"qk-clip:{limit!r}", model, inputs=tokens(), heads={"layers.0.attn": None})
        assert "query and key rows of the head by sqrt(gamma)" in applied.describe()
        found = largest(model)["layers.0.attn"]
    finally:
        torch.set_float32_matmul_precision(before)
    torch.testing.assert_close(found, logits.clamp(max=limit), rtol=8 * 2.0**-10, atol=0)


@pytest.mark.parametrize("remedy", ["qk-clip:0.5", "temperature:0.5"])
def test_a_remedy_works_where_the_default_device_is_the_gpu(remedy):
    model, layer = there(Outside, torch.float32), "attend"
    before = largest(model)[layer]
    torch.set_default_device(DEVICE)
    try:
        apply(remedy, model, inputs=tokens())
        after = largest(model)[layer]
    finally:
        torch.set_default_device(None)
    torch.testing.assert_close(after, before.clamp(max=0.5), rtol=CLOSE[torch.float32], atol=0)


def without_dropout(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


@pytest.mark.parametrize("remedy", ["qk-clip:0.5", "temperature:0.5"])
def test_a_run_is_held_and_no_step_waits_for_the_device(remedy, dtype, caplog):
    model = without_dropout(there(lambda: TinyGPT(width=64, heads=4), dtype)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batch = tokens()
    with Watch(model, every=1, store=(readings := []), alarms=False, losses=False) as watch:
        installed = install(watch, remedy, say=lambda line: None)
        for step in range(8):
            if step == 4 and DEVICE == "cuda":  # rows are found and kernels compiled by now
                torch.cuda.set_sync_debug_mode("error")
            language_loss(model(batch).float(), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert not [one.getMessage() for one in caplog.records if one.levelname == "ERROR"]
    assert installed.clips
    assert not installed.refused
    first = [one for one in readings if one.layer == "layers.0.attn"]
    assert len(first) == 8
    assert first[0].value("max_logit").max() > 1
    for reading in first[1:]:
        assert reading.value("max_logit").max() == pytest.approx(0.5, rel=CLOSE[dtype])


@pytest.mark.parametrize("remedy", ["softcap:2", "qk-norm", "log-n:49", "sigma-reparam"])
def test_a_remedy_at_every_call_lets_no_step_wait(remedy):
    """And gradients pass through it, in bfloat16."""
    model = without_dropout(there(lambda: TinyGPT(width=64, heads=4), torch.bfloat16)).train()
    apply(remedy, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch, losses = tokens(), []
    for step in range(5):
        if step == 3 and DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        loss = language_loss(model(batch).float(), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    if DEVICE == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    losses = torch.stack(losses).tolist()
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] != losses[0]


SCRIPT = """
    import torch
    from watched_models import TinyGPT, language_loss
    torch.manual_seed(0)
    model = TinyGPT().to("DEVICE")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    tokens = torch.arange(14, device="DEVICE").view(2, 7)
    for layer in model.layers:
        layer.drop.p = 0.0
    for step in range(3):
        language_loss(model(tokens), tokens).backward()
        optimizer.step()
"""


def test_the_verb_clips_a_script(tmp_path):
    script, store = tmp_path / "train.py", tmp_path / "run.vitals"
    script.write_text(textwrap.dedent(SCRIPT).replace("DEVICE", DEVICE))
    flags = ["--remedy", "qk-clip:1", "--every", "1", "--store", str(store)]
    done = subprocess.run(
        [sys.executable, "-m", "scaledot", "run", *flags, str(script)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"},
    )
    assert done.returncode == 0, done.stderr
    assert "qk-clip:1 scales layers.0.attn since step 0" in done.stderr
    found = RunReader(store).heads("layers.0.attn", "max_logit").values.max(1).tolist()
    assert found[0] > 2
    assert found[1:] == pytest.approx([1.0, 1.0], rel=CLOSE[torch.float32])
