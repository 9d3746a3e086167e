"""Every test draws the same numbers, alone or in company; SCALEDOT_TEST_DEVICE=cuda: on a GPU."""

import os

import pytest
import torch

from conformance import agreement

DEVICE = os.environ.get("SCALEDOT_TEST_DEVICE", "cpu")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(20_17)


@pytest.fixture(autouse=DEVICE != "cpu")
def _on_the_device(monkeypatch):
    """New tensors lie there. Its tensor cores keep fewer guard bits than a float32 adder."""
    monkeypatch.setattr(agreement, "LOGIT_ULPS", 64)
    with torch.device(DEVICE):
        yield
