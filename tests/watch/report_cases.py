"""Stores for the tests of the report: healthy heads, unless a test makes one ill."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from scaledot.measure import COUNT_FIELDS, FLOAT_FIELDS
from scaledot.watch.reading import Reading, RunAttributes, Scalar
from scaledot.watch.store import Store

LAYERS = (("blocks.0.attn", 3), ("blocks.1.attn", 2))
STARTED = 1_700_000_000.0
HEALTHY = {
    "max_logit": 7.0,
    "logit_std": 1.0,
    "row_std": 1.0,
    "entropy": 3.0,
    "entropy_ratio": 0.6,
    "sum_p2": 0.2,
    "top_p": 0.3,
    "q_rms": 1.0,
    "k_rms": 1.0,
    "rows": 64,
    "pairs": 2048,
}
# (step, layer) -> the vitals that are not healthy: one number, or one a head
Ill = Callable[[int, str], dict]


def reading(step: int, layer: str, heads: int, **ill) -> Reading:
    numbers = {**dict.fromkeys((*FLOAT_FIELDS, *COUNT_FIELDS), 0.0), **HEALTHY, **ill}
    floats = np.stack([np.broadcast_to(numbers[name], heads) for name in FLOAT_FIELDS])
    counts = np.stack([np.broadcast_to(numbers[name], heads) for name in COUNT_FIELDS])
    return Reading(step, "train", STARTED + step, layer, floats, counts.astype(np.int64))


def loss(step: int) -> float:
    return 4.0 / (1 + step) ** 0.2


def write_run(
    path: Path,
    steps: Sequence[int] = range(60),
    layers: Sequence[tuple[str, int]] = LAYERS,
    ill: Ill = lambda step, layer: {},
    scalars: Callable[[int], dict[str, float]] = lambda step: {"loss": loss(step)},
    **more,
) -> Path:
    """more: attributes of the run, as `coverage="5 of 9 attention layers watched"`."""
    attributes = RunAttributes(command=("train.py", "--lr", "3e-2"), more=more, started=STARTED)
    with Store(path, attributes) as store:
        for step in steps:
            readings = [reading(step, layer, heads, **ill(step, layer)) for layer, heads in layers]
            numbers = scalars(step).items()
            store.write(readings, [Scalar(step, name, value) for name, value in numbers])
    return path


def collapsing(step: int, layer: str) -> dict:
    """Scores of every head double every eight steps; the first head of blocks.1 leads by eight."""
    lead = np.zeros(dict(LAYERS)[layer])
    if layer == "blocks.1.attn":
        lead[0] = 8
    score = np.minimum(4 * 2 ** ((step + lead) / 8), 1500)
    passes = np.clip(30 / score, 0.004, 0.9)
    return {"max_logit": score, "sum_p2": 1 - passes, "entropy_ratio": passes / 2}


def write_large(path: Path, steps: int = 10_000, layers: int = 32, heads: int = 32) -> Path:
    """A long run of a large model, every step read; head 5 of layer 1 grows without end."""
    names = [f"model.layers.{layer}.self_attn" for layer in range(layers)]
    draw = np.random.default_rng(0)
    floats = np.zeros((len(FLOAT_FIELDS), layers * heads), np.float32)
    for name, value in HEALTHY.items():
        if name in FLOAT_FIELDS:
            floats[FLOAT_FIELDS.index(name)] = value
    counts = np.zeros((len(COUNT_FIELDS), heads), np.int64)
    for name in ("rows", "pairs"):
        counts[COUNT_FIELDS.index(name)] = HEALTHY[name]
    usual = draw.uniform(5, 20, layers * heads).astype(np.float32)
    score, closed, entropy = (
        FLOAT_FIELDS.index(name) for name in ("max_logit", "sum_p2", "entropy_ratio")
    )
    more = {"coverage": f"{layers} of {layers} attention layers watched"}
    # The queue takes all of it: this thread is faster than the disk.
    with Store(path, RunAttributes(("train.py",), more=more), queue_bytes=2**32) as store:
        for step in range(steps):
            mine = floats.copy()
            mine[score] = usual + draw.standard_normal(layers * heads, dtype=np.float32)
            mine[score, heads + 5] += step / 10
            mine[closed] = np.clip(mine[score] / 1000, 0, 1)
            mine[entropy] = np.clip(10 / mine[score], 0, 1)
            store.write(
                [
                    Reading.trusted(
                        step, "train", STARTED + step, name, mine[:, at : at + heads], counts
                    )
                    for name, at in zip(names, range(0, layers * heads, heads), strict=True)
                ],
                [Scalar(step, "loss", loss(step)), Scalar(step, "learning_rate", 3e-4)],
            )
    assert store.dropped == 0
    assert store.broken is None
    return path
