"""What is measured, against whom, and the bar it has to clear."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from scaledot.bench import clock, ours, peers
from scaledot.bench.bars import Bar, Quantity
from scaledot.bench.workload import Answer, Inputs, Workload

PROMISED_SHAPES = ((1, 8, 1024, 64), (1, 8, 4096, 64), (1, 4, 4096, 128))
TINY = (1, 1, 8, 8)
LONG = (1, 1, 16384, 64)
ADDITIVE = (1, 4, 1024, 64)

ONE_TWENTIETH = Bar("<=", 1 / 20)


def _as_they_are(inputs: Inputs) -> Inputs:
    return inputs


@dataclass(frozen=True)
class Contender:
    """attend is what is measured; prepare comes before the clock.

    foreign: somebody else's code, which may not be there. work: how many forward passes' worth of
    floating-point operations a call is; 0 where nobody counts them.
    """

    name: str
    attend: Callable[[Inputs], Answer]
    prepare: Callable[[Inputs], Inputs] = _as_they_are
    foreign: bool = False
    work: float = 1.0


@dataclass(frozen=True)
class Case:
    """One comparison. bar None: reported, not judged. calls: how often a sample makes the call.

    apart: both sides run in a fresh process.
    """

    name: str
    workload: Workload
    ours: Contender
    peer: Contender
    quantity: Quantity
    bar: Bar | None
    goal: Bar | None = None
    measures: Literal["time", "memory", "row memory"] = "time"
    repeats: int = 11
    calls: int = 1
    stopwatch: clock.Stopwatch = clock.wall_seconds
    apart: bool = False


ATTENTION = Contender("attention", ours.attention)
WITH_VITALS = Contender("attention_with_vitals", ours.attention_with_vitals)
VITALS = Contender("vitals", ours.vitals)
ADDITIVE_ATTENTION = Contender("additive_attention", ours.additive_attention)

TORCH = Contender("torch sdpa", peers.torch_sdpa)
PLAIN = Contender("plain PyTorch", peers.plain)
LEAN = Contender("lean PyTorch", peers.lean)
PLAIN_ADDITIVE = Contender("plain PyTorch", peers.plain_additive)


def on_cpu(*, quick: bool = False) -> list[Case]:
    """The bars of a CPU: two cores, float32. Quick: short sequences, and no bar on other shapes."""
    shapes = PROMISED_SHAPES[:1] if quick else PROMISED_SHAPES
    cases = [
        case
        for causal in (False, True)
        for case in (
            _tiny(causal),
            *(case for shape in shapes for case in _timed(Workload(*shape, causal=causal))),
        )
    ]
    cases += _memory(), *_additive()
    return [_shortened(case) for case in cases] if quick else cases


def _timed(workload: Workload) -> list[Case]:
    """Every way to call the library at one of the promised shapes."""
    ratio, speedup = Quantity.RATIO, Quantity.SPEEDUP
    cases = [
        # Five percent is a narrow bar: medians need more samples to be that steady.
        Case("attention", workload, ATTENTION, TORCH, ratio, Bar("<=", 1.05), repeats=31),
        Case(
            "attention_with_vitals",
            workload,
            WITH_VITALS,
            TORCH,
            ratio,
            Bar("<=", 1.5),
            goal=Bar("<=", 1.2),
        ),
        Case("vitals", workload, VITALS, TORCH, ratio, Bar("<=", 1.0)),
        Case("against_plain", workload, WITH_VITALS, PLAIN, speedup, Bar(">=", 2.5)),
        Case("against_lean", workload, WITH_VITALS, LEAN, speedup, None),
    ]
    if workload.length <= 1024:  # milliseconds a call: more samples cost nothing
        return [replace(case, repeats=151 if case.name == "attention" else 31) for case in cases]
    return cases


def _tiny(causal: bool) -> Case:
    """What our own code costs around the kernel."""
    return Case(
        "tiny_call",
        Workload(*TINY, causal=causal),
        ATTENTION,
        TORCH,
        Quantity.EXTRA_MICROSECONDS,
        None if causal else Bar("<=", 25),
        repeats=31,
        calls=1000,
    )


def _memory() -> Case:
    return Case(
        "vitals_memory",
        Workload(*LONG),
        WITH_VITALS,
        PLAIN,
        Quantity.RATIO,
        ONE_TWENTIETH,
        measures="memory",
        repeats=3,
    )


def _additive() -> list[Case]:
    time = Case(
        "additive_attention",
        Workload(*ADDITIVE, additive=True),
        ADDITIVE_ATTENTION,
        PLAIN_ADDITIVE,
        Quantity.RATIO,
        Bar("<", 1.0),
    )
    memory = replace(time, name="additive_memory", bar=ONE_TWENTIETH, measures="memory", repeats=3)
    return [time, memory]


QUICK_LENGTHS = {"vitals_memory": 2048, "additive_attention": 128, "additive_memory": 128}


def _shortened(case: Case) -> Case:
    """Few repeats; another shape than the promised one is reported, not judged."""
    repeats = 1 if case.measures == "memory" else 5
    case = replace(case, repeats=repeats, calls=min(case.calls, 200))
    if case.name in QUICK_LENGTHS:
        workload = replace(case.workload, length=QUICK_LENGTHS[case.name])
        return replace(case, workload=workload, bar=None)
    return case
