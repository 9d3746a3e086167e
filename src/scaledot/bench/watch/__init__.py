"""`scaledot bench --watch`: what the watch adds to a training step, on a CPU or on a GPU.

gate (does the watch change the training, does it see every layer?) -> turns (steps of all sides,
in turn) -> interval (how far luck reaches) -> rows (CSV, table).

**Default cadence.** The watch looks at one step in N, at a sample of its batch. What it adds, as a
share of a step without it, is

    (quiet - plain) / plain + (sampled - plain) / (N * plain)

with N as the watch chooses it. Timed directly, the few measured steps would drown in the noise of
the many quiet ones. What a quiet step costs on a CPU is a matter of the host alone (a comparison a
call, a hook a step; no tensor is touched), so it is timed on a model of the same layers whose
tensors are tiny: there a microsecond is seen. The same is reported as a share of a step of 1 ms.
On a GPU it is timed on the model itself.

**Every step.** On a CPU: what looking at a step adds, held against *attention's own share*, the
time that the model's own attention takes in that step, forward and backward, all layers. The bar of
1.5 says: watching costs at most one and a half times as much as the attention that is watched. On a
GPU with replace=True: what it adds, as a share of a step.

A bar holds where the whole interval is on its side; where the interval crosses it, it is undecided.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from scaledot.bench.bars import Bar
from scaledot.bench.watch.interval import bootstrap
from scaledot.bench.watch.laps import deciding_clock
from scaledot.bench.watch.model import BERT_TINY, GPT2_SMALL, NANO_GPT, Shape, Trainer
from scaledot.bench.watch.rows import Finding
from scaledot.bench.watch.turns import Times, one_thread, race
from scaledot.watch import Watch

GATE_STEPS = 3
DEFAULT_CADENCE = Bar("<=", 0.01)
EVERY_STEP = Bar("<=", 1.5)
REPLACED = Bar("<=", 0.03)

DEFAULT_MEANS = "what the watch adds at the cadence it chooses, of a step"
EVERY_MEANS = "what looking at a step adds, of the time its attention takes, forward and backward"
ADDED_MEANS = "what looking at a step adds, of a step"
REPLACED_MEANS = "what every step adds with replace=True, of a step"
SAMPLE_MEANS = "what looking at a step adds at the default cadence, of a step"
SHORT_MEANS = "what a step of 1 ms adds that the watch does not look at, of a step"
QUIET_MEANS = "what a step adds that the watch does not look at, of a step"

Sides = dict[str, float]


class Plan(NamedTuple):
    shape: Shape
    device: str = "cpu"
    rounds: int = 16
    steps: int = 3  # of each side, twice in a round
    longest: int = 300  # steps within which the watch's own cadence is found
    judged: bool = True


QUICK = Shape("quick", batch=2, tokens=64, layers=2, heads=2, width=16)


def plans(device: str, *, quick: bool = False, rounds: int | None = None) -> list[Plan]:
    if quick:
        found = [Plan(QUICK, device, rounds=3, longest=60, judged=False)]
    elif device == "cuda":
        found = [Plan(GPT2_SMALL, device, rounds=8, longest=200)]
    else:
        found = [Plan(NANO_GPT), Plan(BERT_TINY)]
    return [plan._replace(rounds=rounds or plan.rounds) for plan in found]


def red(plan: Plan) -> list[str]:
    """What is wrong with a watched training, in words; nothing where all is well."""
    shape = plan.shape
    with one_thread(plan.device):
        expected, _ = _trained(plan, watched=False)
        found, coverage = _trained(plan, watched=True)
    wrong = []
    # A GPU adds up in any order: there two trainings without the watch differ as well.
    same = found == expected if plan.device == "cpu" else np.allclose(found, expected, rtol=1e-2)
    if not same:
        wrong.append(f"the watch changes the losses: {found} instead of {expected}")
    if len(coverage.watched) != shape.layers or coverage.unseen:
        wrong.append(f"the watch does not see all {shape.layers} layers: {coverage}")
    return wrong


def measure(plan: Plan, after_round: Callable[[], None] = lambda: None) -> list[Finding]:
    with one_thread(plan.device):
        trainer = Trainer(plan.shape, plan.device)
        times = race(trainer, plan.rounds, plan.steps, plan.longest, after_round)
    return findings(times, plan)


def findings(times: Times, plan: Plan) -> list[Finding]:
    """The clock that decides first; wall time beside it."""
    decides = deciding_clock(plan.device)
    return [
        finding
        for clock in (decides, *(name for name in times.by_clock if name != decides))
        for finding in _of_clock(times, plan, clock, plan.judged and clock == decides)
    ]


def _of_clock(times: Times, plan: Plan, clock: str, judged: bool) -> Iterator[Finding]:
    sides = times.by_clock[clock]
    medians = {name: float(np.median(values)) for name, values in sides.items()}

    def finding(
        case: str, number: Callable[[Sides], float], meaning: str, bar: Bar | None = None
    ) -> Finding:
        return Finding(
            case,
            clock,
            bootstrap(sides, number),
            bar if judged else None,
            meaning,
            medians["plain"],
            medians["attention"],
            medians["measured"] - medians["plain"],
            times.cadence,
            len(sides["plain"]),
        )

    def default(s: Sides) -> float:
        return _quiet(s) + (s["sampled"] - s["plain"]) / (times.cadence * s["plain"])

    yield finding("default cadence", default, DEFAULT_MEANS, DEFAULT_CADENCE)
    if plan.device == "cuda":
        replaced = _share_of_step("replaced")
        yield finding("every step, replace=True", replaced, REPLACED_MEANS, REPLACED)
    yield finding(
        "every step",
        lambda s: (s["measured"] - s["plain"]) / s["attention"],
        EVERY_MEANS,
        EVERY_STEP if plan.device == "cpu" else None,
    )
    yield finding("every step, of the step", _share_of_step("measured"), ADDED_MEANS)
    yield finding("a sample, of the step", _share_of_step("sampled"), SAMPLE_MEANS)
    yield finding("quiet step", _share_of_step("quiet"), QUIET_MEANS)
    if "small_quiet" in sides:
        yield finding("quiet step of 1 ms", _quiet_ms, SHORT_MEANS)


def _quiet(s: Sides) -> float:
    if "small_quiet" in s:
        return _quiet_ms(s) / s["plain"]
    return (s["quiet"] - s["plain"]) / s["plain"]


def _quiet_ms(s: Sides) -> float:
    return s["small_quiet"] - s["small_plain"]


def _share_of_step(side: str) -> Callable[[Sides], float]:
    return lambda s: (s[side] - s["plain"]) / s["plain"]


def _trained(plan: Plan, *, watched: bool) -> tuple[list[float], Any]:
    trainer = Trainer(plan.shape, plan.device)
    if not watched:
        return [float(trainer.step()) for _ in range(GATE_STEPS)], None
    with Watch(trainer.model, every=1) as watch:
        losses = [float(trainer.step()) for _ in range(GATE_STEPS)]
        return losses, watch.coverage()
