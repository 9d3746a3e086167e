"""Associative recall, and many attentions that learn it at once.

A sequence holds 16 pairs (key symbol, value symbol) of 32 symbols each; one of the keys is asked
for, and its value is the answer. A pair is one token, x_j = (e_key + e_value) / sqrt(2), of fixed
random embeddings of width 64; the question is e_key alone. One attention head answers:

    q = W_q e_asked    k_j = W_k x_j    v_j = W_v x_j    logits = W_c sum_j softmax_j(z_j) v_j

with z_j = scale q.k_j, or for the cosine a learned temperature that starts at sqrt(d_k), as in
scaledot.nn.MultiHeadAttention. All weights start so that they keep unit variance.

Runs of one d_k (other rules, rates, optimizers, seeds) are one stack: their weights lie side by
side, R of them, and every product is a batched one. Since there are only 32 symbols, a stack
multiplies tables of symbols, not of tokens: z_j is read from q's table times k's table, at the
asked symbol and at the two symbols of the token. That is the same attention, only cheaper.

Letters here: R runs, B sequences, P pairs, S symbols, E embedding, D = d_k.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from scaledot import scale as scale_rules
from scaledot.measure import SATURATED_ABOVE, RowState

SYMBOLS, PAIRS, EMBEDDING, BATCH = 32, 16, 64, 64
HEADS = 8  # for sqrt_dmodel: d_model = 8 d_k
RULES = ("none", "sqrt_dk", "dk", "sqrt_dmodel", "cosine")
OPTIMIZERS = ("sgd", "adam")
MEASURES = ("loss", "accuracy", "entropy_ratio", "saturated", "dead")
BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8  # Adam's, as its paper has them
DATA = 2**32  # added to a seed for its sequences, so that they are no echo of its weights


@dataclass(frozen=True)
class Run:
    rule: str
    d_k: int
    optimizer: str
    rate: float
    seed: int


class Batch(NamedTuple):
    """Sequences: the symbols of each, and which of its pairs is asked for. Leading dimensions may
    come before B."""

    keys: Tensor  # [B, P], no symbol twice in a sequence
    values: Tensor  # [B, P]
    asked: Tensor  # [B], 0 to P - 1

    def to(self, device: torch.device | str) -> "Batch":
        return Batch(*(part.to(device) for part in self))

    def at(self, index: int | Tensor) -> "Batch":
        """Of the first dimension, in every part."""
        return Batch(self.keys[index], self.values[index], self.asked[index])


def data_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(DATA + seed)


def draw(generator: torch.Generator, size: int = BATCH) -> Batch:
    keys = torch.rand(size, SYMBOLS, generator=generator).argsort(-1)[:, :PAIRS]
    values = torch.randint(SYMBOLS, (size, PAIRS), generator=generator)
    return Batch(keys, values, torch.randint(PAIRS, (size,), generator=generator))


def together(batches: Sequence[Batch]) -> Batch:
    """One more dimension in front."""
    return Batch(*(torch.stack(parts) for parts in zip(*batches, strict=True)))


class Start(NamedTuple):
    """What a seed begins with."""

    embeddings: Tensor  # [2 S, E]: keys first, then values; fixed
    w_q: Tensor  # [E, D]
    w_k: Tensor  # [E, D]
    w_v: Tensor  # [E, E]
    w_c: Tensor  # [E, S]


def start(seed: int, d_k: int) -> Start:
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(2 * SYMBOLS, EMBEDDING, generator=generator)
    w_q, w_k, w_v, w_c = (
        torch.randn(EMBEDDING, columns, generator=generator) / math.sqrt(EMBEDDING)
        for columns in (d_k, d_k, EMBEDDING, SYMBOLS)
    )
    return Start(embeddings, w_q, w_k, w_v, w_c)


class Stack:
    """Runs of one width, trained side by side; `runs` says which is which."""

    def __init__(self, runs: Sequence[Run], device: torch.device | str = "cpu") -> None:
        widths = {run.d_k for run in runs}
        if len(widths) != 1:
            raise ValueError(f"a stack holds runs of one d_k; got {sorted(widths)}")
        (d_k,) = widths
        starts = {seed: start(seed, d_k) for seed in {run.seed for run in runs}}
        parts = zip(*(starts[run.seed] for run in runs), strict=True)
        embeddings, *weights = (torch.stack(part).to(device) for part in parts)
        self.runs = tuple(runs)
        self.asked_table = embeddings[:, :SYMBOLS]
        self.token_table = embeddings / math.sqrt(2)  # a token is the sum of two rows
        scales = torch.tensor([_first_scale(run) for run in runs], device=device)
        self.parameters = [weight.requires_grad_() for weight in (*weights, scales.log())]
        self.cosine = _flags(runs, "rule", "cosine", device)
        self.has_cosine = any(run.rule == "cosine" for run in runs)
        self.descent = Descent(self.parameters, runs)

    def scores(self, batch: Batch) -> Tensor:
        """z [R, B, P], of a batch [R, B, ...] or one [B, ...] that all runs share."""
        w_q, w_k, _, _, log_scale = self.parameters
        batch = self._for_all(batch)
        q, k = self.asked_table @ w_q, self.token_table @ w_k  # [R, S, D], [R, 2 S, D]
        asked = batch.keys.gather(2, batch.asked[..., None])  # [R, B, 1]: the symbol
        table = (q @ k.mT).gather(1, asked.expand(-1, -1, 2 * SYMBOLS))  # [R, B, 2 S]
        dots = table.gather(2, batch.keys) + table.gather(2, batch.values + SYMBOLS)
        return dots * log_scale.exp()[:, None, None] / self._norms(q, k, asked, batch)

    def _norms(self, q: Tensor, k: Tensor, asked: Tensor, batch: Batch) -> Tensor:
        """|q| |k_j| for the cosine, 1 for the others: [R, B, P]."""
        if not self.has_cosine:
            return torch.ones((), device=q.device)
        q_norm = q.norm(dim=-1).gather(1, asked[..., 0])[..., None]
        square = k.square().sum(-1)
        # |a + b|^2 = |a|^2 + |b|^2 + 2 a.b, a the key's row of the table and b the value's.
        both = k[:, :SYMBOLS] @ k[:, SYMBOLS:].mT
        pair = (batch.keys * SYMBOLS + batch.values).flatten(1)
        inner = both.flatten(1).gather(1, pair).view_as(batch.keys)
        parts = [
            square.gather(1, symbols.flatten(1)).view_as(symbols)
            for symbols in (batch.keys, batch.values + SYMBOLS)
        ]
        k_norm = (parts[0] + parts[1] + 2 * inner).clamp(min=1e-12).sqrt()
        return torch.where(self.cosine[:, None, None], q_norm * k_norm, 1.0)

    def logits(self, weights: Tensor, batch: Batch) -> Tensor:
        """[R, B, S] from the attention's weights [R, B, P]."""
        _, _, w_v, w_c, _ = self.parameters
        batch = self._for_all(batch)
        shares = weights.new_zeros(*weights.shape[:2], 2 * SYMBOLS)
        shares = shares.scatter_add(2, batch.keys, weights)
        shares = shares.scatter_add(2, batch.values + SYMBOLS, weights)
        return shares @ (self.token_table @ w_v @ w_c)

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """The loss of every sequence [R, B], the logits, and z."""
        z = self.scores(batch)
        logits = self.logits(torch.softmax(z, -1), batch)
        loss = F.cross_entropy(
            logits.flatten(0, 1), self._answers(batch).flatten(), reduction="none"
        )
        return loss.view(logits.shape[:2]), logits, z

    def step(self, batch: Batch) -> Tensor:
        """Learn from a batch; what it looked like before that, [MEASURES, R]."""
        loss, logits, z = self.losses(batch)
        *gradients, warmer = torch.autograd.grad(loss.mean(1).sum(), self.parameters)
        with torch.no_grad():
            measured = self._measured(loss, logits, z, batch)
            warmer = torch.where(self.cosine, warmer, 0.0)  # the others' scale is no parameter
        self.descent.step([*gradients, warmer])
        return measured

    @torch.no_grad()
    def look(self, batch: Batch) -> Tensor:
        """[MEASURES, R] without learning."""
        return self._measured(*self.losses(batch), batch)

    def _measured(self, loss: Tensor, logits: Tensor, z: Tensor, batch: Batch) -> Tensor:
        rows = RowState.from_logits(z)
        # A run that has blown up answers nothing, whatever the position of its NaN.
        right = (logits.argmax(-1) == self._answers(batch)) & loss.isfinite()
        saturated = rows.top_p > SATURATED_ABOVE
        return torch.stack(
            [
                loss.mean(1),
                right.float().mean(1),
                rows.entropy.mean(1) / math.log(PAIRS),
                saturated.float().mean(1),
                (saturated & ~right).float().mean(1),
            ]
        )

    def _for_all(self, batch: Batch) -> Batch:
        if batch.keys.dim() == 3:
            return batch
        return Batch(*(part.expand(len(self.runs), *part.shape) for part in batch))

    def _answers(self, batch: Batch) -> Tensor:
        batch = self._for_all(batch)
        return batch.values.gather(2, batch.asked[..., None])[..., 0]


class Descent:
    """SGD or Adam, run by run, each at its own rate; parameters are [R, ...]."""

    def __init__(self, parameters: Sequence[Tensor], runs: Sequence[Run]) -> None:
        device = parameters[0].device
        self.parameters = parameters
        self.adam = _flags(runs, "optimizer", "adam", device)
        self.rate = torch.tensor([run.rate for run in runs], device=device)
        self.first = [torch.zeros_like(weight) for weight in parameters]
        self.second = [torch.zeros_like(weight) for weight in parameters]
        self.steps = 0

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> None:
        self.steps += 1
        for weight, gradient, first, second in zip(
            self.parameters, gradients, self.first, self.second, strict=True
        ):
            lead = (-1,) + (1,) * (weight.dim() - 1)
            first.mul_(BETA_1).add_(gradient, alpha=1 - BETA_1)
            second.mul_(BETA_2).addcmul_(gradient, gradient, value=1 - BETA_2)
            mean = first / (1 - BETA_1**self.steps)
            size = (second / (1 - BETA_2**self.steps)).sqrt() + EPSILON
            direction = torch.where(self.adam.view(lead), mean / size, gradient)
            weight -= self.rate.view(lead) * direction


def _first_scale(run: Run) -> float:
    if run.rule == "cosine":  # the temperature at which cosines have unit deviation
        return run.d_k * scale_rules.resolve("sqrt_dk", run.d_k)
    return scale_rules.resolve(run.rule, run.d_k, HEADS)


def _flags(runs: Sequence[Run], field: str, value: str, device: torch.device | str) -> Tensor:
    return torch.tensor([getattr(run, field) == value for run in runs], device=device)
