"""The peers of a GPU as far as a CPU can tell: arguments, layout, FlexAttention's mask."""

import sys
import types

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from scaledot.bench import peers as eager
from scaledot.bench.gpu import absence, cases, flex, ours, peers
from scaledot.bench.workload import Workload

CAUSAL = pytest.mark.parametrize("causal", [False, True])


def _load(*, causal: bool = False, backward: bool = False) -> Workload:
    return Workload(2, 3, 67, 16, causal=causal, backward=backward)


@CAUSAL
@pytest.mark.parametrize("name", ["cudnn", "flash"])
def test_torchs_operators_take_these_arguments(name, causal):
    schema = {"cudnn": "cudnn", "flash": "flash"}[name]
    known = getattr(torch.ops.aten, f"_scaled_dot_product_{schema}_attention").default._schema
    inputs = Workload(2, 3, 64, 16, causal=causal, device="meta", dtype="bfloat16")
    shape = (inputs.batch, inputs.heads, inputs.length, inputs.width)
    tensors = [torch.empty(shape, device="meta", dtype=torch.bfloat16) for _ in range(3)]
    made = getattr(peers, name)(eager.Inputs(*tensors, None, causal))
    assert "is_causal" in {argument.name for argument in known.arguments}
    assert made.out.shape == shape


@pytest.fixture
def fake_flash_4(monkeypatch):
    """An installed flash-attn-4: [B, n, H, D], a tuple back."""
    seen = []

    def flash_attn_func(q, k, v, softmax_scale=None, causal=False):
        seen.append([tensor.is_contiguous() for tensor in (q, k, v)])
        query, key, value = (tensor.transpose(1, 2) for tensor in (q, k, v))
        out = scaled_dot_product_attention(query, key, value, is_causal=causal)
        return out.transpose(1, 2), None

    package, cute = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.cute")
    package.cute, cute.flash_attn_func = cute, flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    peers._flash_4.cache_clear()
    yield seen
    peers._flash_4.cache_clear()


@CAUSAL
def test_flash_4_gets_its_own_layout_and_is_attention(fake_flash_4, causal):
    assert absence.wrong(cases.FA4, _load(causal=causal)) is None
    assert fake_flash_4 == [[True, True, True]]


def test_a_step_of_flash_4_has_the_gradients(fake_flash_4):
    assert absence.wrong(cases.FA4_STEP, _load(causal=True, backward=True)) is None


def test_another_layout_is_found_to_be_wrong(fake_flash_4):
    def untransposed(inputs):
        return peers.Answer(peers._flash_4()(*inputs[:3], causal=inputs.causal)[0], None)

    reason = absence.wrong(cases.Contender("FA4", untransposed, foreign=True), _load())
    assert reason.startswith("its out is off by")


def test_a_flash_4_of_another_signature_is_refused(fake_flash_4, monkeypatch):
    monkeypatch.setattr(sys.modules["flash_attn.cute"], "flash_attn_func", lambda q, k, v: q)
    with pytest.raises(TypeError, match="takes no argument causal"):
        peers.flash_4(peers.tokens_first(_load().make()))


def test_flash_4_that_is_not_installed_is_an_import_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    peers._flash_4.cache_clear()
    with pytest.raises(ImportError):
        peers.flash_4(_load().make())


@CAUSAL
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_is_attention_and_is_asked_for_the_maximum(monkeypatch, causal):
    from torch.nn.attention.flex_attention import flex_attention

    asked = []

    def uncompiled(*args, **kwargs):
        asked.append(kwargs.pop("return_aux"))
        return flex_attention(*args, **kwargs), None  # on a CPU it has no maximum to give

    monkeypatch.setattr(flex, "_compiled", lambda: uncompiled)
    assert absence.wrong(cases.FLEX, _load(causal=causal)) is None
    assert [request.max_scores for request in asked] == [True]


@CAUSAL
def test_our_step_has_the_gradients(monkeypatch, causal):
    assert absence.wrong(cases.STEP, _load(causal=causal, backward=True)) is None


def test_a_wrong_gradient_is_found():
    def off(inputs):
        answer = ours.forward_backward(inputs)
        query_grad, *rest = answer.gradients
        return answer._replace(gradients=(query_grad * 1.001, *rest))

    reason = absence.wrong(cases.Contender("off", off), _load(backward=True))
    assert reason.startswith("its query_grad is off by")


def test_our_kernels_are_forced_by_name():
    inputs = _load().make()
    for attend in (ours.own, ours.own_with_vitals, ours.own_vitals):
        with pytest.raises(ValueError, match="backend='hopper'"):
            attend(inputs)
    with pytest.raises(ValueError, match="backend='triton'"):
        ours.triton_with_vitals(inputs)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ImportError("No module named 'flash_attn'"), "ImportError: No module named 'flash_attn'"),
        (RuntimeError("first\nsecond"), "RuntimeError: first"),
        (ValueError(), "ValueError"),
    ],
)
def test_reasons_are_one_line(error, words):
    assert absence.reason_of(error) == words


def test_a_long_reason_is_cut():
    assert len(absence.reason_of(RuntimeError("x" * 1000))) == absence.LONGEST
