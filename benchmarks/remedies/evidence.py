"""The sick run (AdamW, learning rate 3e-2, 400 steps) without a remedy and with each of them.

    nice -n 19 python benchmarks/remedies/evidence.py   # adds to benchmarks/results/remedies.csv
    python benchmarks/remedies/evidence.py --table      # only what is made of its rows

Each remedy is installed in the watched run as `scaledot run --remedy NAME` does. A row that is
there already is not run again. Of the rows are made the table of docs/remedies.md and the copy
inside the package, from which `scaledot report` tells what a remedy did.
"""

import argparse
import csv
import statistics
import time
from pathlib import Path

import torch

from scaledot.lab import training
from scaledot.lab.character_model import CharacterModel
from scaledot.watch import Watch, remedies

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results/remedies.csv"
PAGE = ROOT / "docs/remedies.md"
SHIPPED = ROOT / "src/scaledot/watch/remedies/evidence.csv"
BEGIN, END = "<!-- evidence -->", "<!-- end of evidence -->"

NONE = "none"
WITH = (NONE, "qk-clip:100", "qk-norm", "softcap:50", "temperature:100", "sigma-reparam", "log-n")
SEEDS = range(5)
SIZE = training.Size(steps=400)
LAST = 30  # steps whose mean loss is the final loss
FIELDS = (
    "remedy", "seed", "steps", "final_loss", "max_logit", "last_max_logit", "closed", "clips",
    "seconds", "torch",
)  # fmt: skip


def one(name: str, seed: int, size: training.Size = SIZE) -> dict[str, object]:
    """A training of `lab.training`, with a remedy."""
    text = training.python_topics()
    alphabet = sorted(set(text))
    tokens = training._encoded(text, alphabet)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        model = CharacterModel(len(alphabet), size.layers, size.width, size.heads, generator)
    readings: list = []
    began = time.perf_counter()
    clips = 0
    with Watch(model, every=1, sinks=[readings]) as watch:
        installed = None if name == NONE else remedies.install(watch, name, say=lambda line: None)
        seen = training._steps(model, tokens, size, generator, lambda: None)
    if installed is not None:
        heads = getattr(installed, "clips", {})
        clips = sum(sum(layer.values()) for layer in heads.values())
        installed.remove()
    moments = training._moments(seen, readings)
    last = moments[-LAST:]
    return {
        "remedy": name,
        "seed": seed,
        "steps": size.steps,
        "final_loss": f"{statistics.fmean(moment.loss for moment in last):.4f}",
        "max_logit": f"{max(moment.max_logit for moment in moments):.1f}",
        "last_max_logit": f"{statistics.fmean(moment.max_logit for moment in last):.1f}",
        "closed": f"{last[-1].closed:.3f}",
        "clips": clips,
        "seconds": f"{time.perf_counter() - began:.0f}",
        "torch": torch.__version__,
    }


def rows() -> list[dict[str, str]]:
    if not RESULTS.exists():
        return []
    with RESULTS.open(newline="") as file:
        return list(csv.DictReader(file))


def run() -> None:
    bar = [(name, seed) for seed in SEEDS for name in WITH[:2]]  # what the bar is about, first
    rest = [(name, seed) for seed in SEEDS for name in WITH[2:]]
    for name, seed in bar + rest:
        if any(row["remedy"] == name and row["seed"] == str(seed) for row in rows()):
            continue
        row = one(name, seed)
        new = not RESULTS.exists()
        with RESULTS.open("a", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerow(row)
        publish()
        print(row, flush=True)


def table(found: list[dict[str, str]]) -> str:
    """Markdown: mean and range over seeds, and the gain against the same seed without a remedy."""
    sick = {row["seed"]: float(row["final_loss"]) for row in found if row["remedy"] == NONE}
    lines = [
        "| remedy | seeds | final loss, mean (range) | gained, mean (smallest) | largest logit "
        "| at the end | heads closed | clips |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in WITH:
        mine = [row for row in found if row["remedy"] == name]
        if not mine:
            continue
        loss = [float(row["final_loss"]) for row in mine]
        gains = [
            sick[row["seed"]] - float(row["final_loss"]) for row in mine if row["seed"] in sick
        ]
        gained = "" if name == NONE else f"{_mean(gains):.2f} ({min(gains):.2f})"
        lines.append(
            f"| {name} | {len(mine)} | {_mean(loss):.3f} ({min(loss):.3f} to {max(loss):.3f}) | "
            f"{gained} | {_mean(_column(mine, 'max_logit')):.0f} | "
            f"{_mean(_column(mine, 'last_max_logit')):.0f} | "
            f"{_mean(_column(mine, 'closed')):.0%} | {_mean(_column(mine, 'clips')):.0f} |"
        )
    return "\n".join(lines)


def publish() -> None:
    """The page and the package say what the rows say."""
    SHIPPED.write_bytes(RESULTS.read_bytes())
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(rows())}\n\n{END}{after}")


def _mean(values: list[float]) -> float:
    return statistics.fmean(values)


def _column(found: list[dict[str, str]], name: str) -> list[float]:
    return [float(row[name]) for row in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", action="store_true", help="publish the rows, run nothing")
    if parser.parse_args().table:
        publish()
    else:
        run()


if __name__ == "__main__":
    main()
