"""State dicts: torch's names, our names, inside a model, and the first values."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from scaledot.nn import AdditiveAttention, MultiHeadAttention

MODULES: dict[str, Any] = {
    "dot": lambda: MultiHeadAttention(15, 3),
    "grouped, normalised": lambda: MultiHeadAttention(30, 6, 2, qk_norm=True, sinks=True),
    "cosine": lambda: MultiHeadAttention(15, 3, score="cosine"),
    "additive": lambda: MultiHeadAttention(15, 3, score="additive", bias=False),
    "Bahdanau": lambda: AdditiveAttention(15, 15, 7, bias=True),
}


def tokens_for(module):
    return torch.randn(2, 5, module.q_proj.in_features)


@pytest.mark.parametrize("options", [{}, {"vdim": 13}, {"bias": False}])
def test_the_same_seed_starts_with_torchs_numbers(options):
    torch.manual_seed(2)
    theirs = nn.MultiheadAttention(55, 5, **options)
    torch.manual_seed(2)
    ours = MultiHeadAttention(55, 5, **options)
    loaded = MultiHeadAttention(55, 5, **options)
    loaded.load_state_dict(theirs.state_dict())
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(name)), name


def test_torchs_state_dict_loads_inside_a_model_and_is_left_as_it_was():
    theirs: Any = nn.ModuleDict({"block": nn.MultiheadAttention(15, 3), "head": nn.Linear(15, 2)})
    ours: Any = nn.ModuleDict({"block": MultiHeadAttention(15, 3), "head": nn.Linear(15, 2)})
    state = theirs.state_dict()
    names = list(state)
    ours.load_state_dict(state)
    assert list(state) == names
    weights = ours["block"].q_proj.weight, ours["block"].k_proj.weight, ours["block"].v_proj.weight
    assert torch.equal(torch.cat(weights), theirs["block"].in_proj_weight)


def test_torchs_state_dict_loads_into_a_copy_and_by_assignment():
    theirs = nn.MultiheadAttention(15, 3)
    ours = copy.deepcopy(MultiHeadAttention(15, 3, device="meta"))
    ours.load_state_dict(theirs.state_dict(), assign=True)
    assert torch.equal(ours.k_proj.weight, theirs.in_proj_weight[15:30])


def test_a_bias_of_out_proj_alone_loads_where_asked_for():
    state = nn.MultiheadAttention(15, 3, bias=False).state_dict()
    state["out_proj.bias"] = torch.randn(15)
    ours = MultiHeadAttention(15, 3, bias=False, out_bias=True)
    ours.load_state_dict(state)
    assert torch.equal(ours.out_proj.bias, state["out_proj.bias"])


def test_a_state_dict_that_lacks_a_bias_or_has_other_heads_is_refused():
    state = nn.MultiheadAttention(30, 6, bias=False).state_dict()
    with pytest.raises(RuntimeError, match=r"out_proj\.bias"):
        MultiHeadAttention(30, 6).load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"size mismatch for k_proj\.weight"):
        MultiHeadAttention(30, 6, 2, bias=False).load_state_dict(state)


@pytest.mark.parametrize("name", MODULES)
def test_state_dict_round_trip_gives_the_same_output(name):
    module, other = MODULES[name](), MODULES[name]()
    tokens = tokens_for(module)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(tokens, tokens), module(tokens, tokens))


@pytest.mark.parametrize("name", MODULES)
def test_copies_and_saved_modules_leave_the_vitals_behind(name):
    module = MODULES[name]()
    tokens = tokens_for(module)
    out = module(tokens, tokens)
    assert not any("vitals" in key for key in module.state_dict())
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded):
        assert other.vitals is None
        assert torch.equal(other(tokens, tokens), out)
    assert module.vitals is not None
