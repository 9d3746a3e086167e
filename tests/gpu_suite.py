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
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
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
# Of the black box, what does not measure or trace on a CPU. Gradients far from zero are left out:
# the GPU's backward pass takes the probabilities from the lse of the forward pass.
CONFORMANCE = (
    "tests/conformance/test_edges.py",
    "tests/conformance/test_gradients.py",
    "tests/conformance/test_layouts.py",
    "tests/conformance/test_opinfo.py",
    "tests/conformance/test_public_bugs.py",
    "tests/conformance/test_vitals_against_oracle.py",
)
ON_A_CPU = (  # they compile or pretend, and need no GPU
    "tests/cuda/test_hopper_compiles.py",
    "tests/cuda/test_in_place.py",
    "tests/cuda/test_launching.py",
    "tests/cuda/test_replay.py",
)
FUZZ_SHARE = 0.4  # of the processes
# Tests of a process; most of the time of a kernel's own goes into compiling it.
SHARE, CONFORMANCE_SHARE = 8, 40
SHOWN = 20_000  # characters of what a share that failed has printed


@dataclass
class Result:
    """What one job found."""

    name: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    tail: str = ""


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
        futures += [pool.submit(_pytest, tests, deadline, turns) for tests in _shares(deadline)]
        futures[0].add_done_callback(lambda _: turns.release(fuzzers))
        for future in as_completed(futures):
            result = future.result()
            results.append(result)
            _show(result)
    seconds = time.monotonic() - start
    total = {n: sum(getattr(r, n) for r in results) for n in ("passed", "failed", "skipped")}
    device = torch.cuda.get_device_name()
    print(
        f"{device}: {total['passed']} passed, {total['failed']} failed, "
        f"{total['skipped']} skipped, {seconds:.0f} s"
    )
    if options.record is not None:
        _record(options.record, {**_provenance(device), **total, "seconds": round(seconds)})
    return 1 if total["failed"] else 0


def _read() -> argparse.Namespace:
    parser = argparse.ArgumentParser("gpu_suite", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--processes", type=int, default=max(os.cpu_count() or 1, 2), help="default: one a core")
    add("--cases", type=int, default=5000, help="of the fuzzer")
    add("--kinds", type=int, default=64, help="so many kinds of calls are compiled for them")
    add("--seed", type=int, default=1, help="of the fuzzer")
    add("--seconds", type=float, default=460, help="after which what still runs is ended")
    add("--record", type=Path, help="CSV file to which a line with the outcome is appended")
    return parser.parse_args()


def _show(result: Result) -> None:
    """Print a result as soon as it is there, with its output where something failed."""
    if result.failed:
        print(f"\n{'=' * 8} {result.name}\n{result.tail[-SHOWN:]}")
    print(
        f"{result.seconds:5.0f} s  {result.passed:5} passed  {result.failed:3} failed  "
        f"{result.skipped:3} skipped  {result.name}",
        flush=True,
    )


def _shares(deadline: float) -> list[list[str]]:
    """Collect the tests and deal them into shares of neighbours, which use the same kernels."""
    cuda = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/cuda").glob("test_*.py"))
    files = [path for path in (*cuda, *ELSEWHERE, *CONFORMANCE) if path not in ON_A_CPU]
    found = _run("collect", ["-m", "pytest", "--collect-only", "-q", *files], deadline, {})
    ids = [line for line in found.tail.splitlines() if line.startswith("tests/") and "::" in line]
    if not ids:
        raise SystemExit(f"no test was collected:\n{found.tail}")
    shares = []
    for path in files:
        mine = [one for one in ids if one.startswith(f"{path}::")]
        size = SHARE if path.startswith("tests/cuda") else CONFORMANCE_SHARE
        shares += [mine[at : at + size] for at in range(0, len(mine), size)]
    return shares


def _pytest(tests: list[str], deadline: float, turns: threading.Semaphore) -> Result:
    """Run a share of the tests in a process of its own."""
    name = tests[0] if len(tests) == 1 else f"{tests[0]} and {len(tests) - 1} more"
    environment = {}
    if tests[0].startswith("tests/conformance"):
        environment["SCALEDOT_TEST_DEVICE"] = "cuda"
    with turns, tempfile.TemporaryDirectory() as folder:
        if time.monotonic() > deadline - 5:
            return Result(name, failed=len(tests), tail="no time was left")
        report = Path(folder) / "report.xml"
        command = ["-m", "pytest", *tests, "-q", "--tb=short", "-p", "no:cacheprovider"]
        result = _run(name, [*command, f"--junitxml={report}"], deadline, environment)
        if not report.exists():  # it was killed, or crashed
            result.failed = len(tests)
            return result
        suite = ElementTree.parse(report).getroot().find("testsuite")
        assert suite is not None
        counts = {
            name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")
        }
        result.failed = counts["failures"] + counts["errors"]
        result.skipped = counts["skipped"]
        result.passed = counts["tests"] - result.failed - result.skipped
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
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more},
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
