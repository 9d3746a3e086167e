"""Clocks for steps that follow each other: the processor's and the wall's, or a GPU's events.

The processor's time leaves out what other programs do and counts what the watch's own threads do,
so it decides on a machine that is not idle. A GPU works behind the host: its events say when a step
really ended, and nothing is waited for in between.
"""

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch

Laps = list[dict[str, float]]  # milliseconds of each step, by clock


def laps(call: Callable[[], object], calls: int, device: str) -> Laps:
    return _on_gpu(call, calls) if device == "cuda" else _on_cpu(call, calls)


def deciding_clock(device: str) -> str:
    return "device" if device == "cuda" else "cpu"


def _on_cpu(call: Callable[[], object], calls: int) -> Laps:
    marks = [(time.process_time(), time.perf_counter())]
    for _ in range(calls):
        call()
        marks.append((time.process_time(), time.perf_counter()))
    return [
        {"cpu": 1e3 * (after[0] - before[0]), "wall": 1e3 * (after[1] - before[1])}
        for before, after in itertools.pairwise(marks)
    ]


def _on_gpu(call: Callable[[], object], calls: int) -> Laps:
    events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    torch.cuda.synchronize()
    began = time.perf_counter()
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    wall = 1e3 * (time.perf_counter() - began) / calls  # one number: the host runs ahead
    return [
        {"device": before.elapsed_time(after), "wall": wall}
        for before, after in itertools.pairwise(events)
    ]
