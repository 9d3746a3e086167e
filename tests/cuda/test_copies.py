"""Rows of any width reach the products of a Hopper GPU in pieces of at least 8 bytes.

Number by number they would get to shared memory through registers, while products still read it:
wrong gradients, or an illegal address (docs/kernels.md). Compiled for that GPU on any machine.
"""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("scaledot.backends.cuda.arguments")

# The interpreter is chosen for a whole process, and there nothing would be compiled.
COMPILE = """
import json
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from scaledot.backends.cuda import arguments, backward, forward, replay
from scaledot.backends.cuda.additive import forward as additive
from scaledot.backends.cuda.backward import softmax
from scaledot.backends.inputs import Inputs, Wanted
from scaledot.problem import Settings

class NoGpu:
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def compile(**arguments):
            made = self.kernel.warmup(grid=grid, **arguments)
            found.append((self.kernel.__name__, made.asm["ptx"]))
        return compile

class Recording(replay.Once):
    def __init__(self, call):
        self.tensors = call.tensors

    def launch(self, kernel, programs, like, arguments, **options):
        if kernel.__name__ == "_forward_kernel":
            Compiled(kernel)[(programs,)](**arguments, **options)

    def keep(self):
        pass

driver.set_active(NoGpu())
replay.Recording, replay.again = Recording, lambda call: False
forward._forward_kernel = Compiled(forward._forward_kernel)
for name in ("keys_kernel", "rows_kernel", "mask_kernel"):
    setattr(backward, name, Compiled(getattr(backward, name)))
softmax._renew_kernel = Compiled(softmax._renew_kernel)
backward.row_softmax = lambda grad_out, out, lse: softmax.Planes(lse, lse, lse)
arguments._must_align = lambda tensor: True
forward.has_little_memory = backward.has_little_memory = lambda tensor: False

found = []
queries, keys, width, value_width = 55, 80, 13, 59

def make(heads, tokens, width):
    rows = torch.empty(1, tokens, heads, width + 3, dtype=torch.float16, device="meta")
    return rows[..., :width].transpose(1, 2)

tensors = make(9, queries, width), make(3, keys, width), make(3, keys, value_width)
inputs = Inputs(*tensors, *[None] * 8)
settings = Settings(0.05, False, 0.0, 0.0, None, 0, False)
out = torch.empty(1, 9, queries, value_width, dtype=torch.float16, device="meta")
lse = torch.empty(1, 9, queries, device="meta")
forward.forward(inputs, settings, out, True)
bias = torch.empty(1, 1, queries, keys, device="meta")
wanted = Wanted(mask=True, head_scale=False, sinks=False, weight=False)
backward.backward(inputs._replace(mask=bias), settings, out, out, lse, wanted)
weight = torch.empty(1, 9, width, device="meta")
additive.forward(inputs._replace(weight=weight), settings, out, True)
print(json.dumps(found))
"""


@pytest.mark.nightly
def test_no_product_reads_rows_that_were_copied_number_by_number(tmp_path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    names = [name for name, _ in found]
    assert names == [
        "_forward_kernel",
        "_renew_kernel",
        "keys_kernel",
        "rows_kernel",
        "mask_kernel",
        "_forward_kernel",
    ]
    for name, ptx in found:
        assert "wgmma.mma_async" in ptx, name
        # A tile takes sixteen and more; the second way for broken values reads a row of one.
        assert ptx.count("ld.global.b16") <= 4, name
