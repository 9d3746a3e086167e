"""Compile the portable kernels of calls for a GPU that need not be there.

    python compiled_kernels.py ARCHITECTURE "Case(...)" ["Case(...)" ...]

A process of its own: an assertion in Triton's compiler ends it. It prints a JSON object with facts
of each kernel by its name: the widths along the keys (kWidth) of its products, the most bytes of
shared memory that a program takes, and how many of its exponentials have an argument rounded twice.
"""

import json
import os
import re
import sys
import tempfile
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
from fuzz import engines
from fuzz.cases import Case
from fuzz.tensors import make
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from scaledot.backends.cuda import backend


class Driver:
    """As Triton's of a GPU of this architecture."""

    def __init__(self, architecture: int) -> None:
        self.target = GPUTarget("cuda", architecture, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """Launched, it does nothing."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments: None


def compile_only(architecture: int) -> dict[str, dict[str, Any]]:
    """Let every launch compile its kernel and end there; returns what is printed, to be filled."""
    found: dict[str, dict[str, Any]] = {}
    run = jit.JITFunction.run

    def compile_(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Compiled:
        compiled = run(self, *arguments, grid=grid, warmup=True, **options)
        name = self.fn.__qualname__
        widths = re.findall(r"tt\.dot .*kWidth = (\d+)", compiled.asm["ttgir"])
        facts = found.setdefault(name, {"widths": [], "shared": 0, "rounded_twice": 0})
        facts["widths"] = sorted({*facts["widths"], *map(int, widths)})
        facts["shared"] = max(facts["shared"], compiled.metadata.shared)
        facts["rounded_twice"] += rounded_twice(compiled.asm["ptx"])
        return Compiled()

    driver.set_active(Driver(architecture))
    jit.JITFunction.run = compile_
    torch.cuda.current_device = lambda: None  # the device of CPU tensors, so that no GPU is asked
    backend.interprets = lambda: True  # CPU tensors are served
    return found


def rounded_twice(ptx: str) -> int:
    """Count 2^(x - m) whose x was chosen before: x is a rounded product then, no multiply-add."""
    made = dict(re.findall(r"(?:sub|selp)[.\w]* \t?(%\w+), (%\w+),", ptx))
    chosen = set(re.findall(r"selp[.\w]* \t?(%\w+),", ptx))
    arguments = re.findall(r"ex2[.\w]* \t?%\w+, (%\w+);", ptx)
    return sum(made.get(argument) in chosen for argument in arguments)


def compile_call(case: Case) -> None:
    """Compile what the call of a case and its gradients launch."""
    call = make(case)
    for leaf in call.leaves.values():
        leaf.requires_grad_()
    if case.with_vitals:
        out, _ = engines.attention_with_vitals(call, "triton")
    else:
        out = engines.attention(call, "triton")
    if out.requires_grad:
        out.backward(torch.zeros_like(out))


def main() -> None:
    architecture, *cases = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        found = compile_only(int(architecture))
        for text in cases:
            print(text, file=sys.stderr, flush=True)  # the last one is what ended the process
            compile_call(eval(text, {"Case": Case}))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
