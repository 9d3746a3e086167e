"""The portable kernels are compiled for a GPU on any machine, where masks make that difficult.

Triton cannot compile a float64 product whose operand it thinks is made of a narrower type: its
assertion ends the process. The interpreter shows nothing of that.
"""

import json
import os
import pathlib
import subprocess
import sys
from dataclasses import replace

import pytest
from fuzz.cases import Case, draw

from scaledot.backends.cuda import backend

if backend.TRITON is None:
    pytest.skip("triton is not installed", allow_module_level=True)

TESTS = pathlib.Path(__file__).parents[1]
PLAIN = Case(query_lead=(1, 4), gqa=True, dtype="float64", width=13, with_vitals=True)
FLOATS = ("float16", "bfloat16", "float32", "float64")


def compiled(architecture, *cases):
    """Facts of each kernel: widths of its products along the keys, bytes of shared memory."""
    ended = subprocess.run(
        [sys.executable, TESTS / "compiled_kernels.py", str(architecture), *map(str, cases)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (TESTS, *sys.path)))},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout)


def masked(case, kind):
    mask, of = ("bool", None) if kind == "bool" else ("float", kind)
    return replace(case, mask=mask, mask_type=of, mask_shape=(case.queries, case.keys))


@pytest.mark.nightly
def test_masks_narrower_than_the_product():
    cases = [replace(masked(PLAIN, kind), only_wanted="value") for kind in ("bool", "float16")]
    found = compiled(90, *cases)
    for kernel in ("_forward_kernel", "keys_kernel", "rows_kernel"):
        assert found[kernel]["widths"] == [1]


@pytest.mark.nightly
@pytest.mark.parametrize(("architecture", "width", "room"), [(90, 64, 232_448), (80, 256, 166_912)])
def test_wide_masks_of_narrow_tensors_fit_the_shared_memory(architecture, width, room):
    """bfloat16 with a float32 mask: its tiles are larger than those of keys and values."""
    case = replace(PLAIN, dtype="bfloat16", width=width, value_width=width, queries=65, keys=130)
    found = compiled(architecture, masked(case, "float32"))
    assert {name: facts["shared"] for name, facts in found.items() if facts["shared"] > room} == {}


@pytest.mark.nightly
@pytest.mark.parametrize(("architecture", "width"), [(90, 1), (80, 33), (90, 128), (80, 300)])
def test_masks_of_every_type_and_width(architecture, width):
    case = replace(PLAIN, width=width, value_width=width)
    compiled(architecture, *(masked(case, kind) for kind in ("bool", *FLOATS)))


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(0, 16, 4))
def test_random_calls(first):
    """Of every score, window, cap, scale, packing and layout."""
    compiled(90, *(replace(draw(64, i), dtype="float64") for i in range(first, first + 4)))


@pytest.mark.nightly
def test_arguments_are_rounded_alike_in_all_of_the_backward_pass():
    """Of logits of 1e6 a second rounding moves a weight by a tenth: no row would sum to 1."""
    found = compiled(90, Case(width=64, value_width=64, dtype="float16", is_causal=True))
    for kernel in ("_renew_kernel", "keys_kernel", "rows_kernel"):
        assert found[kernel]["rounded_twice"] == 0
