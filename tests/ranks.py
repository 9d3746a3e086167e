"""Several processes with one gloo group, for tests: `spawn` runs a function in each of them.

As a program it is one rank: `python ranks.py FOLDER RANK`.
"""

import contextlib
import datetime
import importlib.util
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

GROUP_TIMEOUT = 60.0
LIMIT = 120.0  # seconds: no test hangs longer
SOURCE = Path(__file__).parents[1] / "src"


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
    stands for what they returned. Raises with the traceback of the first other rank that failed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        place = (sys.modules[function.__module__].__file__, function.__qualname__)
        (folder / "task").write_bytes(pickle.dumps((*place, world, args)))
        # Two cores for everybody: a rank that spins on both of them starves the others.
        settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": _path(), **(environment or {})}
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, str(folder), str(rank)],
                env={**os.environ, **settings},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for rank in range(world)
        ]
        try:
            said = _join(ranks, limit, may_die)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        results = []
        for rank, process in enumerate(ranks):
            found = folder / f"result{rank}"
            if rank not in may_die and (process.returncode or not found.exists()):
                raise AssertionError(f"rank {rank} of {world} failed:\n{said[rank]}")
            results.append(torch.load(found, weights_only=False) if found.exists() else None)
        return results


def _join(ranks: list[subprocess.Popen], limit: float, may_die: tuple[int, ...]) -> list[str]:
    """What each has printed. The first failure ends the others: they would wait for it."""
    end = time.monotonic() + limit
    while any(process.poll() is None for process in ranks):
        failed = any(process.poll() for rank, process in enumerate(ranks) if rank not in may_die)
        if failed or time.monotonic() > end:
            time.sleep(0.5)  # others may be about to say why
            for process in ranks:
                process.kill()
        time.sleep(0.02)
    said = [process.communicate()[0].decode(errors="replace") for process in ranks]
    if time.monotonic() > end:
        raise AssertionError(f"the ranks had not ended after {limit:.0f} s:\n" + "\n".join(said))
    # Who failed by itself, not by our hand: one may be the cause of the others.
    failed = [r for r, process in enumerate(ranks) if process.returncode > 0 and r not in may_die]
    if failed:
        words = "\n".join(f"rank {rank} of {len(ranks)} failed:\n{said[rank]}" for rank in failed)
        raise AssertionError(words)
    return said


def _path() -> str:
    return os.pathsep.join(
        [str(SOURCE), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    )


def _run(folder: Path, rank: int) -> None:
    file, name, world, args = pickle.loads((folder / "task").read_bytes())
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
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # somebody is gone already
            dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads now and then abort a process that takes its group down


if __name__ == "__main__":
    try:
        _run(Path(sys.argv[1]), int(sys.argv[2]))
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # a group whose peers are gone may hang at the exit
