"""What GPUs bring along, as far as a CPU can show it: autocast, small types, a default device."""

import pytest
import torch
from remedied_models import NORMED, TOKENS, Outside, made, maxima
from watched_models import TinyGPT

from scaledot.watch.remedies import RemedyError, apply
from scaledot.watch.remedies.rules import Arguments, Temperature
from scaledot.watch.remedies.supports import supports

pytest.importorskip("transformers")


@pytest.mark.parametrize("name", NORMED)
def test_a_norm_is_seen_in_bfloat16_too(name):
    """Its roundings once hid that scaling what a norm divides out changes nothing."""
    model = made(NORMED[name]).bfloat16()
    with pytest.raises(RemedyError, match="a norm follows the weights that make its queries"):
        apply("qk-clip:0.01", model, inputs=TOKENS)


def test_spectral_norms_keep_their_precision_under_autocast():
    model = made(TinyGPT).float().train()
    apply("sigma-reparam", model)
    spectral = model.layers[0].attn.c_attn.parametrizations.weight
    with torch.autocast("cpu", torch.bfloat16):
        weight = model.layers[0].attn.c_attn.weight
        assert model(TOKENS).dtype == torch.bfloat16
    torch.testing.assert_close(weight, spectral.original, rtol=1e-5, atol=0)


def test_rows_are_found_whatever_the_default_device():
    weight = torch.randn(6, 4, requires_grad=True)
    other = torch.randn(2, requires_grad=True)
    query = (torch.randn(1, 5, 4) @ weight.T).unflatten(-1, (3, 2)).transpose(1, 2)
    with torch.device("meta"):
        found = supports(query, {"weight": weight, "other": other}, 3)
    assert found["weight"][0].tolist() == torch.eye(3).repeat_interleave(2, 1).bool().tolist()
    assert not found["other"][0].any()


@pytest.mark.parametrize("remedy", ["qk-clip:0.5", "temperature:0.5"])
def test_a_remedy_reaches_calls_that_a_mode_takes(remedy):
    """torch.set_default_device is such a mode: every call goes through it, and comes back."""
    model = made(Outside)
    before = maxima(model)["attend"]
    assert (before > 0.5).any()
    with torch.device("cpu"):
        applied = apply(remedy, model, inputs=TOKENS)
        found = maxima(model)["attend"]
    applied.undo()
    torch.testing.assert_close(found, before.clamp(max=0.5), rtol=1e-5, atol=0)


def test_a_factor_keeps_its_numbers_where_queries_have_none():
    factor = torch.ones(3)
    rule = Temperature(factor)
    query = torch.empty(1, 3, 5, 4, device="meta")
    assert rule.change(Arguments(query, query, {})).query.is_meta
    assert rule.factor is factor


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_factor_moves_to_the_queries_once_and_can_be_trained_with():
    rule = Temperature(torch.ones(3))
    query = torch.ones(1, 3, 5, 4, device="cuda", requires_grad=True)
    with torch.inference_mode():
        rule.change(Arguments(query, query, {}))
    factor = rule.factor
    assert factor.is_cuda
    rule.change(Arguments(query, query, {})).query.sum().backward()
    assert rule.factor is factor
