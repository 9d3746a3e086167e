"""The GPU kernels' tests: on a GPU where there is one, else on CPU tensors in Triton's interpreter.

The interpreter is chosen when triton is imported, so this file comes before every kernel module.
"""

import os
import pathlib
import sys

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


def _mend_interpreter() -> None:
    """Faults of triton 3.6, to be deleted with it: loop bounds that are scalars of a kernel are
    arrays of one number, of which numpy 2.4 no longer makes an int; products and differences of
    bfloat16; and float32 is cut off to bfloat16, where a GPU rounds to the nearest."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_mend

    builder = interpreter.InterpreterBuilder
    multiply = builder.create_dot

    def multiply_bfloat16(self, a, b, d, input_precision, max_num_imprecise_acc):
        """The interpreter holds bfloat16 as uint16 and would multiply those integers."""
        a, b = (_as_float32(x) for x in (a, b))
        return multiply(self, a, b, d, input_precision, max_num_imprecise_acc)

    def _as_float32(handle):
        if handle.dtype != tl.bfloat16:
            return handle
        wide = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(wide.view(np.float32), tl.float32)

    builder.create_dot = multiply_bfloat16
    truncate = builder.create_fp_trunc

    def round_to_bfloat16(self, source, kind):
        if (source.dtype.scalar, kind.scalar) != (tl.float32, tl.bfloat16):
            return truncate(self, source, kind)
        values = np.asarray(source.data)
        bits = np.ascontiguousarray(values).view(np.uint32).reshape(values.shape).astype(np.uint64)
        nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        nearest = np.where(np.isnan(values), 0x7FC0, nearest)
        return interpreter.TensorHandle(nearest.astype(np.uint16), tl.bfloat16)

    builder.create_fp_trunc = round_to_bfloat16
    subtract = builder.create_fsub

    def subtract_bfloat16(self, a, b):
        if a.dtype.scalar != tl.bfloat16:
            return subtract(self, a, b)
        wide = interpreter.TensorHandle(_as_float32(a).data - _as_float32(b).data, tl.float32)
        return round_to_bfloat16(self, wide, tl.bfloat16)

    builder.create_fsub = subtract_bfloat16


if DEVICE == "cpu":
    _mend_interpreter()

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
