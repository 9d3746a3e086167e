"""The study of the alarms: which runs are sick, and who notices, when, and how often in vain.

python benchmarks/alarms/study.py            # trains what is not recorded, then writes the CSV
python benchmarks/alarms/study.py --quick    # six short runs, prints them, writes nothing
python benchmarks/alarms/study.py --large    # larger models on a GPU, which --workers N share

One row a run in benchmarks/results/alarms.csv, of the larger ones in alarms_large.csv; page.py
makes docs/alarms.md and its picture of them.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import large
from grid import FAMILIES, Family
from rows import row_of, told, write
from runs import Setup

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="six short runs; writes nothing")
    parser.add_argument("--large", action="store_true", help="larger models, on a GPU")
    parser.add_argument("--workers", type=int, default=4, help="with --large: runs at a time")
    parser.add_argument("--device", default="cuda", help="with --large; cpu: two toys, for tests")
    parser.add_argument("--csv", type=Path, help="another file than in benchmarks/results")
    parser.add_argument("--recorded", type=Path, default=HERE / "recorded")
    args = parser.parse_args()
    if args.large:
        if reason := large.why_not(args.device, args.csv):
            parser.error(reason)
        path = args.csv or RESULTS / "alarms_large.csv"
        return large.study(args.device, args.recorded, args.workers, path)
    began, rows = time.perf_counter(), []
    for row in studied(_quick() if args.quick else FAMILIES, args.recorded):
        rows.append(row)
        print(told(row), flush=True)
    print(f"{len(rows)} runs in {time.perf_counter() - began:.0f} s")
    if not args.quick:
        write(rows, args.csv or RESULTS / "alarms.csv")
    return 0


def studied(families: tuple[Family, ...], folder: Path) -> Iterator[dict[str, Any]]:
    for family in families:
        for setup in family.setups():
            yield row_of(family, setup, folder)


def _quick() -> tuple[Family, ...]:
    small = Setup(layers=2, width=32, heads=2, tokens=32, batch=4, steps=120, warm_up=20)
    muon = dataclasses.replace(small, optimizer="muon")
    sgd = dataclasses.replace(small, optimizer="sgd", scale="none")
    return (
        Family("AdamW", small, (1e-2, 2e-1), (0,)),
        Family("Muon", muon, (3e-2, 3e-1), (0,)),
        Family("SGD, no scale", sgd, (1.0, 10.0), (0,)),
    )


if __name__ == "__main__":
    sys.exit(main())
