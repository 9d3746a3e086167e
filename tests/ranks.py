"""Several processes with one gloo group, for tests: `spawn` runs a function in each of them."""

import contextlib
import datetime
import importlib.util
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist

GROUP_TIMEOUT = 300.0
LIMIT = 600.0  # seconds: no test hangs longer
SOURCE = Path(__file__).parents[1] / "src"

# To import these takes seconds, in each rank of each test. So a process that has done nothing but
# import them waits, as long as the tests run, and the ranks are its forks.
PRELOADED = [
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "pytest",
    "scaledot.distributed",
    "scaledot.watch.watch",
    "ranks",
]


def spawn(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    limit: float = LIMIT,
    may_die: tuple[int, ...] = (),
    environment: dict[str, str] | None = None,
) -> list[Any]:
    """What function(rank, world, *args) returns in each of `world` processes.

    function: defined at the top of its module. may_die: ranks that may end as they like; None
    stands for what they returned. environment: more variables, there before Python starts. Raises
    with the traceback of the first other rank that failed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        place = (sys.modules[function.__module__].__file__, function.__qualname__)
        (folder / "task").write_bytes(pickle.dumps((*place, world, args, bool(may_die))))
        ranks = _start(folder, world, environment)
        try:
            said = _join(ranks, folder, limit, may_die)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        results = []
        for rank, process in enumerate(ranks):
            found = folder / f"result{rank}"
            if rank not in may_die and (process.exitcode or not found.exists()):
                raise AssertionError(f"rank {rank} of {world} failed:\n{said[rank]}")
            results.append(torch.load(found, weights_only=False) if found.exists() else None)
        return results


def _start(folder: Path, world: int, environment: dict[str, str] | None) -> list[BaseProcess]:
    # Two cores for everybody: a rank that spins on both of them starves the others.
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": _path(), **(environment or {})}
    # A fork has the variables of its parent; and where there is CUDA, whoever has looked for it
    # cannot be forked any more.
    fresh = environment is not None or torch.cuda.is_available()
    context = multiprocessing.get_context("spawn" if fresh else "forkserver")
    context.set_forkserver_preload(PRELOADED)
    ranks = [context.Process(target=_rank, args=(folder, rank)) for rank in range(world)]
    with mock.patch.dict(os.environ, settings):
        for process in ranks:
            process.start()
    return ranks


def _join(
    ranks: list[BaseProcess], folder: Path, limit: float, may_die: tuple[int, ...]
) -> list[str]:
    """What each has printed. The first failure ends the others: they would wait for it.

    Nobody waits for a rank that may die.
    """
    needed = [rank for rank in range(len(ranks)) if rank not in may_die]
    end = time.monotonic() + limit
    late = False
    while not late and any(ranks[rank].exitcode is None for rank in needed):
        time.sleep(0.02)
        late = time.monotonic() > end
        if late or any(ranks[rank].exitcode for rank in needed):
            time.sleep(0.5)  # others may be about to say why
            for process in ranks:
                process.kill()
                process.join()
    said = [_said(folder, rank) for rank in range(len(ranks))]
    if late:
        raise AssertionError(f"the ranks had not ended after {limit:.0f} s:\n" + "\n".join(said))
    # Who failed by itself, not by our hand: one may be the cause of the others.
    failed = [rank for rank in needed if (ranks[rank].exitcode or 0) > 0]
    if failed:
        words = "\n".join(f"rank {rank} of {len(ranks)} failed:\n{said[rank]}" for rank in failed)
        raise AssertionError(words)
    return said


def _said(folder: Path, rank: int) -> str:
    path = folder / f"said{rank}"
    return path.read_text(errors="replace") if path.exists() else ""


def _path() -> str:
    return os.pathsep.join(
        [str(SOURCE), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    )


def _rank(folder: Path, rank: int) -> None:
    """The whole life of one rank."""
    with open(folder / f"said{rank}", "wb") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    status = 0
    try:
        _run(folder, rank)
    except BaseException:
        sys.stdout.flush()  # what was printed before comes first
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # gloo's threads now and then abort a process that takes its group down, and a group whose
    # peers are gone may hang at the exit.
    os._exit(status)


def _run(folder: Path, rank: int) -> None:
    file, name, world, args, some_may_die = pickle.loads((folder / "task").read_bytes())
    spec = importlib.util.spec_from_file_location("task", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["task"] = module
    spec.loader.exec_module(module)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/group",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=GROUP_TIMEOUT),
    )
    result = getattr(module, name)(rank, world, *args)
    torch.save(result, folder / f"result{rank}.part")
    os.replace(folder / f"result{rank}.part", folder / f"result{rank}")
    if dist.is_initialized() and not some_may_die:
        with contextlib.suppress(RuntimeError):  # somebody is gone already
            dist.barrier()
