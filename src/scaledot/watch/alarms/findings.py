"""The rules: pure functions from what is known of the heads to what is wrong with a layer.

Each gives at most one finding a layer. None knows what was said before: that is the judge's.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from scaledot.watch.alarms.heads import Heads, InLayer
from scaledot.watch.alarms.stretch import Stretch

Limits = Mapping[str, float]
NOTE, WARN, ACT = range(3)  # places in GRADES


@dataclass(frozen=True)
class Finding:
    kind: str
    grade: int
    where: InLayer
    since: int
    value: float
    threshold: float


def collapse(heads: Heads, limit: Limits, step: int) -> list[Finding]:
    """Logits run away while the softmax closes, in half of a layer's heads or more.

    Act: three quarters of all heads of the model do so, and are closed.
    """
    if not heads.away.begun or not _several(away := heads.away.lasts & heads.counted):
        return []
    closed = _share(away & (heads.passes < limit["collapse.closed"]), heads)
    act = closed >= limit["collapse.act"]
    return [
        Finding(
            "collapse",
            ACT if act else WARN,
            where,
            _since(heads.away, where),
            closed if act else where.share,
            limit["collapse.act"] if act else limit["collapse"],
        )
        for where in heads.by_layer(away, heads.counted)
        if where.share >= limit["collapse"]
    ]


def growth(heads: Heads, limit: Limits, step: int) -> list[Finding]:
    """The largest logit of a head is high and still grows linearly or faster.

    Healthy runs pass 100 as well: alone that is a note.
    """
    found: list[Finding] = []
    if not heads.growing.begun:
        return found
    levels = [limit["growth"], limit["growth.warn"], limit["growth.act"]]
    for where in heads.by_layer(heads.growing.lasts):
        scores = heads.trend.level[where.columns][where.heads]
        worst = int(np.argmax(scores))
        grade = int(np.searchsorted(levels, scores[worst])) - 1
        if grade >= NOTE:
            one = where._replace(heads=where.heads[worst : worst + 1])
            since = _since(heads.growing, one)
            found.append(Finding("growth", grade, one, since, float(scores[worst]), levels[grade]))
    return found


def saturation(heads: Heads, limit: Limits, step: int) -> list[Finding]:
    """Nearly all heads of the model are one-hot, whether or not their scores still grow."""
    if not heads.shut.begun or not _several(shut := heads.shut.lasts & heads.counted):
        return []
    share = _share(shut, heads)
    if share < limit["saturation"]:
        return []
    warn = share >= limit["saturation.warn"]
    threshold = limit["saturation.warn" if warn else "saturation"]
    return [
        Finding("saturation", WARN if warn else NOTE, w, _since(heads.shut, w), share, threshold)
        for w in heads.by_layer(shut)
    ]


def fading(heads: Heads, limit: Limits, step: int) -> list[Finding]:
    """Heads that look at everything alike, long after they should have begun to choose."""
    if not heads.flat.begun:
        return []
    age = heads.age(step)
    flat = heads.flat.lasts & (age >= limit["fading.warm_up"])
    if not np.count_nonzero(flat):
        return []
    overall = float(flat.mean())
    warn = overall >= limit["fading.warn"] and age.min() >= 2 * limit["fading.warm_up"]
    return [
        Finding(
            "fading",
            WARN if warn else NOTE,
            where,
            _since(heads.flat, where),
            overall if warn else where.share,
            limit["fading.warn"] if warn else limit["fading"],
        )
        for where in heads.by_layer(flat)
        if where.share >= limit["fading"]
    ]


def start(heads: Heads, limit: Limits, step: int) -> list[Finding]:
    """Find logits that are many times too large in nearly every head of the first step read.

    Three numbers must say so: the spread of all logits, their spread within a row (which is what
    the softmax sees), and what q, k and the scale alone would give. So neither a bias that is added
    to the logits, as ALiBi's, nor a direction that all keys share is taken for it.
    """
    if step != heads.opened:
        return []
    std, row_std, q_rms, k_rms = heads.opening
    alone = heads.units * q_rms * k_rms
    large = np.minimum.reduce([std, row_std, alone]) > limit["start"]
    measured = np.count_nonzero(std)
    if not measured or np.count_nonzero(large) < limit["start.heads"] * measured:
        return []
    return [
        Finding("start", WARN, where, step, float(np.median(std[where.columns])), limit["start"])
        for where in heads.by_layer(large)
    ]


def scale(heads: Heads, limit: Limits, step: int) -> list[Finding]:
    """Find calls of the first step read whose scale is far from 1/sqrt(d_k).

    A division that is folded into q's weights makes q and k unlike, and what normalises q or k
    chooses its scale freely: neither is found.
    """
    if step != heads.opened:
        return []
    found: list[Finding] = []
    for layer, columns in heads.layers():
        known = heads.scales.get(layer)
        _, _, q_rms, k_rms = heads.opening[:, columns]
        if known is None or not (q_rms.all() and k_rms.all()):
            continue
        alike = float(np.median(q_rms / k_rms))
        unit = known.unit
        if known.twice(alike):
            unit = 1 / math.sqrt(known.d_k)
        elif max(alike, 1 / alike) > limit["scale.alike"] or known.normalised(q_rms, k_rms):
            continue
        if max(unit, 1 / unit) > limit["scale"] * 0.999:  # 1/sqrt(d_model) of four heads is just 2
            every = InLayer(layer, columns, np.arange(len(q_rms)), 1.0)
            found.append(Finding("scale", NOTE, every, step, unit, limit["scale"]))
    return found


def broken(heads: Heads, limit: Limits, step: int) -> list[Finding]:
    """Rows that hold NaN or inf: at once, without waiting for a second reading."""
    holds = heads.nonfinite > limit["broken"]
    if not np.count_nonzero(holds):
        return []
    return [
        Finding(
            "broken",
            ACT,
            where,
            _since(heads.broken, where),
            float(heads.nonfinite[where.columns].sum()),
            limit["broken"],
        )
        for where in heads.by_layer(holds)
    ]


def sink(heads: Heads, limit: Limits, step: int) -> list[Finding]:
    """A head that rests on the first key: sharp, and no illness. It is given its name."""
    if not heads.sunk.begun:
        return []
    rests = heads.sunk.lasts & (heads.passes < limit["sink.passes"])
    if not np.count_nonzero(rests):
        return []
    return [
        Finding(
            "sink",
            NOTE,
            where,
            _since(heads.sunk, where),
            float(heads.sink[where.columns][where.heads].max()),
            limit["sink"],
        )
        for where in heads.by_layer(rests)
    ]


EVERY: tuple[Callable[[Heads, Limits, int], list[Finding]], ...] = (
    broken,
    start,
    scale,
    collapse,
    growth,
    saturation,
    fading,
    sink,
)


def _several(holds: np.ndarray) -> bool:
    """A single head is no illness: heads that look one token back are one-hot by right."""
    return bool(np.count_nonzero(holds) >= min(2, len(holds)))


def _share(holds: np.ndarray, heads: Heads) -> float:
    return np.count_nonzero(holds) / max(np.count_nonzero(heads.counted), 1)


def _since(stretch: Stretch, where: InLayer) -> int:
    return int(stretch.since[where.columns][where.heads].min())
