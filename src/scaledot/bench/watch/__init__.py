"""`scaledot bench --watch`: what the watch adds to a training step on a CPU.

gate (does the watch change the training, does it see every layer?) -> turns (steps of both sides,
in turn) -> the same rows, file and table as the other cases.
"""

from collections.abc import Callable
from typing import NamedTuple

from scaledot.bench.bars import Bar, Quantity
from scaledot.bench.cases import Case, Contender
from scaledot.bench.clock import Samples
from scaledot.bench.outcome import Outcome
from scaledot.bench.watch.model import Shape, Trainer
from scaledot.bench.watch.turns import Times, race
from scaledot.bench.workload import Answer, Inputs, Workload
from scaledot.watch import Watch

GATE_STEPS = 3
DEFAULT_CADENCE = Bar("<=", 0.01)  # of the time of a step without the watch
EVERY_STEP = Bar("<=", 1.5)  # of the time of the attention in it
STEP, CALLS, FORWARD = "step without the watch", "its attention", "its attention, forward only"


class Plan(NamedTuple):
    shape: Shape = Shape()
    rounds: int = 21
    steps: int = 5  # of each side in a round
    judged: bool = True


QUICK = Plan(Shape(batch=2, tokens=64, layers=2, heads=2, width=16), rounds=3, judged=False)


def red(shape: Shape) -> list[str]:
    """What is wrong with a watched training, in words; nothing where all is well."""
    plain, watched = Trainer(shape), Trainer(shape)
    expected = [plain.step() for _ in range(GATE_STEPS)]
    with Watch(watched.model, every=1) as watch:
        found = [watched.step() for _ in range(GATE_STEPS)]
        coverage = watch.coverage()
    wrong = []
    if found != expected:
        wrong.append(f"the watch changes the losses: {found} instead of {expected}")
    if len(coverage.watched) != shape.layers or coverage.unseen:
        wrong.append(f"the watch does not see all {shape.layers} layers: {coverage}")
    return wrong


def measure(plan: Plan, after_round: Callable[[], None] = lambda: None) -> list[Outcome]:
    return outcomes(race(plan.shape, plan.rounds, plan.steps, after_round), plan)


def outcomes(times: Times, plan: Plan) -> list[Outcome]:
    """Ours is always what the watch adds to a step; the peer says what it is held against."""
    default, every_step = (
        _difference(watched, times.plain) for watched in (times.default, times.measured)
    )
    return [
        Outcome(_case("watch_default", STEP, plan, DEFAULT_CADENCE), default, times.plain),
        Outcome(_case("watch_every_step", CALLS, plan, EVERY_STEP), every_step, times.attention),
        Outcome(_case("watch_every_step", FORWARD, plan), every_step, times.forward),
        Outcome(_case("watch_every_step", STEP, plan), every_step, times.plain),
    ]


def unresolved(outcome: Outcome) -> str:
    """Where the rounds differ by more than the bar allows in all: a verdict by luck; else empty."""
    ours, peer, bar = outcome.ours, outcome.peer, outcome.case.bar
    if ours is None or peer is None or bar is None:
        return ""
    allowed = bar.limit * peer.median
    if ours.p80 - ours.p20 <= allowed:
        return ""
    return (
        f"{outcome.case.name}: the rounds differ by more ({ours.p20:.2f} to {ours.p80:.2f} ms) "
        f"than the bar allows in all ({allowed:.2f} ms), so its verdict says little; measure again "
        f"on an idle machine, or with more --repeats"
    )


def _case(name: str, against: str, plan: Plan, bar: Bar | None = None) -> Case:
    shape = plan.shape
    return Case(
        name,
        Workload(shape.batch, shape.heads, shape.tokens, shape.width, causal=True),
        Contender(f"watch, {shape.layers} layers", _not_a_call),
        Contender(against, _not_a_call),
        Quantity.RATIO,
        bar if plan.judged else None,
        repeats=plan.rounds,
    )


def _not_a_call(inputs: Inputs) -> Answer:
    raise TypeError("a training step is no single call of attention")


def _difference(watched: Samples, plain: Samples) -> Samples:
    """Round by round: neighbours saw the same machine."""
    pairs = zip(watched.values, plain.values, strict=True)
    return Samples(tuple(with_it - without for with_it, without in pairs))
