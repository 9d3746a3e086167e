"""Our kernels compiled by several processes, while the gate asks for them one by one.

To compile one takes seconds, and all shapes together have some sixty. What another process has
compiled is found in Triton's cache. `python -m scaledot.bench.gpu.ahead CALLS` is such a process.
"""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from time import monotonic
from typing import Self

from scaledot.bench.gate import Subject
from scaledot.bench.gpu import cases
from scaledot.bench.memory import environment
from scaledot.bench.workload import Workload, touch

AT_MOST = 12  # processes; each has a context on the GPU
PATIENCE = 240.0  # seconds for all of them
FEW_HEADS = 2  # kernels do not depend on how many there are


class Ahead:
    """Entered, they begin; `ready` waits for the last of them, before anything is timed."""

    def __init__(self, subjects: Iterable[Subject]) -> None:
        self._calls = [
            (contender.name, dataclasses.asdict(workload))
            for contender, workload in subjects
            if not contender.foreign and workload.device == "cuda"
        ]
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        number = min(len(self._calls), (os.cpu_count() or 1) // 2, AT_MOST)
        if number > 1:
            self._processes = [self._start(self._calls[i::number]) for i in range(number)]
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def ready(self) -> None:
        end = monotonic() + PATIENCE
        for process in self._processes:
            try:
                process.wait(max(end - monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, calls: list[tuple[str, dict]]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "scaledot.bench.gpu.ahead", json.dumps(calls)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # the gate will meet the same errors, and tells them
            env=environment(),
        )


def main(calls: str) -> None:
    contenders = {contender.name: contender for contender in cases.OURS}
    for name, fields in json.loads(calls):
        workload = Workload(**fields)
        few = dataclasses.replace(workload, batch=1, heads=min(workload.heads, FEW_HEADS))
        contender = contenders[name]
        with suppress(Exception):  # as above
            touch(contender.attend(contender.prepare(few.make())))


if __name__ == "__main__":
    main(*sys.argv[1:])
