"""The larger runs of the study: 19 to 25 million weights, in bfloat16 on a GPU.

A model of this size leaves most of a large GPU idle, so several runs share it, each with its twins
in a process of its own. The CSV is written after every run: a time limit costs the rest only.
"""

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from multiprocessing import get_context
from pathlib import Path

import torch
from grid import Family
from rows import Row, row_of, told, write
from runs import Setup, recorded

LARGE = Setup(layers=6, width=512, heads=8, tokens=256, batch=32, steps=300, warm_up=40, large=True)
DEEP = replace(LARGE, layers=8)
# No threshold was set with any of these in sight: all of them judge. The learning rates lie around
# an eighth of the small runs', for models eight times as wide; chosen before the first of them ran.
FAMILIES = (
    Family("AdamW, 6 layers", LARGE, (5e-4, 2e-3, 6e-3, 2e-2)),
    Family("AdamW, 8 layers", DEEP, (1e-3, 3e-3, 1e-2, 3e-2), (0,)),
    Family("AdamW, no scale", replace(LARGE, scale="none"), (2e-4, 5e-4, 2e-3, 1e-2), (0,)),
    Family("Muon", replace(LARGE, optimizer="muon"), (3e-3, 1e-2, 3e-2, 1e-1), (0,)),
)
TOY = Setup(layers=2, width=16, heads=2, tokens=16, batch=2, steps=30, warm_up=5, large=True)
TOYS = (
    Family("AdamW", TOY, (3e-1,), (0,)),
    Family("Muon, no scale", replace(TOY, optimizer="muon", scale="none"), (1e-1,), (0,)),
)


@dataclass(frozen=True)
class Job:
    """A run and its twins."""

    family: Family
    setup: Setup

    def __str__(self) -> str:
        return f"{self.family.name} at {self.setup.rate:g}, seed {self.setup.seed}"


def why_not(device: str, csv: Path | None) -> str:
    if device == "cpu" and csv is None:
        return "--device cpu trains two toys; say where their rows go: --csv FILE"
    if device != "cpu" and not torch.cuda.is_available():
        return "--large needs a CUDA device, and there is none; two toys: --device cpu --csv FILE"
    return ""


def study(device: str, folder: Path, workers: int, path: Path) -> int:
    """Exit status 1 where a run failed; the others have their rows."""
    began, failed = time.perf_counter(), 0
    every = jobs(FAMILIES if device != "cpu" else TOYS, device)
    rows: dict[Job, Row] = {}
    for job, result in _results(every, folder, workers):
        passed = f"{time.perf_counter() - began:.0f} s"
        if isinstance(result, BaseException):
            failed += 1
            print(f"{passed}  {job} failed: {type(result).__name__}: {result}", flush=True)
            continue
        rows[job] = result
        print(f"{passed}  {told(result)}  {result['seconds']} s of training", flush=True)
        write([rows[one] for one in in_order(rows)], path)
    print(f"{len(rows)} of {len(every)} runs in {time.perf_counter() - began:.0f} s")
    return 1 if failed else 0


def jobs(families: tuple[Family, ...], device: str) -> list[Job]:
    """One of each family in turn: who is stopped half-way has seen something of all of them."""
    each = [
        [Job(family, replace(setup, device=device)) for setup in family.setups()]
        for family in families
    ]
    return [job for job in chain(*zip_longest(*each)) if job is not None]


def in_order(rows: Iterable[Job]) -> list[Job]:
    """Of the families, whichever run was ready first."""
    names = [family.name for family in (*FAMILIES, *TOYS)]
    return sorted(
        rows, key=lambda job: (names.index(job.family.name), job.setup.seed, job.setup.rate)
    )


def _results(
    every: list[Job], folder: Path, workers: int
) -> Iterator[tuple[Job, Row | BaseException]]:
    # spawn: a forked process cannot use CUDA.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(row_with_machine, job, folder): job for job in every}
        for done in as_completed(running):
            yield running[done], done.exception() or done.result()


def row_with_machine(job: Job, folder: Path) -> Row:
    on_gpu = job.setup.device != "cpu"
    return {
        **row_of(job.family, job.setup, folder),
        "parameters": recorded(job.setup, folder).parameters,
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "torch": torch.__version__,
    }
