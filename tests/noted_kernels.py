"""Triton kernels that are not run: every launch is written down instead."""

from dataclasses import dataclass

import torch
from triton.runtime import jit

STREAM = 1234  # the current one, of every device


def as_on_a_gpu(monkeypatch, launching, replay):
    """Nothing is known yet, and every call is one that comes again."""
    monkeypatch.setattr(launching, "_compiled", {})
    monkeypatch.setattr(launching, "KNOWN", True)
    monkeypatch.setattr(replay, "_known", {})
    monkeypatch.setattr(replay, "_seen", Everything())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)


@dataclass
class Descriptor:
    """As Triton's, of a tensor."""

    base: torch.Tensor
    shape: list
    strides: list
    block_shape: list
    padding: str = "zero"


class Everything(set):
    """Calls that have been seen before: all."""

    def __contains__(self, _):
        return True


class Compiled:
    """As Triton's, with a note of every launch."""

    packed_metadata = function = "as compiled"

    def __init__(self, launches):
        self.launches = launches

    def __getitem__(self, grid):
        return lambda *values: self.launches.append((grid, values))

    def run(self, x, y, z, stream, function, packed, launch, enter, leave, *values):
        assert stream == STREAM
        self.launches.append(((x, y, z), values))


class Kernel(jit.JITFunction):
    """`searched`: launches that went through Triton; `launches`: all others."""

    def __init__(self, body, **options):
        super().__init__(body, **options)
        self.searched, self.launches = [], []

    def run(self, *args, grid, warmup, **kwargs):
        self.searched.append((grid, kwargs))
        return Compiled(self.launches)
