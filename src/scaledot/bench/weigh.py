"""The process that is weighed: `python -m scaledot.bench.weigh MODULE:FUNCTION WORKLOAD`.

Prints the bytes that one call added to the process at its peak.
"""

import dataclasses
import gc
import importlib
import json
import sys
from contextlib import suppress
from pathlib import Path

from scaledot.bench.workload import Workload, read

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # proc(5): the peak of resident memory starts again from the current value
WARM_UP_LENGTH = 64


def main(function: str, workload: str) -> None:
    module, _, name = function.partition(":")
    attend = getattr(importlib.import_module(module), name)
    load = Workload(**json.loads(workload))
    small = dataclasses.replace(load, length=min(load.length, WARM_UP_LENGTH))
    read(attend(small.make()))  # thread pools and code pages belong to no call
    inputs = load.make()
    gc.collect()
    _reset_peak()
    before = _peak_bytes()
    answer = attend(inputs)
    read(answer)
    print(_peak_bytes() - before)


def _reset_peak() -> None:
    with suppress(OSError):  # not Linux, or not allowed: then the peak so far is the baseline
        CLEAR_REFS.write_text(RESET_PEAK)


def _peak_bytes() -> int:
    """Peak resident memory. Not by getrusage on Linux: there a child inherits its parent's peak."""
    with suppress(OSError, StopIteration):
        lines = STATUS.read_text().splitlines()
        peak = next(line for line in lines if line.startswith("VmHWM:"))
        return int(peak.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
