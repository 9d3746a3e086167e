"""The peers compute what we compute: against the oracle, in float64."""

import oracle
import pytest
import torch

from scaledot.bench import cases, peers
from scaledot.bench.workload import Workload

EXACT = {"rtol": 1e-11, "atol": 1e-11}
CAUSAL = pytest.mark.parametrize("causal", [False, True])


def _inputs(*, causal: bool, additive: bool = False):
    return Workload(2, 3, 67, 11, causal=causal, additive=additive, dtype="float64").make()


@CAUSAL
@pytest.mark.parametrize("peer", [peers.plain, peers.lean])
def test_vitals_of_the_eager_peers(peer, causal):
    inputs = _inputs(causal=causal)
    vitals = peer(inputs).vitals
    expected = oracle.diagnose(inputs.query, inputs.key, is_causal=causal)
    for name in (*oracle.FLOAT_FIELDS, *oracle.COUNT_FIELDS):
        torch.testing.assert_close(
            getattr(vitals, name),
            getattr(expected, name),
            **EXACT,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@CAUSAL
@pytest.mark.parametrize("peer", [peers.plain, peers.lean, peers.torch_sdpa])
def test_output_of_the_peers(peer, causal):
    inputs = _inputs(causal=causal)
    expected = oracle.attend(inputs.query, inputs.key, inputs.value, is_causal=causal)
    torch.testing.assert_close(peer(inputs).out, expected, **EXACT)


@CAUSAL
def test_the_weights_of_merging_are_those_of_the_library(causal):
    inputs = _inputs(causal=causal)
    ours, theirs = (side(inputs).vitals for side in (cases.WITH_VITALS.attend, peers.plain))
    for name in ("ratio_rows", "q_entries", "k_entries"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


@CAUSAL
def test_additive_formula_pair_by_pair(causal):
    inputs = _inputs(causal=causal, additive=True)
    row = 29
    seen = slice(0, row + 1) if causal else slice(None)
    query, key, value = inputs.query[1, 2, row], inputs.key[1, 2, seen], inputs.value[1, 2, seen]
    scores = torch.stack([inputs.weight @ torch.tanh(query + one) for one in key])
    expected = scores.exp() @ value / scores.exp().sum()
    torch.testing.assert_close(peers.plain_additive(inputs).out[1, 2, row], expected, **EXACT)


@CAUSAL
@pytest.mark.parametrize("formula", [peers.plain, peers.plain_additive])
def test_a_formula_can_start_at_a_later_row(formula, causal):
    inputs = _inputs(causal=causal, additive=formula is peers.plain_additive)
    later = inputs._replace(query=inputs.query[:, :, 41:])
    torch.testing.assert_close(formula(later, 41).out, formula(inputs).out[:, :, 41:], **EXACT)
