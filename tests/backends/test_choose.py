"""Which backend serves a call, and why each other does not."""

import math

import pytest
import torch

import scaledot
from scaledot import backends
from scaledot.backends import torch_sdpa

HEADS = 3


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(20_17)


def tensors(queries=17, keys=17, width=8, value_width=8):
    shape = (2, HEADS)
    return (
        torch.randn(*shape, queries, width),
        torch.randn(*shape, keys, width),
        torch.randn(*shape, keys, value_width),
    )


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"is_causal": True},
        {"is_causal": True, "causal_align": "bottom_right"},
        {"scale": 0.3},
        {"scale": "dk"},
        {"scale": "sqrt_dmodel", "num_heads": HEADS},
        {"scale": -0.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("keys", [7, 15, 16, 17])
def test_torch_serves_plain_finite_calls(keywords, keys):
    choice = scaledot.backend_for(*tensors(keys, keys), **keywords)
    assert choice.backend == "torch"
    assert choice.refused["cpu"] == "it comes later in the table"
    assert "not on a GPU" in choice.refused["hopper"]
    assert set(choice.refused) == {"hopper", "cpu", "triton"}


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"vitals": True}, "vitals"),
        ({"attn_mask": torch.ones(17, dtype=torch.bool)}, "mask"),
        ({"attn_mask": torch.zeros(17, 17)}, "full copy of a mask"),
        ({"dropout_p": 0.1}, "dropout"),
        ({"softcap": 5.0}, "softcap"),
        ({"scale": "log_n"}, "log_n"),
        ({"scale": torch.ones(HEADS)}, "scale per head"),
        ({"sinks": torch.zeros(HEADS)}, "sinks"),
        ({"weight": torch.ones(8)}, "additive"),
        ({"window": (3, None)}, "window"),
        ({"window": (None, 1)}, "causal mask"),
        ({"key_lengths": torch.tensor([17, 3])}, "key lengths"),
        ({"is_causal": True, "scale": 0.0}, "scale of zero or below"),
        ({"is_causal": True, "scale": -1.0}, "zero or below"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_cpu_serves_what_torch_has_not_or_gets_wrong(keywords, reason):
    choice = scaledot.backend_for(*tensors(), **keywords)
    assert choice.backend == "cpu"
    assert reason in choice.refused["torch"]


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (tensors(queries=5, keys=7), "bottom_right"),
        (tensors(value_width=5), "value width"),
        (tensors(queries=0), "empty"),
        (tensors(keys=0), "empty"),
        (tuple(t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in tensors()), "stride"),
        (tuple(t.to("meta") for t in tensors()), "meta"),
    ],
    ids=["rectangle", "value_width", "no_queries", "no_keys", "strided", "meta"],
)
def test_cpu_serves_shapes_and_layouts_that_torch_does_not(call, reason):
    keywords = {}
    if reason == "bottom_right":
        keywords, reason = {"is_causal": True, "causal_align": "bottom_right"}, "top-left only"
    choice = scaledot.backend_for(*call, **keywords)
    assert choice.backend == "cpu"
    assert reason in choice.refused["torch"]


def test_cpu_serves_grouped_heads():
    query, key, value = tensors()
    choice = scaledot.backend_for(query, key[:, :1], value[:, :1], enable_gqa=True)
    assert choice.backend == "cpu"
    assert "grouped heads" in choice.refused["torch"]


def test_cpu_serves_scores_alone():
    query, key, _ = tensors()
    choice = scaledot.backend_for(query, key)
    assert choice.backend == "cpu"
    assert "no vitals" in choice.refused["torch"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("where", "keys", "grad"),
    [("value", 17, False), ("query", 15, False), ("key", 15, False), ("query", 17, True)],
)
def test_numbers_that_are_not_finite_reroute_a_causal_call(bad, where, keys, grad):
    """Values always; queries and keys where torch's kernel or its backward mishandles them."""
    call = tensors(keys, keys)
    call[("query", "key", "value").index(where)][1, 2, 3, 4] = bad
    call[0].requires_grad_(grad)
    choice = scaledot.backend_for(*call, is_causal=True)
    assert choice.backend == "cpu"
    assert "NaN or inf" in choice.refused["torch"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 1, 2], ids=["query", "key", "value"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_numbers_that_are_not_finite_show_alike_whoever_serves(bad, where, is_causal):
    for keys in (5, 15, 16, 17, 31, 63, 64, 65, 129, 513, 769):
        call = tensors(keys, keys)
        call[where][1, 2, keys // 2, 4] = bad
        served = scaledot.attention(*call, is_causal=is_causal)
        ours = scaledot.attention(*call, is_causal=is_causal, backend="cpu")
        assert torch.equal(served.isfinite(), ours.isfinite()), f"{keys} keys"


def test_nan_query_over_few_keys_reroutes_and_shows():
    query, key, value = tensors(queries=5, keys=7)
    query[0, 0, 2, 1] = math.nan
    assert scaledot.backend_for(query, key, value).backend == "cpu"
    out = scaledot.attention(query, key, value)
    assert out[0, 0, 2].isnan().all()
    assert out.isnan().sum() == out.shape[-1]


def test_vmap_goes_to_the_backend_with_a_batching_rule():
    seen = []

    def choose(*call):
        seen.append(scaledot.backend_for(*call).backend)
        return scaledot.attention(*call)

    call = tensors()
    out = torch.func.vmap(choose)(*call)
    assert seen == ["cpu"]
    torch.testing.assert_close(out, scaledot.attention(*call))


@pytest.mark.parametrize("keys", [7, 17])
@pytest.mark.parametrize("is_causal", [False, True])
def test_backends_agree_where_both_serve(keys, is_causal):
    call = tensors(keys, keys)
    results = [
        scaledot.attention(*call, is_causal=is_causal, backend=name) for name in ("torch", "cpu")
    ]
    torch.testing.assert_close(*results)


def test_forced_backend_that_cannot_serve_raises_with_its_reason():
    with pytest.raises(ValueError, match=r"backend='torch' cannot serve this call: .*softcap"):
        scaledot.attention(*tensors(), softcap=5.0, backend="torch")
    with pytest.raises(ValueError, match=r"backend='torch' cannot serve this call: .*vitals"):
        scaledot.backend_for(*tensors(), vitals=True, backend="torch")


def test_forced_backend_is_the_one_that_serves():
    choice = scaledot.backend_for(*tensors(), backend="cpu")
    assert choice.backend == "cpu"
    assert set(choice.refused) == {"torch", "hopper", "triton"}


def test_unknown_backend_lists_the_names():
    with pytest.raises(ValueError, match="backend='cuda' does not exist") as error:
        scaledot.attention(*tensors(), backend="cuda")
    assert all(repr(backend.name) in str(error.value) for backend in backends.TABLE)


def test_choice_prints_who_serves_and_who_does_not():
    lines = str(scaledot.backend_for(*tensors(), softcap=5.0)).splitlines()
    assert lines[0].startswith("cpu serves this call: tiles of torch operators")
    assert lines[1].startswith("torch does not: it has no softcap")


def test_call_that_nobody_serves_gives_every_reason(monkeypatch):
    monkeypatch.setattr(backends, "TABLE", backends.TABLE[:1])
    with pytest.raises(ValueError, match=r"no backend serves this call: torch: .*softcap"):
        scaledot.attention(*tensors(), softcap=5.0)


@pytest.mark.parametrize(
    ("shape", "ours"),
    [
        ((16, 8, 1024, 256), True),
        ((16, 8, 896, 256), False),
        ((4, 8, 1024, 256), False),  # too few rows to keep a GPU busy
        ((1, 8, 2048, 64), True),
    ],
)
def test_short_sequences_go_to_cudnn_on_a_hopper_gpu(monkeypatch, shape, ours):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    query = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    reason = torch_sdpa._gpu_reason(query, query, query, 0.125)
    assert reason == ("our kernel is faster from this length on" if ours else None)


def test_what_torch_errs_in_on_a_gpu_is_ours(monkeypatch):
    """Gradients, whose strides its plans of cuDNN confuse; scales that turn the largest score."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    query = torch.empty(4, 8, 512, 64, dtype=torch.bfloat16, device="meta")
    assert torch_sdpa._gpu_reason(query, query, query, 0.125) is None
    assert "before they scale it" in torch_sdpa._gpu_reason(query, query, query, -0.125)
    asked = query.clone().requires_grad_()
    assert "strides of an earlier one" in torch_sdpa._gpu_reason(query, query, asked, 0.125)
    with torch.no_grad():
        assert torch_sdpa._gpu_reason(query, query, asked, 0.125) is None
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "not vetted" in torch_sdpa._gpu_reason(query, query, query, 0.125)
