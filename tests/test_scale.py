"""The scale rules are plain numbers."""

import math

import pytest
import torch

import scaledot
from scaledot.scale import RULES, resolve


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(20_17)


@pytest.mark.parametrize("d_k", [1, 2, 3, 7, 63, 64, 65, 512])
def test_rules_are_these_functions_of_the_width(d_k):
    assert resolve("sqrt_dk", d_k) == pytest.approx(d_k**-0.5, rel=1e-15)
    assert resolve("dk", d_k) == pytest.approx(1 / d_k, rel=1e-15)
    assert resolve("none", d_k) == 1.0
    assert resolve("sqrt_dmodel", d_k, 7) == pytest.approx((7 * d_k) ** -0.5, rel=1e-15)
    assert resolve("log_n", d_k) == resolve("sqrt_dk", d_k)


def test_width_64_and_8_heads_give_the_numbers_of_the_paper():
    assert resolve("sqrt_dk", 64) == 0.125
    assert resolve("dk", 64) == 1 / 64
    assert resolve("sqrt_dmodel", 64, 8) == pytest.approx(1 / math.sqrt(512), rel=1e-15)


@pytest.mark.parametrize("rule", RULES)
def test_width_zero_divides_by_nothing(rule):
    assert resolve(rule, 0, 3) == 1.0


def test_sqrt_dmodel_without_heads_says_what_it_needs():
    with pytest.raises(ValueError, match="needs num_heads"):
        resolve("sqrt_dmodel", 64)


def test_unknown_rule_names_every_known_one():
    with pytest.raises(ValueError, match="sqrt_dv") as error:
        resolve("sqrt_dv", 64)
    assert all(rule in str(error.value) for rule in RULES)


@pytest.mark.parametrize("rule", ["sqrt_dk", "dk", "none", "sqrt_dmodel"])
def test_rule_in_a_call_is_its_number(rule):
    query, key, value = torch.randn(3, 2, 3, 7, 5, dtype=torch.float64)
    number = resolve(rule, 5, 3)
    assert torch.equal(
        scaledot.attention(query, key, value, scale=rule, num_heads=3),
        scaledot.attention(query, key, value, scale=number),
    )


def test_log_n_multiplies_row_by_row_with_the_logarithm_of_its_keys():
    """Row i of a causal call sees i + 1 keys: the same as scaling its query by hand."""
    query, key, value = torch.randn(3, 1, 2, 7, 5, dtype=torch.float64)
    by_hand = query * torch.arange(1, 8).double().log()[:, None]
    torch.testing.assert_close(
        scaledot.attention(query, key, value, is_causal=True, scale="log_n"),
        scaledot.attention(by_hand, key, value, is_causal=True),
        rtol=1e-13,
        atol=1e-14,
    )
