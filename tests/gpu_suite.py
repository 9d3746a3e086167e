"""Run all that needs a GPU in one call: its tests, conformance on it, and fuzz cases.

    PYTHONPATH=src:tests python tests/gpu_suite.py --record gpu_suite.csv

Jobs are processes that share the GPU, so many at a time as there are cores: most of the time goes
into compiling kernels. Without a GPU it says so and fails. Nothing but pytest, torch, triton and
numpy must be installed.
"""

import argparse
import csv
import datetime
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
ELSEWHERE = (  # tests outside tests/cuda that need a GPU
    "tests/watch/test_on_cuda.py",
    "tests/watch/remedies/test_on_cuda.py",
    "tests/watch/remedies/test_devices.py",
    "tests/distributed/test_on_cuda.py",
)
# Of the black box, what does not measure or trace on a CPU. Gradients far from zero are left to the
# fuzzer, which knows which kernel serves them.
CONFORMANCE = (
    "tests/conformance/test_edges.py",
    "tests/conformance/test_gradients.py",
    "tests/conformance/test_layouts.py",
    "tests/conformance/test_opinfo.py",
    "tests/conformance/test_public_bugs.py",
    "tests/conformance/test_vitals_against_oracle.py",
)
ON_A_CPU = (  # they compile or pretend, or the fuzzer does the same here
    "tests/cuda/test_copies.py",
    "tests/cuda/test_fuzz.py",
    "tests/cuda/test_hopper_compiles.py",
    "tests/cuda/test_in_place.py",
    "tests/cuda/test_launching.py",
    "tests/cuda/test_little_memory.py",
    "tests/cuda/test_masks_compile.py",
    "tests/cuda/test_replay.py",
)
BUT_THESE = (  # in such files
    "tests/cuda/test_fuzz.py::test_a_mask_narrower_than_float64",
    "tests/cuda/test_launching.py::test_launches_go_to_the_current_stream_and_into_graphs",
    "tests/cuda/test_replay.py::test_a_gpu_computes_the_same_again",
)
# These come first, and with twice as many cases of each test: what went wrong on a GPU before.
FIRST = (
    "tests/cuda/test_on_gpu.py",
    "tests/cuda/test_isolation.py",
    "tests/cuda/test_guard_bands.py",
)
THEN = (
    "tests/cuda/test_backward.py",
    "tests/cuda/test_forward.py",
    "tests/cuda/test_hopper_forward.py",
    "tests/cuda/test_summary.py",
    "tests/cuda/test_backends.py",
)
FUZZ_SHARE = 0.45  # of the processes
# Tests of a process, neighbours: most of the time goes into importing torch and into kernels, which
# neighbours share.
SHARE, CONFORMANCE_SHARE = 16, 24
# One thread a process, and nothing that it printed is lost when it is ended.
ALONE = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
SHOWN = 3000  # characters of what a share that failed has printed; all of it is in the log


@dataclass
class Result:
    """What one job found."""

    name: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    tail: str = ""

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]

    def __str__(self) -> str:
        return (
            f"{self.seconds:5.0f} s  {self.passed:5} passed  {self.failed:4} failed  "
            f"{self.skipped:3} skipped  {self.name}"
        )


def main() -> int:
    options = _read()
    if not torch.cuda.is_available():
        print("test-gpu needs a CUDA device, and torch finds none here: nothing was tested.")
        return 1
    start = time.monotonic()
    deadline = start + options.seconds
    fuzzers = max(round(options.processes * FUZZ_SHARE), 1)
    results = []
    with ThreadPoolExecutor(options.processes) as pool, ThreadPoolExecutor(1) as one:
        futures = [one.submit(_fuzz, options, fuzzers, deadline)]
        # Collecting takes the time of some imports, in which the fuzzer already compiles.
        turns = threading.Semaphore(max(options.processes - fuzzers, 1))
        shares = _shares(options, deadline)
        futures += [pool.submit(_pytest, tests, deadline, turns) for tests in shares]
        futures[0].add_done_callback(lambda _: turns.release(fuzzers))
        for future in as_completed(futures):
            results.append(future.result())
            _show(results[-1], options.log)
    seconds = time.monotonic() - start
    for name in sorted({result.file for result in results}):
        print(_total(name, [result for result in results if result.file == name]))
    device = torch.cuda.get_device_name()
    total = _total(device, results)
    print(
        f"{device}: {total.passed} passed, {total.failed} failed, {total.skipped} skipped, "
        f"{seconds:.0f} s"
    )
    if options.record is not None:
        counts = {n: getattr(total, n) for n in ("passed", "failed", "skipped")}
        _record(options.record, {**_provenance(device), **counts, "seconds": round(seconds)})
    return 1 if total.failed else 0


def _read() -> argparse.Namespace:
    parser = argparse.ArgumentParser("gpu_suite", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--processes", type=int, default=max(os.cpu_count() or 1, 2), help="default: one a core")
    add("--most", type=int, default=4, help="cases of a test; 0: all")
    add("--cases", type=int, default=5000, help="of the fuzzer")
    add("--kinds", type=int, default=56, help="so many kinds of calls are compiled for them")
    add("--seed", type=int, default=1, help="of the fuzzer, and of which cases of a test run")
    add("--seconds", type=float, default=455, help="after which what still runs is ended")
    add("--record", type=Path, help="CSV file to which a line with the outcome is appended")
    add("--log", type=Path, help="file to which all that the jobs print is appended")
    return parser.parse_args()


def _show(result: Result, log: Path | None) -> None:
    """Print a failure as soon as it is there, and the fuzzer's last words."""
    if log is not None:
        with log.open("a") as file:
            file.write(f"\n{'=' * 8} {result.name}\n{result.tail}\n{result}\n")
    if result.failed:
        print(f"\n{'=' * 8} {result.name}\n{result.tail[-SHOWN:]}\n{result}", flush=True)
    elif result.name == "fuzz":
        print("\n".join(result.tail.splitlines()[-2:]), flush=True)


def _total(name: str, results: list[Result]) -> Result:
    """Add up several jobs."""
    total = Result(name)
    for result in results:
        for field in ("passed", "failed", "skipped", "seconds"):
            setattr(total, field, getattr(total, field) + getattr(result, field))
    return total


def _shares(options: argparse.Namespace, deadline: float) -> list[list[str]]:
    """Collect the tests and deal some cases of each into shares, what matters most first."""
    cuda = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/cuda").glob("test_*.py"))
    first = [*FIRST, *THEN]
    rest = [path for path in cuda if path not in (*first, *ON_A_CPU)]
    files = [*first, *BUT_THESE, *ELSEWHERE, *rest, *CONFORMANCE]
    command = ["-m", "pytest", "--collect-only", "-q", "-p", "no:randomly", *files]
    found = _run("collect", command, deadline, {})
    ids = [line for line in found.tail.splitlines() if line.startswith("tests/") and "::" in line]
    if not ids:
        raise SystemExit(f"no test was collected:\n{found.tail}")
    shares = []
    for path in files:
        mine = [one for one in ids if one == path or one.startswith((f"{path}::", f"{path}["))]
        size = CONFORMANCE_SHARE if path in CONFORMANCE else SHARE
        most = options.most
        if path in FIRST:
            most *= 2
        if path in CONFORMANCE:
            most = -(-most // 2)
        mine = some_of(mine, most, options.seed)
        shares += [mine[at : at + size] for at in range(0, len(mine), size)]
    return shares


def some_of(tests: list[str], most: int, seed: int) -> list[str]:
    """At most so many cases of each test, spread evenly over all of them; 0: all."""
    if not most:
        return tests
    cases: dict[str, list[str]] = {}
    for test in tests:
        cases.setdefault(test.partition("[")[0], []).append(test)
    chosen = []
    for same in cases.values():
        places = range(min(most, len(same)))
        chosen += [same[(at * len(same) // len(places) + seed) % len(same)] for at in places]
    return chosen


def _pytest(tests: list[str], deadline: float, turns: threading.Semaphore) -> Result:
    """Run a share of the tests in a process of its own."""
    name = tests[0] if len(tests) == 1 else f"{tests[0]} and {len(tests) - 1} more"
    environment = {}
    if tests[0].startswith("tests/conformance"):
        environment["SCALEDOT_TEST_DEVICE"] = "cuda"
    with turns:
        if time.monotonic() > deadline - 5:
            return Result(name, failed=len(tests), tail="no time was left")
        command = ["-m", "pytest", *tests, "-v", "--tb=short", "-p", "no:cacheprovider"]
        result = _run(name, command, deadline, environment)
    outcomes = re.findall(r"^tests/.* (PASSED|SKIPPED|FAILED|ERROR)\b", result.tail, re.MULTILINE)
    result.passed, result.skipped = outcomes.count("PASSED"), outcomes.count("SKIPPED")
    # A test that was not reached did not pass.
    result.failed = max(len(tests) - result.passed - result.skipped, outcomes.count("ERROR"))
    return result


def _fuzz(options: argparse.Namespace, workers: int, deadline: float) -> Result:
    command = ["-m", "fuzz", f"--seed={options.seed}", f"--cases={options.cases}"]
    command += [
        f"--kinds={options.kinds}",
        f"--workers={workers}",
        f"--seconds={options.seconds - 40}",
    ]
    result = _run("fuzz", command, deadline, {})
    counts = re.findall(
        r"(\d+) of \d+ cases, \d+ numbers compared, (\d+) cases failed", result.tail
    )
    done, result.failed = map(int, counts[-1]) if counts else (0, 0)
    result.passed = done - result.failed
    result.failed += options.cases - done  # a case that was not run did not pass
    return result


def _run(name: str, command: list[str], deadline: float, more: dict[str, str]) -> Result:
    paths = [str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, paths))
    start = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, **ALONE, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=max(deadline - start, 1.0),
            text=True,
        )
        output = done.stdout
    except subprocess.TimeoutExpired as late:
        said = late.stdout or b""
        output = said.decode(errors="replace") if isinstance(said, bytes) else said
        output += "\nended: the time was over"
    return Result(name, seconds=time.monotonic() - start, tail=output)


def _provenance(device: str) -> dict:
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": commit or "unknown",
        "device": device,
        "torch": torch.__version__,
    }


def _record(path: Path, line: dict) -> None:
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(line))
        if new:
            writer.writeheader()
        writer.writerow(line)


if __name__ == "__main__":
    sys.exit(main())
