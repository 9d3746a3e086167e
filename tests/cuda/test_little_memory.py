"""Kernels compiled for a GPU with 99 KiB of shared memory, on any machine: what they take fits."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

arguments = pytest.importorskip("scaledot.backends.cuda.arguments")
ROOM = 99 * 2**10  # of a program where the compute capability is 8.6, 8.9 or 12.0

# The interpreter is chosen for a whole process, and there nothing would be compiled.
COMPILE = """
import json
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from scaledot.backends.cuda import backward, forward
from scaledot.backends.cuda.backward import softmax
from scaledot.backends.inputs import Inputs, Wanted
from scaledot.problem import Settings

class NoGpu:
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 89, 32))

class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def compile(**arguments):
            made = self.kernel.warmup(grid=grid, **arguments)
            taken.append((self.kernel.__name__, width, made.metadata.shared))
        return compile

driver.set_active(NoGpu())
forward._forward_kernel = Compiled(forward._forward_kernel)
for name in ("keys_kernel", "rows_kernel", "mask_kernel"):
    setattr(backward, name, Compiled(getattr(backward, name)))
softmax._renew_kernel = Compiled(softmax._renew_kernel)
backward.row_softmax = lambda grad_out, out, lse: softmax.Planes(lse, lse, lse)
forward.has_little_memory = backward.has_little_memory = lambda tensor: True

taken = []
for width, masked, steps in ((64, True, "forward"), (256, False, "both")):
    heads = torch.empty(1, 2, 512, width, dtype=torch.bfloat16, device="meta")
    inputs = Inputs(heads, heads, heads, *[None] * 8)
    if masked:
        inputs = inputs._replace(mask=heads.new_empty(1, 2, 512, 512))
    settings = Settings(width**-0.5, False, 0.0, 0.0, None, None, False)
    forward.forward(inputs, settings, torch.empty_like(heads), True)
    if steps == "both":
        lse = torch.empty(1, 2, 512, device="meta")
        wanted = Wanted(mask=masked, head_scale=False, sinks=False, weight=False)
        backward.backward(inputs, settings, heads, heads, lse, wanted)
print(json.dumps(taken))
"""


@pytest.mark.nightly
def test_tiles_fit_into_little_shared_memory(tmp_path):
    """Those that took the most of it: the tables' own would not fit."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    told = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True
    )
    assert told.returncode == 0, told.stderr[-4000:]
    taken = json.loads(told.stdout)
    assert [(name, width) for name, width, _ in taken] == [
        ("_forward_kernel", 64),
        ("_forward_kernel", 256),
        ("_renew_kernel", 256),
        ("keys_kernel", 256),
        ("rows_kernel", 256),
    ]
    assert all(0 < room <= ROOM for _, _, room in taken), taken


@pytest.mark.parametrize(
    ("facts", "little"),
    [
        ({"shared_memory_per_block_optin": ROOM}, True),
        ({"shared_memory_per_block_optin": 163 * 2**10}, False),  # an A100
        ({}, False),  # where torch does not tell
    ],
)
def test_which_gpus_have_little(monkeypatch, facts, little):
    monkeypatch.setattr(arguments, "_shared_memory", arguments._shared_memory.__wrapped__)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(**facts))
    on_gpu = SimpleNamespace(is_cuda=True, device=SimpleNamespace(index=0))
    assert arguments.has_little_memory(on_gpu) == little
    assert not arguments.has_little_memory(torch.empty(0))
