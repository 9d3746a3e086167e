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
from tiers import leave_to_the_night

HERE = pathlib.Path(__file__).parent
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOO_LATE = DEVICE == "cpu" and "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1"
if DEVICE == "cpu" and not TOO_LATE:
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton", reason="triton is not installed: no GPU kernel is tested")


if DEVICE == "cpu":
    interpreter.mend()

# Files whose kernels take long in the interpreter: without a GPU one case of each test runs every
# time, the others at night.
LONG = {
    "test_additive_kernels.py",
    "test_backends.py",
    "test_backward.py",
    "test_forward.py",
    "test_moments.py",
    "test_portable.py",
    "test_summary.py",
    "test_whole_moments.py",
}


def pytest_collection_modifyitems(items):
    mine = [item for item in items if item.path.is_relative_to(HERE)]
    for item in mine:
        item.add_marker(pytest.mark.gpu)
    if TOO_LATE:  # in one process with other tests, triton may be there, and not interpreting
        reason = "triton was imported before: TRITON_INTERPRET=1 pytest tests/cuda runs these"
        for item in mine:
            item.add_marker(pytest.mark.skip(reason=reason))
    elif DEVICE == "cpu":
        leave_to_the_night(item for item in mine if item.path.name in LONG)


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
