"""The claim that one-hot attention commits too early and generalises worse.

Each seed learns from a fixed pool of sequences, again and again, and is then asked on others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from scaledot.lab.experiments import recall
from scaledot.lab.experiments.recall import MEASURES, Batch, Run, Stack
from scaledot.lab.study.rows import HeldOutRow
from scaledot.lab.study.sweep import HELD_OUT, HELD_OUT_DATA, device_name

EARLY = 10  # steps that count as the beginning


@dataclass(frozen=True)
class Plan:
    rules: tuple[str, ...] = recall.RULES
    widths: tuple[int, ...] = (64, 256)
    pools: tuple[int, ...] = (64, 256, 1024)
    rates: tuple[tuple[str, tuple[float, ...]], ...] = (
        ("sgd", (0.1, 0.3, 1.0, 3.0)),
        ("adam", (1e-3, 3e-3, 1e-2)),
    )
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    steps: int = 800


QUICK = Plan(
    rules=("none", "sqrt_dk"),
    widths=(64,),
    pools=(256,),
    rates=(("sgd", (0.3,)),),
    seeds=(0, 1),
    steps=100,
)


def heldout(
    plan: Plan, device: str, say: Callable[[str], None] = lambda _: None
) -> list[HeldOutRow]:
    rows = []
    for d_k, pool in product(plan.widths, plan.pools):
        runs = [
            Run(rule, d_k, optimizer, rate, seed)
            for optimizer, rates in plan.rates
            for rule, rate, seed in product(plan.rules, rates, plan.seeds)
        ]
        rows += _train(runs, plan, pool, device)
        say(f"held-out, d_k {d_k}, pool of {pool}: {len(runs)} runs of {plan.steps} steps")
    return rows


def _train(runs: Sequence[Run], plan: Plan, pool: int, device: str) -> list[HeldOutRow]:
    streams = [recall.data_of(seed) for seed in plan.seeds]
    learned = recall.together([recall.draw(stream, pool) for stream in streams]).to(device)
    others = [torch.Generator().manual_seed(HELD_OUT_DATA + seed) for seed in plan.seeds]
    unseen = recall.together([recall.draw(other, HELD_OUT) for other in others]).to(device)
    picks = [
        torch.stack([torch.randint(pool, (recall.BATCH,), generator=stream) for stream in streams])
        for _ in range(plan.steps)
    ]
    place = torch.tensor([plan.seeds.index(run.seed) for run in runs], device=device)
    seen, unseen = learned.at(place), unseen.at(place)

    stack = Stack(runs, device)
    before = _choice(stack, seen)
    early = []
    for step, pick in enumerate(picks):
        index = pick.to(device)[place]
        measured = stack.step(_taken(seen, index))
        if step < EARLY:
            early.append(measured)
    kept = before == _choice(stack, seen)
    wrong = before != seen.asked
    return _rows(
        runs,
        pool,
        plan.steps,
        device_name(device),
        torch.stack(early).cpu(),
        torch.stack([kept.float().mean(1), (kept & wrong).float().mean(1)]).cpu(),
        stack.look(seen).cpu(),
        stack.look(unseen).cpu(),
    )


def _taken(batch: Batch, index: torch.Tensor) -> Batch:
    """Sequences index [R, B] of a batch [R, pool, ...]."""
    wide = index[..., None].expand(-1, -1, recall.PAIRS)
    return Batch(
        batch.keys.gather(1, wide), batch.values.gather(1, wide), batch.asked.gather(1, index)
    )


@torch.no_grad()
def _choice(stack: Stack, batch: Batch) -> torch.Tensor:
    """The pair each sequence looks at most, [R, B]."""
    return stack.scores(batch).argmax(-1)


def _rows(
    runs: Sequence[Run],
    pool: int,
    steps: int,
    device: str,
    early: torch.Tensor,
    kept: torch.Tensor,
    seen: torch.Tensor,
    unseen: torch.Tensor,
) -> list[HeldOutRow]:
    """early [EARLY, MEASURES, R], kept [2, R], seen and unseen [MEASURES, R]."""
    loss, accuracy, saturated = (MEASURES.index(name) for name in ("loss", "accuracy", "saturated"))
    beginning = early.mean(0)
    return [
        HeldOutRow(
            rule=run.rule,
            d_k=run.d_k,
            optimizer=run.optimizer,
            rate=run.rate,
            seed=run.seed,
            pool=pool,
            steps=steps,
            start_saturated=float(early[0, saturated, place]),
            early_saturated=float(beginning[saturated, place]),
            early_accuracy=float(beginning[accuracy, place]),
            kept=float(kept[0, place]),
            kept_wrong=float(kept[1, place]),
            train_loss=float(seen[loss, place]),
            train_accuracy=float(seen[accuracy, place]),
            heldout_loss=float(unseen[loss, place]),
            heldout_accuracy=float(unseen[accuracy, place]),
            gap=float(unseen[loss, place] - seen[loss, place]),
            device=device,
            torch=torch.__version__,
        )
        for place, run in enumerate(runs)
    ]
