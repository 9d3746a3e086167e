"""python -m scaledot.lab.study [--device cuda] [--out benchmarks/results/race.csv] [--quick]"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch

from scaledot.lab.study import depth, heldout, rows, spread, summary, sweep, updates


def main(arguments: list[str] | None = None) -> None:
    asked = _parser().parse_args(arguments)
    if asked.device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit("no GPU here; type --device cpu --quick for a small study")
    began = time.perf_counter()

    def say(words: str) -> None:
        print(f"{time.perf_counter() - began:7.1f} s  {words}", flush=True)

    race = sweep.sweep(sweep.QUICK if asked.quick else sweep.Plan(), asked.device, say)
    found = summary.best_rates(race)
    _save(asked.out, "", race, say)
    _save(asked.out, "_summary", found, say)
    texts = [summary.as_text(found)]
    for name, study in (("heldout", heldout), ("updates", updates), ("depth", depth)):
        plan = study.QUICK if asked.quick else study.Plan()
        records = getattr(study, name)(plan, asked.device, say)
        _save(asked.out, f"_{name}", records, say)
        texts.append(getattr(spread, name)(records))
    print("\n\n".join(texts))


def _save(out: Path, ending: str, records: list, say: Callable[[str], None]) -> None:
    """Each part as soon as it is there: a study cut short keeps what it has."""
    path = out.with_name(f"{out.stem}{ending}{out.suffix}")
    rows.write(path, records)
    say(f"{len(records)} rows in {path}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scaledot.lab.study", description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--out", type=Path, default=Path("race.csv"), help="the CSV of the sweep")
    parser.add_argument("--quick", action="store_true", help="a few runs, for a CPU")
    return parser


if __name__ == "__main__":
    main()
