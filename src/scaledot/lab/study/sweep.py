"""All rules, widths, optimizers, rates and seeds on associative recall."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from scaledot.lab.experiments import recall
from scaledot.lab.experiments.race import GOAL, ROUNDING, TRAILING
from scaledot.lab.experiments.recall import MEASURES, Batch, Run, Stack
from scaledot.lab.study.rows import RaceRow

HELD_OUT = 512  # sequences that no step has seen
HELD_OUT_DATA = 2**33  # added to a seed: other sequences than those it learns from


@dataclass(frozen=True)
class Plan:
    rules: tuple[str, ...] = recall.RULES
    widths: tuple[int, ...] = (16, 32, 64, 128, 256, 512)
    rates: tuple[tuple[str, tuple[float, ...]], ...] = (
        ("sgd", (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)),
        ("adam", (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)),
    )
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    steps: int = 1000

    def runs(self, d_k: int) -> list[Run]:
        return [
            Run(rule, d_k, optimizer, rate, seed)
            for optimizer, rates in self.rates
            for rule, rate, seed in product(self.rules, rates, self.seeds)
        ]


QUICK = Plan(
    widths=(16, 64),
    rates=(("sgd", (0.1, 0.3, 1.0)), ("adam", (1e-3, 3e-3, 1e-2))),
    seeds=(0, 1),
    steps=120,
)


def sweep(plan: Plan, device: str, say: Callable[[str], None] = lambda _: None) -> list[RaceRow]:
    batches = _for_seeds(plan.seeds, plan.steps, device)  # drawn once, for every width
    rows = []
    for d_k in plan.widths:
        runs = plan.runs(d_k)
        rows += train(runs, plan.seeds, batches, plan.steps, device)
        say(f"d_k {d_k}: {len(runs)} runs of {plan.steps} steps")
    return rows


def train(
    runs: Sequence[Run], seeds: Sequence[int], batches: Batch, steps: int, device: str
) -> list[RaceRow]:
    """batches [steps, seeds, B, ...]: what each seed learns from."""
    stack = Stack(runs, device)
    place = torch.tensor([seeds.index(run.seed) for run in runs], device=device)
    measured = torch.stack([stack.step(batches.at(step).at(place)) for step in range(steps)])
    held_out = stack.look(_held_out(seeds, device).at(place))
    return _rows(runs, measured.cpu(), held_out.cpu(), device)


def _for_seeds(seeds: Sequence[int], steps: int, device: str) -> Batch:
    """[steps, seeds, B, ...], drawn on the CPU: the same sequences whatever the device."""
    streams = [recall.data_of(seed) for seed in seeds]
    return recall.together(
        [recall.together([recall.draw(stream) for stream in streams]) for _ in range(steps)]
    ).to(device)


def _held_out(seeds: Sequence[int], device: str) -> Batch:
    streams = [torch.Generator().manual_seed(HELD_OUT_DATA + seed) for seed in seeds]
    return recall.together([recall.draw(stream, HELD_OUT) for stream in streams]).to(device)


def _rows(runs: Sequence[Run], measured: Tensor, held_out: Tensor, device: str) -> list[RaceRow]:
    """measured [steps, MEASURES, R], held_out [MEASURES, R]."""
    final = dict(zip(MEASURES, measured[-TRAILING:].double().mean(0).tolist(), strict=True))
    first = dict(zip(MEASURES, measured[0].tolist(), strict=True))
    reached = steps_to_goal(measured[:, MEASURES.index("accuracy")])
    where = device_name(device)
    return [
        RaceRow(
            rule=run.rule,
            d_k=run.d_k,
            optimizer=run.optimizer,
            rate=run.rate,
            seed=run.seed,
            steps=len(measured),
            steps_to_90=reached[place],
            **{name: values[place] for name, values in final.items()},
            start_entropy_ratio=first["entropy_ratio"][place],
            start_saturated=first["saturated"][place],
            heldout_loss=float(held_out[MEASURES.index("loss"), place]),
            heldout_accuracy=float(held_out[MEASURES.index("accuracy"), place]),
            device=where,
            torch=torch.__version__,
        )
        for place, run in enumerate(runs)
    ]


def steps_to_goal(accuracy: Tensor) -> list[int | None]:
    """race.first_at_goal for every run at once: accuracy [steps, R]."""
    if len(accuracy) < TRAILING:
        return [None] * accuracy.shape[1]
    means = accuracy.double().unfold(0, TRAILING, 1).sum(-1)  # [steps - TRAILING + 1, R]
    there = means >= GOAL * TRAILING - ROUNDING
    first = there.int().argmax(0) + TRAILING
    return [int(step) if found else None for step, found in zip(first, there.any(0), strict=True)]


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else device
