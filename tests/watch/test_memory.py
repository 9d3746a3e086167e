"""A whole run under the watch: its memory does not grow with the number of steps.

SCALEDOT_STEPS=10000 makes it as long as the bar says.
"""

import gc
import os
import tracemalloc

import pytest
import torch
from torch import nn

import scaledot
from scaledot.watch.sinks import JsonLines
from scaledot.watch.store import RunReader

STEPS = int(os.environ.get("SCALEDOT_STEPS", "1500"))
A_STEP = 20  # bytes: what is kept of a step, if nothing is; a reading alone would be some hundred


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(2, 6)

    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(*self.qkv(x)[:, None].chunk(3, -1))


@pytest.mark.nightly
def test_memory_of_a_watched_run_does_not_grow(tmp_path):
    model, tokens = One(), torch.randn(1, 3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    held = []
    tracemalloc.start()
    try:
        sink = JsonLines(tmp_path / "run.jsonl")
        with scaledot.Watch(model, every=1, store=tmp_path / "run.vitals", sinks=[sink]) as watch:
            for step in range(STEPS):
                model(tokens).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step in (STEPS // 5, STEPS - 1):
                    # What waits for the disk, and a chunk that is not full, are not growth.
                    assert watch._own_store.flush()
                    assert sink.flush()
                    gc.collect()
                    held.append(tracemalloc.get_traced_memory()[0])
        sink.close()
    finally:
        tracemalloc.stop()
    first, last = held
    open_chunk = 2 * 64 * 1024
    assert last - first < open_chunk + A_STEP * STEPS
    assert len(RunReader(tmp_path / "run.vitals").series("One", 0, "entropy")) == STEPS
