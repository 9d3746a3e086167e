"""The bars of the alarms: the sick run is told of in time, healthy ones are left in peace.

python benchmarks/alarms/bars.py [--seeds 5] [--recorded FOLDER]

Exit status 0 where every bar holds. Runs that were recorded before are taken from the folder.
"""

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from runs import Recorded, Setup, recorded

from scaledot.lab.training import loss_alarm
from scaledot.watch.alarms import Alarm, Judge

RECORDED = Path(__file__).parent / "recorded"
IN_TIME = 60  # step before which the sick run must be told of
MOST_WARNED = 0.05  # share of a healthy run's steps under a warning
# A gradient norm that would worry anybody: so many times its median over the steps before.
NORM_RISES, NORM_STEPS = 3.0, 20

# scaledot demo's model at ten times the learning rate it likes: the scores run away, the loss
# falls all the same. Of this and its twin the first seeds were seen while the rules were made.
SICK = Setup(layers=3, width=128, heads=4, tokens=128, batch=16, steps=400, warm_up=50, rate=3e-2)
LOOKED_AT = 100  # steps of it
HEALTHY = {
    "the twin at 1e-2": replace(SICK, rate=1e-2),
    # None of these was looked at before the rules were fixed.
    "learned positions, torch's weights": Setup(
        layers=3, width=96, heads=6, model="learned", rate=3e-3
    ),
    "nn.TransformerEncoder, hidden characters": Setup(
        layers=2, width=64, heads=4, model="encoder", task="masked", rate=1e-3
    ),
    "repeated sequences: heads one-hot by right": Setup(
        layers=2, width=64, heads=4, tokens=32, batch=16, task="repeat", rate=3e-3
    ),
}


@dataclass(frozen=True)
class Verdict:
    alarms: list[Alarm]
    warned: float  # share of the steps under an alarm of grade warn or act

    def first(self, *grades: str) -> int | None:
        return next((alarm.step for alarm in self.alarms if alarm.grade in grades), None)


def judged(run: Recorded) -> Verdict:
    judge, alarms, under = Judge(), [], 0
    for step in range(len(run.losses)):
        alarms += judge.read_step(run.readings(step))
        under += any(alarm.grade != "note" for alarm in judge.standing)
    return Verdict(alarms, under / len(run.losses))


def quiet(run: Recorded, until: int) -> bool:
    """Neither the loss nor the gradient norm shows anything before this step."""
    means = [float(run.losses[max(0, t - 4) : t + 1].mean()) for t in range(until)]
    norms = [
        float(run.norms[t] / np.median(run.norms[t - NORM_STEPS : t]))
        for t in range(NORM_STEPS, until)
    ]
    return loss_alarm(means) is None and max(norms, default=0.0) < NORM_RISES


def sick_holds(run: Recorded) -> tuple[bool, str]:
    """Told of in time, all layers named before IN_TIME, loss and gradient norm quiet until then."""
    verdict = judged(run)
    first = verdict.first("warn", "act")
    early = {a.layer for a in verdict.alarms if a.grade != "note" and a.step < IN_TIME}
    still = first is not None and quiet(run, first + 1)
    holds = first is not None and first < IN_TIME and early == set(run.layers) and still
    words = f"first alarm at step {first}, {len(early)} of {len(run.layers)} layers by {IN_TIME}"
    return holds, f"{words}, loss and gradient norm {'quiet' if still else 'not quiet'}"


def healthy_holds(run: Recorded) -> tuple[bool, str]:
    verdict = judged(run)
    acts = sum(alarm.grade == "act" for alarm in verdict.alarms)
    most = float(np.nanmax(run.vital("max_logit")))
    words = f"{acts} act, warned in {verdict.warned:.0%} of steps, largest score {most:.0f}"
    return not acts and verdict.warned <= MOST_WARNED, words


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--recorded", type=Path, default=RECORDED)
    args = parser.parse_args()
    failed = 0
    for seed in range(args.seeds):
        run = recorded(replace(SICK, seed=seed), args.recorded, LOOKED_AT)
        failed += _told("the sick run at 3e-2", seed, *sick_holds(run))
    for name, setup in HEALTHY.items():
        for seed in range(args.seeds):
            run = recorded(replace(setup, seed=seed), args.recorded)
            failed += _told(name, seed, *healthy_holds(run))
    return 1 if failed else 0


def _told(name: str, seed: int, holds: bool, words: str) -> int:
    print(f"{'holds' if holds else 'FAILS'}  {name}, seed {seed}: {words}", flush=True)
    return not holds


if __name__ == "__main__":
    sys.exit(main())
