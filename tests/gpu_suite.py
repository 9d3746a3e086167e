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
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
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
CONFORMANCE = (  # of the black box, what does not measure or trace on a CPU
    "tests/conformance/test_edges.py",
    "tests/conformance/test_far_gradients.py",
    "tests/conformance/test_gradients.py",
    "tests/conformance/test_layouts.py",
    "tests/conformance/test_opinfo.py",
    "tests/conformance/test_public_bugs.py",
    "tests/conformance/test_vitals_against_oracle.py",
)
FUZZ_SHARE = 0.5  # of the processes


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
    fuzzers = max(round(options.processes * FUZZ_SHARE), 1)
    jobs = [lambda path=path: _pytest(options, path) for path in _files()]
    with (
        ThreadPoolExecutor(max(options.processes - fuzzers, 1)) as pool,
        ThreadPoolExecutor(1) as one,
    ):
        fuzz = one.submit(_fuzz, options, fuzzers)
        results = [future.result() for future in [pool.submit(job) for job in jobs]]
        results.append(fuzz.result())
    for result in results:
        if result.failed:
            print(f"\n{'=' * 8} {result.name}\n{result.tail}")
    for result in sorted(results, key=lambda each: -each.seconds):
        print(
            f"{result.seconds:5.0f} s  {result.passed:5} passed  {result.failed:3} failed  "
            f"{result.skipped:3} skipped  {result.name}"
        )
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
    add("--seconds", type=float, default=460, help="longest time of one job")
    add("--record", type=Path, help="CSV file to which a line with the outcome is appended")
    return parser.parse_args()


def _files() -> list[str]:
    """Test files, the longest first."""
    cuda = sorted((ROOT / "tests/cuda").glob("test_*.py"), key=lambda path: -path.stat().st_size)
    return [*CONFORMANCE[::-1], *(str(path.relative_to(ROOT)) for path in cuda), *ELSEWHERE]


def _pytest(options: argparse.Namespace, path: str) -> Result:
    """One test file in a process of its own."""
    environment = dict(os.environ)
    if path.startswith("tests/conformance"):
        environment["SCALEDOT_TEST_DEVICE"] = "cuda"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = ["-m", "pytest", path, "-q", "--tb=short", "-p", "no:cacheprovider"]
        result = _run(path, [*command, f"--junitxml={report}"], options.seconds, environment)
        if not report.exists():  # it was killed, or crashed
            result.failed = 1
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


def _fuzz(options: argparse.Namespace, workers: int) -> Result:
    command = ["-m", "fuzz", f"--seed={options.seed}", f"--cases={options.cases}"]
    command += [
        f"--kinds={options.kinds}",
        f"--workers={workers}",
        f"--seconds={options.seconds - 40}",
    ]
    result = _run("fuzz", command, options.seconds, dict(os.environ))
    counts = re.findall(
        r"(\d+) of \d+ cases, \d+ numbers compared, (\d+) cases failed", result.tail
    )
    done, result.failed = map(int, counts[-1]) if counts else (0, 0)
    result.passed = done - result.failed
    result.failed += options.cases - done  # a case that was not run did not pass
    return result


def _run(name: str, command: list[str], seconds: float, environment: dict) -> Result:
    paths = [str(ROOT / "src"), str(ROOT / "tests"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    environment["OMP_NUM_THREADS"] = "1"
    start = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=seconds,
            text=True,
        )
        output = done.stdout
    except subprocess.TimeoutExpired as late:
        said = late.stdout or b""
        output = said.decode(errors="replace") if isinstance(said, bytes) else said
        output += f"\nended after {seconds:.0f} seconds"
    lines = output.splitlines()
    return Result(name, seconds=time.monotonic() - start, tail="\n".join(lines[-200:]))


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
