"""What each remedy did in our own trainings: benchmarks/remedies, five seeds of one sick run."""

import csv
from functools import cache
from pathlib import Path
from statistics import fmean

HERE = Path(__file__).parent
# Inside an installed package; in a checkout the file that the benchmark writes.
FILES = (
    HERE.parent / "remedies" / "evidence.csv",
    HERE.parents[3] / "benchmarks" / "results" / "remedies.csv",
)
WITHOUT = "none"
RUN = "a small language model made sick on purpose (AdamW, learning rate 3e-2)"


def evidence_for(remedy: str) -> str:
    """One or two sentences; says so where nothing was measured."""
    rows = _rows()
    sick = {row["seed"]: float(row["final_loss"]) for row in rows if row["remedy"] == WITHOUT}
    cured = {row["seed"]: float(row["final_loss"]) for row in rows if row["remedy"] == remedy}
    both = sorted(sick.keys() & cured.keys())
    if not both:
        return f"No measurement of {remedy} comes with this installation."
    gains = [sick[seed] - cured[seed] for seed in both]
    gained = f"it gained {fmean(gains):.2f}"
    if len(both) > 1:
        gained += f" on average and {min(gains):.2f} at least"
    seeds = "one seed" if len(both) == 1 else f"{len(both)} seeds"
    return (
        f"Measured on {RUN}, {seeds}: final loss {fmean(cured[seed] for seed in both):.2f} instead "
        f"of {fmean(sick[seed] for seed in both):.2f}; {gained}. Another model may answer "
        "differently."
    )


@cache
def _rows() -> list[dict[str, str]]:
    for path in FILES:
        try:
            with path.open(newline="", encoding="utf-8") as file:
                return list(csv.DictReader(file))
        except OSError:
            continue
    return []
