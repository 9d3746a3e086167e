"""Peak memory of one call, each in a process of its own: nothing earlier can lend it pages."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from scaledot.bench.workload import Answer, Inputs, Workload

SOURCES = Path(__file__).parents[2]  # the folder that holds the package


def peak_extra_bytes(attend: Callable[[Inputs], Answer], workload: Workload) -> int:
    """What the call adds to the process at its peak, output included, inputs not."""
    function = f"{attend.__module__}:{attend.__name__}"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "scaledot.bench.weigh",
            function,
            json.dumps(dataclasses.asdict(workload)),
        ],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(
            f"weighing {function} at {workload.shape} ended with status {done.returncode} "
            f"(-9: out of memory):\n{done.stderr}"
        )
    return int(done.stdout)


def environment() -> dict[str, str]:
    """In which another process finds this package."""
    paths = [str(SOURCES), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
