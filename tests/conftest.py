"""Each test draws the same numbers, alone, in company and in any order, and leaves nothing behind.

What is drawn for several tests (a fixture of a module, of the session) is drawn apart: it is the
same whichever test asks first, and takes no number from that one.
"""

import gc
import sys
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch
from tiers import leave_to_the_night
from torch.nn import functional as F

SEED = 20_17

# Hypothesis draws the same cases every time, and no case has a limit of time: machines are busy.
hypothesis.settings.register_profile("suite", derandomize=True, deadline=None)
hypothesis.settings.load_profile("suite")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    leave_to_the_night(item for item in items if item.get_closest_marker("one_case"))


def pytest_collection_finish() -> None:
    """Take what was collected out of the sight of the garbage collector, and of a watch's search.

    Both look at every object of the process, and thousands of tests are millions of objects.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _little_to_search() -> Iterator[None]:
    """Take out of sight, too, what a module has imported and left, such as torch's compiler."""
    yield
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    torch.manual_seed(SEED)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Iterator[None]:
    if fixturedef.scope == "function":
        return (yield)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(SEED)
        return (yield)


@pytest.fixture(autouse=True)
def _fresh_compiler(request: pytest.FixtureRequest) -> Iterator[None]:
    """Dynamo counts how often it has compiled a line, and gives up when others did so often."""
    compiles = request.node.get_closest_marker("compile") is not None
    if compiles:
        torch._dynamo.reset()
    yield
    if compiles:
        torch._dynamo.reset()


def _settings() -> dict[str, object]:
    """What a test may change and has to put back."""
    hub = sys.modules.get("scaledot.watch.probes.hub")
    return {
        "threads": torch.get_num_threads(),
        "default type": torch.get_default_dtype(),
        "determinism": torch.are_deterministic_algorithms_enabled(),
        "gradients": torch.is_grad_enabled(),
        "watches": () if hub is None else hub.listeners,
        "torch's attention": F.scaled_dot_product_attention,
    }


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    before = _settings()
    yield
    after = _settings()
    assert after == before, "the test leaves something behind"
