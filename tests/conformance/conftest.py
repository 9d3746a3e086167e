"""Every test draws the same numbers, alone or in company."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(20_17)
