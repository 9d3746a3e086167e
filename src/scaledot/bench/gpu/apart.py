"""Cases that run in a fresh process each: they compile side by side, and race one at a time."""

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any, NamedTuple, Self

from scaledot.bench.clock import Samples
from scaledot.bench.gpu.absence import reason_of
from scaledot.bench.memory import environment
from scaledot.bench.workload import Workload

MARK = "duel: "  # compilers print too
AT_ONCE = 6  # compilations; a process that has compiled waits, and costs memory only
PATIENCE = 240.0  # seconds for all of them


class Duel:
    """One process, from its start to its samples."""

    def __init__(self, workload: Workload) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `close`
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "scaledot.bench.gpu.duel",
                json.dumps(dataclasses.asdict(workload)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            # One kernel each: a pool of compilers in each process would only crowd the cores.
            env={"TORCHINDUCTOR_COMPILE_THREADS": "1", **environment()},
        )

    def absent(self) -> dict[str, str]:
        """Waits until it has compiled; why a side is not there, by side."""
        return self._answer()["absent"]

    def race(self, rounds: int) -> dict[str, Any]:
        """`seconds` by side, and which side `waits` for the GPU inside its call."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{rounds}\n")
        self._process.stdin.flush()
        return self._answer()

    def kill(self) -> None:
        """Also while it works: nobody will ask for the rest."""
        self._process.kill()

    def close(self) -> None:
        """After `kill`, when nobody reads any more."""
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        status = self._process.wait()
        self._errors.seek(0)
        words = self._errors.read().strip().splitlines()
        raise RuntimeError(f"its process ended with status {status}: {words[-1] if words else ''}")


class Report(NamedTuple):
    """Samples by side, "ours" and "peer"; and why a side has none."""

    samples: dict[str, Samples]
    waits: list[str]
    absent: dict[str, str]


class Duels:
    """All of a run. Entered, they begin to compile; `ready` waits for the last of them."""

    def __init__(self, workloads: Iterable[Workload]) -> None:
        self._workloads = list(dict.fromkeys(workloads))
        self._duels: dict[Workload, Duel] = {}
        self._absences: dict[Workload, Future[dict[str, str]]] = {}
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._over = False

    def __enter__(self) -> Self:
        for workload in self._workloads:
            self._absences[workload] = self._pool.submit(self._begin, workload)
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._kill(self._workloads)
        self._pool.shutdown()
        for duel in self._duels.values():
            duel.close()

    def ready(self) -> None:
        """From here on nothing is compiled, and a GPU belongs to whoever is timed."""
        late = wait(self._absences.values(), PATIENCE).not_done
        if late:
            self._kill(work for work, absence in self._absences.items() if absence in late)

    def race(self, workload: Workload, rounds: int) -> Report:
        try:
            absent = self._absences[workload].result()
            told = self._duels[workload].race(rounds)
        except (RuntimeError, OSError) as error:
            return Report({}, [], dict.fromkeys(("ours", "peer"), reason_of(error)))
        samples = {side: Samples(tuple(values)) for side, values in told["seconds"].items()}
        return Report(samples, told["waits"], absent)

    def _begin(self, workload: Workload) -> dict[str, str]:
        duel = self._duels[workload] = Duel(workload)
        if self._over:
            duel.kill()
        return duel.absent()

    def _kill(self, workloads: Iterable[Workload]) -> None:
        for workload in workloads:
            if workload in self._duels:
                self._duels[workload].kill()
