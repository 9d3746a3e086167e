import pytest
import torch

from scaledot.watch.remedies import calls
from scaledot.watch.remedies.rules import Rule


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_stays():
    """Models that a test leaves behind take their rules with them, but not the stand-ins."""
    yield
    for module, rules in list(calls._rules.items()):
        for rule in list(rules):
            calls.remove(module, rule)
    calls.remove(None, Rule())
    assert not calls._placed


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
