"""The claim that without scaling only a few weights are updated.

A gradient is negligible below 1 % of what is typical under sqrt_dk at the first step of the same
seed: of a row of dL/dq (root mean square over its entries) its median, of the weights' gradients
their median size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from scaledot.lab.experiments import recall
from scaledot.lab.experiments.recall import SYMBOLS, Batch, Run, Stack
from scaledot.lab.study.rows import UpdateRow
from scaledot.lab.study.sweep import device_name

NEGLIGIBLE = 0.01
ROWS = 512  # sequences looked at


@dataclass(frozen=True)
class Plan:
    rules: tuple[str, ...] = ("sqrt_dk", "none", "dk", "sqrt_dmodel")
    widths: tuple[int, ...] = (16, 32, 64, 128, 256, 512)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    at: tuple[int, ...] = (0, 20, 100, 300)  # after so many steps of SGD
    rate: float = 0.3


QUICK = Plan(rules=("sqrt_dk", "none"), widths=(64,), seeds=(0, 1), at=(0, 20))


@dataclass(frozen=True)
class Gradients:
    rows: Tensor  # [R, B]: size of each row of dL/dq
    w_q: Tensor  # [R, E * D]: sizes of the entries
    w_k: Tensor


def updates(
    plan: Plan, device: str, say: Callable[[str], None] = lambda _: None
) -> list[UpdateRow]:
    rows = []
    for d_k in plan.widths:
        rows += _width(plan, d_k, device)
        say(f"updates, d_k {d_k}: steps {', '.join(map(str, plan.at))}")
    return rows


def _width(plan: Plan, d_k: int, device: str) -> list[UpdateRow]:
    runs = [
        Run(rule, d_k, "sgd", plan.rate, seed) for rule, seed in product(plan.rules, plan.seeds)
    ]
    place = torch.tensor([plan.seeds.index(run.seed) for run in runs], device=device)
    streams = [recall.data_of(seed) for seed in plan.seeds]
    looked = recall.together([recall.draw(stream, ROWS) for stream in streams]).to(device).at(place)
    stack = Stack(runs, device)
    # Of each run, the run of the same seed under sqrt_dk: its first step says what is typical.
    scaled = [runs.index(Run("sqrt_dk", d_k, "sgd", plan.rate, run.seed)) for run in runs]
    rows, typical, done = [], None, 0
    for step in plan.at:
        while done < step:
            batch = recall.together([recall.draw(stream) for stream in streams])
            stack.step(batch.to(device).at(place))
            done += 1
        found = gradients(stack, looked)
        typical = typical or tuple(
            part.median(-1, keepdim=True).values[scaled]
            for part in (found.rows, found.w_q, found.w_k)
        )
        rows += _rows(runs, step, found, typical, device_name(device))
    return rows


def gradients(stack: Stack, batch: Batch) -> Gradients:
    """Of the loss: row by row for q, of the batch's mean for the weights."""
    loss, _, z = stack.losses(batch)
    w_q, w_k, *_ = stack.parameters
    to_w_q, to_w_k, dz = torch.autograd.grad(loss.sum(), [w_q, w_k, z])
    with torch.no_grad():
        # z_j = scale q.k_j and k_j is the sum of two rows of the table: dL/dq = scale dz k.
        keys = stack.token_table @ w_k
        shares = dz.new_zeros(*dz.shape[:2], 2 * SYMBOLS)
        shares = shares.scatter_add(2, batch.keys, dz)
        shares = shares.scatter_add(2, batch.values + SYMBOLS, dz)
        scale = stack.parameters[-1].exp()[:, None, None]
        rows = (scale * (shares @ keys)).square().mean(-1).sqrt()
        size = batch.keys.shape[1]
        sizes = [(to_w / size).abs().flatten(1) for to_w in (to_w_q, to_w_k)]
        return Gradients(rows, *sizes)


def _rows(
    runs: list[Run], step: int, found: Gradients, typical: tuple[Tensor, ...], device: str
) -> list[UpdateRow]:
    shares = [
        (part < NEGLIGIBLE * usual).float().mean(-1).tolist()
        for part, usual in zip((found.rows, found.w_q, found.w_k), typical, strict=True)
    ]
    return [
        UpdateRow(
            rule=run.rule,
            d_k=run.d_k,
            seed=run.seed,
            step=step,
            rows_negligible=shares[0][place],
            query_weights_negligible=shares[1][place],
            key_weights_negligible=shares[2][place],
            row_median=float(found.rows[place].median()),
            row_p99=float(found.rows[place].quantile(0.99)),
            device=device,
            torch=torch.__version__,
        )
        for place, run in enumerate(runs)
    ]
