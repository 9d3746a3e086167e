"""The GPU kernels' tests: on a GPU where there is one, else on CPU tensors in Triton's interpreter.

The interpreter is chosen when triton is imported, so this file comes before every kernel module.
"""

import os
import pathlib
import sys

import interpreter
import numpy as np
import pytest
import torch

HERE = pathlib.Path(__file__).parent
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOO_LATE = DEVICE == "cpu" and "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1"
if DEVICE == "cpu" and not TOO_LATE:
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton", reason="triton is not installed: no GPU kernel is tested")


if DEVICE == "cpu":
    interpreter.mend()


def pytest_collection_modifyitems(items):
    """In one process with other tests, triton may be there already, and not interpreting."""
    if TOO_LATE:
        reason = "triton was imported before: TRITON_INTERPRET=1 pytest tests/cuda runs these"
        for item in items:
            if "cuda" in item.path.parts and item.path.is_relative_to(HERE):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(20_17)


@pytest.fixture(autouse=True)
def _silent_arithmetic():
    """A GPU overflows to infinity in silence; numpy, which interprets the kernels, would warn."""
    with np.errstate(all="ignore"):
        yield
