"""The training race: the same task, weights and batches under every rule, side by side."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from scaledot.lab.experiments import recall, studied
from scaledot.lab.experiments.lesson import Claim, Control, Lesson, claim, seed_control
from scaledot.lab.experiments.recall import BATCH, RULES, Run, Stack
from scaledot.lab.experiments.studied import Study

TRAILING = 20  # steps of the means that a finish is judged by: one batch is a noisy witness
GOAL = 0.9
EARLY = (0, 5, 10)  # steps whose losses the lines of Python print, for every rule
ROUNDING = 1e-6  # accuracies are shares of a batch
CHANCE = 1 / recall.SYMBOLS
LEARNED = 4 * CHANCE  # no run that only guesses has this accuracy over TRAILING batches
NEARER_ALWAYS = 0.25  # a share of pairs this near to 1 is nearer to always than to a coin's half
MOST = 0.5  # a share this near to 1 is most


@dataclass(frozen=True)
class Runner:
    """One rule at one step: this step's batch, before the update."""

    rule: str
    loss: float  # nats; the answer is one of 32 symbols, so ln 32 = 3.47 is knowing nothing
    accuracy: float
    entropy_ratio: float  # of the attention weights: 1 looks at all pairs alike
    saturated: float  # share of rows whose largest weight is above 0.99
    dead: float  # share of rows that are saturated and answer wrongly


@dataclass(frozen=True)
class RaceStep:
    step: int  # from 0
    runners: tuple[Runner, ...]  # in the order of the rules


@dataclass(frozen=True)
class Finish:
    """What became of one rule; means are over the last 20 steps."""

    rule: str
    steps_to_90: int | None  # first step whose last 20 have a mean accuracy of 90 %; None: never
    loss: float
    accuracy: float
    entropy_ratio: float
    saturated: float
    dead: float


@dataclass(frozen=True)
class RaceResult:
    """Placeholders: d_k, optimizer, rate, steps, batch; finishes are found by their rule; study is
    what many races found, the same whatever is raced here.

    claims, only where the unscaled rule runs: `impossible` ("without scaling training is
    impossible": its accuracy at the end against chance, 1/32), `collapse` ("without scaling
    attention collapses": the share of its rows that are one-hot and wrong at the end, against all);
    or `undecided` in place of both (its loss at the end), where it diverged or nobody learned.
    Claims of the study: `generalises` ("one-hot attention generalises worse": share of pairs of
    runs in which it does), `deep` ("it harms deep models more": likewise), `few_weights` ("only a
    few weights are updated": share of query weights with a negligible gradient, against most).
    """

    rules: tuple[str, ...]
    d_k: int
    optimizer: str
    rate: float
    steps: int
    seed: int
    batch: int
    curves: tuple[RaceStep, ...]
    finishes: tuple[Finish, ...]
    study: Study
    claims: tuple[Claim, ...]


def steps(
    *,
    rules: str = "all",
    d_k: int = 64,
    optimizer: str = "sgd",
    rate: float = 0.3,
    steps: int = 200,
    seed: int = 0,
) -> Iterator[RaceStep]:
    """The race as it is run: one record a step, whenever it is asked for."""
    stack = Stack([Run(rule, d_k, optimizer, rate, seed) for rule in named(rules)])
    generator = recall.data_of(seed)
    for number in range(steps):
        measured = stack.step(recall.draw(generator)).T.tolist()
        runners = zip(stack.runs, measured, strict=True)
        yield RaceStep(number, tuple(Runner(run.rule, *values) for run, values in runners))


def race(
    *,
    rules: str = "all",
    d_k: int = 64,
    optimizer: str = "sgd",
    rate: float = 0.3,
    steps: int = 200,
    seed: int = 0,
) -> RaceResult:
    """The whole race."""
    curves = tuple(_all_steps(rules, d_k, optimizer, rate, steps, seed))
    finishes = tuple(finish(runners) for runners in zip(*(s.runners for s in curves), strict=True))
    study = studied.study()
    return RaceResult(
        rules=named(rules),
        d_k=d_k,
        optimizer=optimizer,
        rate=rate,
        steps=steps,
        seed=seed,
        batch=BATCH,
        curves=curves,
        finishes=finishes,
        study=study,
        claims=(*_claims(finishes), *_claims_of(study)),
    )


def named(rules: str) -> tuple[str, ...]:
    return RULES if rules == "all" else (rules,)


def _all_steps(
    rules: str, d_k: int, optimizer: str, rate: float, number: int, seed: int
) -> Iterator[RaceStep]:
    """`steps`, from where an argument has that name."""
    return steps(rules=rules, d_k=d_k, optimizer=optimizer, rate=rate, steps=number, seed=seed)


def finish(runners: Sequence[Runner]) -> Finish:
    """Of one rule, from all of its steps."""
    last = runners[-TRAILING:]

    def mean(name: str) -> float:
        return fmean(getattr(runner, name) for runner in last)

    return Finish(
        runners[0].rule,
        first_at_goal([runner.accuracy for runner in runners]),
        *(mean(name) for name in recall.MEASURES),
    )


def first_at_goal(accuracies: Sequence[float]) -> int | None:
    """How many steps it took until the mean of the last TRAILING was GOAL; None: it never was."""
    for end in range(TRAILING, len(accuracies) + 1):
        if math.fsum(accuracies[end - TRAILING : end]) >= GOAL * TRAILING - ROUNDING:
            return end
    return None


def _claims(finishes: Sequence[Finish]) -> Iterator[Claim]:
    for unscaled in finishes:
        if unscaled.rule != "none":
            continue
        if math.isfinite(unscaled.loss) and any(map(_learned, finishes)):
            yield claim("impossible", folklore=CHANCE, measured=unscaled.accuracy, tolerance=CHANCE)
            yield claim("collapse", folklore=1.0, measured=unscaled.dead, tolerance=0.05)
        else:  # the rate or the steps are to blame: nothing is said about scaling
            yield Claim("undecided", None, unscaled.loss, None, None, None)


def _learned(finish: Finish) -> bool:
    return math.isfinite(finish.loss) and finish.accuracy > LEARNED


def _claims_of(study: Study) -> Iterator[Claim]:
    worse, more = study.heldout.worse, study.depth.more
    yield claim("generalises", folklore=1.0, measured=worse, tolerance=NEARER_ALWAYS)
    yield claim("deep", folklore=1.0, measured=more, tolerance=NEARER_ALWAYS)
    negligible = study.updates.weights["none"].median
    yield claim("few_weights", folklore=1.0, measured=negligible, tolerance=MOST)


def _code(rules: str, d_k: int, optimizer: str, rate: float, steps: int, seed: int) -> str:
    """One rule after the other, token by token; the race's tables give the same numbers."""
    descent = {"sgd": "SGD", "adam": "Adam"}[optimizer]
    return f"""\
import torch
import torch.nn.functional as F

pairs, symbols, width, d_k, batch, seed = 16, 32, 64, {d_k}, 64, {seed}
scales = {{"none": 1.0, "sqrt_dk": d_k**-0.5, "dk": 1 / d_k, "sqrt_dmodel": (8 * d_k) ** -0.5}}
for place, rule in enumerate({list(named(rules))!r}):
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(2 * symbols, width, generator=generator)
    w_q, w_k, w_v, w_c = (
        (torch.randn(width, columns, generator=generator) / width**0.5).requires_grad_()
        for columns in (d_k, d_k, width, symbols)
    )
    log_scale = torch.tensor(scales.get(rule, d_k**0.5)).log().requires_grad_()
    learned = [w_q, w_k, w_v, w_c] + [log_scale] * (rule == "cosine")  # its temperature
    optimizer = torch.optim.{descent}(learned, lr={rate})
    generator = torch.Generator().manual_seed({recall.DATA} + seed)
    last = []
    for step in range({steps}):
        keys = torch.rand(batch, symbols, generator=generator).argsort(-1)[:, :pairs]
        values = torch.randint(symbols, (batch, pairs), generator=generator)
        asked = torch.randint(pairs, (batch, 1), generator=generator)
        x = (embeddings[keys] + embeddings[values + symbols]) / 2**0.5  # a pair is one token
        q, k, v = embeddings[keys.gather(1, asked)] @ w_q, x @ w_k, x @ w_v
        if rule == "cosine":
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        weights = torch.softmax(q @ k.mT * log_scale.exp(), dim=-1)
        logits, answer = (weights @ v)[:, 0] @ w_c, values.gather(1, asked)[:, 0]
        loss = F.cross_entropy(logits, answer)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        last.append((loss.item(), (logits.argmax(-1) == answer).float().mean().item()))
        if step in {EARLY}:
            print(f"curves.{{step}}.runners.{{place}}.loss", loss.item())
    # Unscaled training is chaotic: sooner or later the order of a sum decides its digits.
    if rule != "none":
        losses, accuracies = zip(*last[-{TRAILING}:])
        print(f"finishes.{{place}}.loss", sum(losses) / {TRAILING})
        print(f"finishes.{{place}}.accuracy", sum(accuracies) / {TRAILING})
"""


RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
LESSON = Lesson(
    "race",
    race,
    (
        Control("rules", "choice", "all", values=("all", *RULES)),
        Control("d_k", "steps", 64, values=(16, 32, 64, 128, 256, 512)),
        Control("optimizer", "choice", "sgd", values=recall.OPTIMIZERS),
        Control("rate", "steps", 0.3, values=RATES),
        Control("steps", "steps", 200, values=(50, 100, 150, 200)),
        seed_control(),
    ),
    _code,
)
