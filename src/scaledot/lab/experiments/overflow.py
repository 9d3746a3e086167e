"""Overflow is another disease: subtracting the maximum cures it, and scaling does not."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from scaledot.lab.experiments.lesson import Claim, Control, Lesson, claim
from scaledot.lab.experiments.saturation import DIVISOR
from scaledot.measure import SATURATED_ABOVE

DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
FOLKLORE = (11.09, 88.7, 88.7, 709.8)  # "exp overflows at", in the order of DTYPES
SHARES = (1.0, 1 / 6, -1 / 12)  # of the size: 12 gives the notes' scores 12, 2, -1


@dataclass(frozen=True)
class Threshold:
    dtype: str
    theory: float  # ln of the type's largest number
    largest: float  # the largest argument the type holds whose exp it holds too, found by trying


@dataclass(frozen=True)
class OverflowResult:
    """Placeholders: size, dtype, divisor, threshold, disease, naive_top, safe_top.

    disease: "none", "overflow", "saturation" or "both"; overflow is what the naive formula shows
    (gone with subtract_max), saturation a largest weight above 0.99 (gone with a divisor).
    claims: `thresholds` (11.09, 88.7, 88.7, 709.8 for float16, bfloat16, float32, float64),
    `why_scale` ("scaling is there to stop the overflow": what the softmax that subtracts the
    maximum still suffers from), `scaling_cures` ("scaling cures overflow": the naive formula at
    twelve times the threshold, divided by 8).
    """

    size: float
    dtype: str
    subtract_max: bool
    divisor: float
    scores: tuple[float, ...]
    logits: tuple[float, ...]
    exponentials: tuple[float, ...]  # of the naive formula, in the chosen type
    naive: tuple[float, ...]  # exp(z) / sum exp(z)
    safe: tuple[float, ...]  # the same after subtracting the maximum
    weights: tuple[float, ...]  # the one that subtract_max chooses
    naive_top: float
    safe_top: float
    threshold: float  # of the chosen type
    thresholds: tuple[Threshold, ...]
    disease: str
    claims: tuple[Claim, ...]


def overflow(
    *,
    size: float = 12.0,
    dtype: str = "float16",
    subtract_max: bool = False,
    divisor: float = 1.0,
) -> OverflowResult:
    """The softmax of three scores in a number type, by the naive formula and by the safe one."""
    kind = DTYPES[dtype]
    logits = (torch.tensor(SHARES, dtype=torch.float64) * size / divisor).to(kind)
    exponentials = logits.exp()
    naive = exponentials / exponentials.sum()
    safe = _safe(logits)
    thresholds = tuple(_threshold(name) for name in DTYPES)
    theory = {row.dtype: row.theory for row in thresholds}
    past = _disease(torch.tensor([12 * theory[dtype] / 8, 0.0, 0.0], dtype=kind), False)
    return OverflowResult(
        size=size,
        dtype=dtype,
        subtract_max=subtract_max,
        divisor=divisor,
        scores=tuple(size * share for share in SHARES),
        logits=tuple(logits.tolist()),
        exponentials=tuple(exponentials.tolist()),
        naive=tuple(naive.tolist()),
        safe=tuple(safe.tolist()),
        weights=tuple((safe if subtract_max else naive).tolist()),
        naive_top=float(naive[0]),
        safe_top=float(safe[0]),
        threshold=theory[dtype],
        thresholds=thresholds,
        disease=_disease(logits, subtract_max),
        claims=(
            claim(
                "thresholds",
                folklore=FOLKLORE,
                measured=tuple(row.largest for row in thresholds),
                theory=tuple(row.theory for row in thresholds),
                tolerance=0.25,  # half a step of bfloat16, the coarsest of them there
            ),
            claim("why_scale", folklore="overflow", measured=_disease(logits, True)),
            claim(
                "scaling_cures",
                folklore="no overflow",
                measured="overflow" if past in ("overflow", "both") else "no overflow",
            ),
        ),
    )


def _safe(logits: Tensor) -> Tensor:
    exponentials = (logits - logits.max()).exp()
    return exponentials / exponentials.sum()


def _disease(logits: Tensor, subtract_max: bool) -> str:
    exponentials = logits.exp()
    total = exponentials.sum()
    overflows = not subtract_max and not bool(total.isfinite())
    saturates = float(_safe(logits).max()) > SATURATED_ABOVE
    if overflows and saturates:
        return "both"
    return "overflow" if overflows else "saturation" if saturates else "none"


def _threshold(name: str) -> Threshold:
    """Steps through the type's own numbers, up from below and then down from above."""
    kind = DTYPES[name]
    theory = math.log(torch.finfo(kind).max)
    argument = torch.tensor(theory, dtype=kind)
    up, down = (torch.tensor(end, dtype=kind) for end in (math.inf, 0.0))
    while argument.exp().isfinite():
        argument = torch.nextafter(argument, up)
    while not argument.exp().isfinite():
        argument = torch.nextafter(argument, down)
    return Threshold(name, theory, float(argument))


def _code(size: float, dtype: str, subtract_max: bool, divisor: float) -> str:
    subtract = "logits = logits - logits.max()\n" if subtract_max else ""
    return f"""\
import math
import torch

scores = torch.tensor([1, 1 / 6, -1 / 12], dtype=torch.float64) * {size}
logits = (scores / {divisor}).to(torch.{dtype})
print("logits", logits.tolist())
{subtract}exponentials = logits.exp()
print("weights", (exponentials / exponentials.sum()).tolist())
safe = (logits - logits.max()).exp()
print("safe", (safe / safe.sum()).tolist())
print("threshold", math.log(torch.finfo(torch.{dtype}).max))
"""


LESSON = Lesson(
    "overflow",
    overflow,
    (
        Control("size", "range", 12.0, low=0.0, high=1000.0, step=0.5),
        Control("dtype", "choice", "float16", values=tuple(DTYPES)),
        Control("subtract_max", "toggle", False),
        DIVISOR,
    ),
    _code,
)
