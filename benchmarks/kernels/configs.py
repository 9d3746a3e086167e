"""Which way of building the Hopper kernel is the fastest, for each kind of call of `bench --gpu`.

    PYTHONPATH=src python -m benchmarks.kernels --only "128 16384 causal"

`launch.config_for` holds the outcome. Kernels differ by the luck of the assembler as much as by
reason, so whoever changes softmax.py should look again. They are compiled by many processes at a
time; each is then timed alone, in turn with cuDNN and with an empty cache, as in the bench.
"""

import argparse
import itertools
import multiprocessing
import os
import time
from typing import Any, NamedTuple

import torch

from scaledot.backends.cuda import hopper
from scaledot.backends.inputs import Inputs
from scaledot.problem import Settings

WIDTHS, LENGTHS, TOKENS, MODEL_WIDTH = (64, 128, 256), (16384, 4096), 16384, 2048
ORDERS = ("lwtpab", "tpwlab", "pltwab", "wpltba", "lptwab", "tlpwab")
AT_ONCE = (2, 4)
RUNS = (1, 8)
CUTS = (16, 24, 32, 64)
REPEATS = 9


class Kind(NamedTuple):
    """Of call."""

    width: int
    tokens: int
    causal: bool
    values: bool

    def __str__(self) -> str:
        mask, what = ("causal" if self.causal else "full"), ("" if self.values else " scores alone")
        return f"{self.width} {self.tokens} {mask}{what}"


class Task(NamedTuple):
    kind: Kind
    config: tuple  # the fields of launch.Config


class Outcome(NamedTuple):
    task: Task
    microseconds: float
    of_cudnn: float  # its time over ours
    failure: str = ""


def kinds() -> list[Kind]:
    return [
        Kind(*each) for each in itertools.product(WIDTHS, LENGTHS, (False, True), (True, False))
    ]


def candidates(kind: Kind) -> list[tuple]:
    """What `config_for` says, and other first pivots; tiles as one text, with other orders and
    waits; without the text other orders, runs, waits and cuts of a tile."""
    from scaledot.backends.cuda.hopper.launch import config_for

    moments = _moments(_inputs(kind, "meta"), _settings(kind))
    width = max(kind.width, 64)
    chosen = config_for(width, kind.tokens, values=kind.values, moments=moments, causal=kind.causal)
    waits = (False, True) if kind.values else (False,)
    cuts = (False,) if moments == "all" else (False, True)
    others = [
        chosen._replace(
            order=order, at_once=at_once, run=run, early=early, quarters=quarters, in_place=False
        )
        for order, at_once, run, early, quarters in itertools.product(
            ORDERS, AT_ONCE, RUNS, waits, cuts
        )
    ]
    text = chosen._replace(in_place=True, run=8, quarters=False)
    where = [{"cut": cut, "early": False} for cut in CUTS] + [{"early": True}]
    in_place = [
        text._replace(order=order, at_once=at_once, **wait)
        for order, at_once, wait in itertools.product(
            ORDERS, (1, *AT_ONCE), where if kind.values else [{}]
        )
    ]
    others = [chosen, chosen._replace(few=not chosen.few), *in_place, *others]
    return list(dict.fromkeys(map(tuple, others)))


def _inputs(kind: Kind, device: str) -> Inputs:
    shape = (TOKENS // kind.tokens, MODEL_WIDTH // kind.width, kind.tokens, kind.width)
    query, key, value = (torch.empty(shape, dtype=torch.bfloat16, device=device) for _ in range(3))
    if device != "meta":
        for tensor in (query, key, value):
            tensor.normal_()
    return Inputs(query, key, value if kind.values else None, *[None] * 8)


def _settings(kind: Kind) -> Settings:
    right = 0 if kind.causal else None
    return Settings(kind.width**-0.5, False, 0.0, 0.0, None, right, False)


def _moments(inputs: Inputs, settings: Settings) -> str:
    return hopper._moments_in_the_pass(inputs, settings)


_alone: Any = None  # held by the process that measures
_end = float("inf")


def _begin(alone: Any, end: float) -> None:
    global _alone, _end
    _alone, _end = alone, end


def _measure(task: Task) -> Outcome:
    if time.time() > _end:
        return Outcome(task, 0.0, 0.0, "out of time")
    try:
        return _race(task)
    except Exception as error:  # of the compiler, as a rule: registers or shared memory
        return Outcome(task, 0.0, 0.0, f"{type(error).__name__}: {error}"[:120])


def _race(task: Task) -> Outcome:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from scaledot.backends.cuda import moments
    from scaledot.backends.cuda.hopper import launch
    from scaledot.bench.gpu.clock import Cuda, race

    kind, config = task.kind, launch.Config(*task.config)
    inputs, settings = _inputs(kind, "cuda"), _settings(kind)
    summed = _moments(inputs, settings)
    block = moments.block_for(kind.tokens, kind.width) if summed == "edges" else 0
    query, key = inputs.query, inputs.key
    value = torch.randn_like(key) if inputs.value is None else inputs.value
    out = torch.empty_like(query) if kind.values else None

    def ours() -> None:
        launch.forward(inputs, settings, out, True, summed, block, config)

    def cudnn() -> None:
        torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=kind.causal)

    few = [None if tensor is None else tensor[:, :, :256] for tensor in (*inputs[:3], out)]
    # Compiles; so few tokens hardly disturb whoever is being timed.
    launch.forward(
        inputs._replace(query=few[0], key=few[1], value=few[2]),
        settings,
        few[3],
        True,
        summed,
        block,
        config,
    )
    torch.cuda.synchronize()
    with _alone, sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        samples = race({"ours": ours, "cuDNN": cudnn}, REPEATS, Cuda()).samples
    seconds, peer = samples["ours"].median, samples["cuDNN"].median
    return Outcome(task, seconds * 1e6, peer / seconds)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--only", default="", help="kinds of call whose name has these words")
    parser.add_argument("--seconds", type=float, default=600.0, help="then no other is begun")
    parser.add_argument("--processes", type=int, default=max((os.cpu_count() or 2) - 1, 1))
    asked = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no GPU here: nothing was measured")
        return 2
    tasks = [
        Task(kind, config)
        for kind in kinds()
        if set(asked.only.split()) <= set(str(kind).split())
        for config in candidates(kind)
    ]
    spawned = multiprocessing.get_context("spawn")
    end = time.time() + asked.seconds
    with spawned.Pool(asked.processes, _begin, (spawned.Lock(), end)) as pool:
        outcomes = []
        for outcome in pool.imap_unordered(_measure, tasks):
            outcomes.append(outcome)
            print(f"\r{len(outcomes)} of {len(tasks)}", end="", flush=True)
    print()
    for kind, group in itertools.groupby(
        sorted(outcomes, key=lambda each: (each.task.kind, -each.of_cudnn)),
        key=lambda each: each.task.kind,
    ):
        print(kind)
        for each in group:
            mark = "*" if each.task.config == candidates(kind)[0] else " "
            found = each.failure or f"{each.microseconds:8.0f} us  {each.of_cudnn:.3f} of cuDNN"
            print(f"  {mark} {found}  {each.task.config}")
    return 0
