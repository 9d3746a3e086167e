"""The claim that missing scaling harms deep models more: 1 to 12 layers of attention.

The sequence is the 16 pairs and the question as a 17th token. Each layer adds
W_o softmax(scale q k^T) v of its LayerNormed input to the stream; the answer is read from the
question's place. Runs of one depth are one stack, as in experiments.recall.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

from scaledot import scale as scale_rules
from scaledot.lab.experiments import recall
from scaledot.lab.experiments.race import TRAILING
from scaledot.lab.experiments.recall import (
    EMBEDDING,
    HEADS,
    PAIRS,
    SYMBOLS,
    Batch,
    Descent,
    Run,
)
from scaledot.lab.study.rows import DepthRow
from scaledot.lab.study.sweep import device_name, steps_to_goal
from scaledot.measure import SATURATED_ABOVE, RowState

MEASURES = ("loss", "accuracy", "entropy_ratio", "saturated")


@dataclass(frozen=True)
class Plan:
    rules: tuple[str, ...] = ("none", "sqrt_dk", "dk")
    d_k: int = 64
    layers: tuple[int, ...] = (1, 2, 4, 8, 12)
    rates: tuple[tuple[str, tuple[float, ...]], ...] = (
        ("sgd", (0.03, 0.1, 0.3, 1.0)),
        ("adam", (3e-4, 1e-3, 3e-3, 1e-2)),
    )
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    steps: int = 600


QUICK = Plan(
    rules=("none", "sqrt_dk"), layers=(1, 2), rates=(("adam", (3e-3,)),), seeds=(0,), steps=30
)


class DeepStack:
    """Runs of one depth and width, trained side by side."""

    def __init__(self, runs: Sequence[Run], layers: int, device: str = "cpu") -> None:
        starts = {seed: _start(seed, runs[0].d_k, layers) for seed in {run.seed for run in runs}}
        parts = zip(*(starts[run.seed] for run in runs), strict=True)
        self.embeddings, *weights = (torch.stack(part).to(device) for part in parts)
        self.parameters = [weight.requires_grad_() for weight in weights]
        self.layers = layers
        scales = [scale_rules.resolve(run.rule, run.d_k, HEADS) for run in runs]
        self.scale = torch.tensor(scales, device=device)[:, None, None, None]
        self.descent = Descent(self.parameters, runs)

    def step(self, batch: Batch) -> Tensor:
        """batch [R, B, ...]; what it looked like before the update, [MEASURES, R]."""
        logits, z = self.logits(batch)
        answers = batch.values.gather(2, batch.asked[..., None])[..., 0]
        loss = F.cross_entropy(logits.flatten(0, 1), answers.flatten(), reduction="none")
        loss = loss.view(answers.shape)
        gradients = torch.autograd.grad(loss.mean(1).sum(), self.parameters)
        with torch.no_grad():
            rows = RowState.from_logits(z)
            right = (logits.argmax(-1) == answers) & loss.isfinite()
            measured = torch.stack(
                [
                    loss.mean(1),
                    right.float().mean(1),
                    rows.entropy.mean(1) / math.log(PAIRS + 1),
                    (rows.top_p > SATURATED_ABOVE).float().mean(1),
                ]
            )
        self.descent.step(gradients)
        return measured

    def logits(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """[R, B, S], and the scores of the question in the last layer [R, B, P + 1]."""
        w_q, w_k, w_v, w_o, w_c = self.parameters
        x = self._tokens(batch)
        z = x
        for layer in range(self.layers):
            normed = F.layer_norm(x, (EMBEDDING,))
            q, k, v = (_mixed(normed, w[:, layer]) for w in (w_q, w_k, w_v))
            z = q @ k.mT * self.scale
            x = x + _mixed(torch.softmax(z, -1) @ v, w_o[:, layer])
        last = F.layer_norm(x[:, :, -1], (EMBEDDING,))
        return last @ w_c, z[:, :, -1]

    def _tokens(self, batch: Batch) -> Tensor:
        """[R, B, P + 1, E]: the pairs, then the question."""
        runs = torch.arange(len(self.embeddings), device=self.embeddings.device)[:, None, None]
        pairs = self.embeddings[runs, batch.keys] + self.embeddings[runs, batch.values + SYMBOLS]
        asked = batch.keys.gather(2, batch.asked[..., None])
        return torch.cat([pairs / math.sqrt(2), self.embeddings[runs, asked]], 2)


def _mixed(x: Tensor, weight: Tensor) -> Tensor:
    """x [R, B, T, E] times weight [R, E, D], without a copy of the weight for every sequence."""
    return (x.flatten(1, 2) @ weight).unflatten(1, x.shape[1:3])


def _start(seed: int, d_k: int, layers: int) -> tuple[Tensor, ...]:
    """Embeddings, W_q, W_k, W_v, W_o of every layer, W_c. W_o is smaller the more layers add."""
    generator = torch.Generator().manual_seed(seed)
    columns = (d_k, d_k, EMBEDDING, EMBEDDING)
    embeddings = torch.randn(2 * SYMBOLS, EMBEDDING, generator=generator)
    w_q, w_k, w_v, w_o = (
        torch.randn(layers, EMBEDDING, number, generator=generator) / math.sqrt(EMBEDDING)
        for number in columns
    )
    w_c = torch.randn(EMBEDDING, SYMBOLS, generator=generator) / math.sqrt(EMBEDDING)
    return embeddings, w_q, w_k, w_v, w_o / math.sqrt(layers), w_c


def depth(plan: Plan, device: str, say: Callable[[str], None] = lambda _: None) -> list[DepthRow]:
    rows = []
    for layers in plan.layers:
        runs = [
            Run(rule, plan.d_k, optimizer, rate, seed)
            for optimizer, rates in plan.rates
            for rule, rate, seed in product(plan.rules, rates, plan.seeds)
        ]
        rows += _train(runs, layers, plan, device)
        say(f"depth {layers}: {len(runs)} runs of {plan.steps} steps")
    return rows


def _train(runs: Sequence[Run], layers: int, plan: Plan, device: str) -> list[DepthRow]:
    stack = DeepStack(runs, layers, device)
    streams = [recall.data_of(seed) for seed in plan.seeds]
    place = torch.tensor([plan.seeds.index(run.seed) for run in runs], device=device)
    seen = []
    for _ in range(plan.steps):
        batch = recall.together([recall.draw(stream) for stream in streams])
        seen.append(stack.step(batch.to(device).at(place)))
    measured = torch.stack(seen).cpu()
    reached = steps_to_goal(measured[:, MEASURES.index("accuracy")])
    final = dict(zip(MEASURES, measured[-TRAILING:].double().mean(0).tolist(), strict=True))
    return [
        DepthRow(
            rule=run.rule,
            layers=layers,
            d_k=run.d_k,
            optimizer=run.optimizer,
            rate=run.rate,
            seed=run.seed,
            steps=plan.steps,
            steps_to_90=reached[at],
            **{name: values[at] for name, values in final.items()},
            device=device_name(device),
            torch=torch.__version__,
        )
        for at, run in enumerate(runs)
    ]
