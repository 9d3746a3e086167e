"""A finding in plain words: where, since when, how fast, why it matters, what to do."""

import math
import shlex
from collections.abc import Callable, Sequence

import numpy as np

from scaledot.watch.alarms.advice import SCRIPT, advice_for
from scaledot.watch.alarms.alarm import GRADES, Alarm
from scaledot.watch.alarms.findings import Finding
from scaledot.watch.alarms.heads import Heads, Scale

SHOWN = 6  # heads that are listed by number


def tell(finding: Finding, step: int, heads: Heads, command: Sequence[str]) -> Alarm:
    where = finding.where
    columns = np.arange(where.columns.start, where.columns.stop)[where.heads]
    one = len(where.heads) == 1
    rate = float(heads.trend.slope[columns].max()) if finding.kind in GROWING else None
    grade = GRADES[finding.grade]
    return Alarm(
        step=step,
        grade=grade,
        kind=finding.kind,
        layer=where.layer,
        head=int(where.heads[0]) if one else None,
        value=finding.value,
        threshold=finding.threshold,
        since=finding.since,
        rate=rate,
        words=WORDS[finding.kind](finding, heads, columns),
        advice=advice_for(finding.kind, grade, shlex.join(command) or SCRIPT),
        heads=tuple(where.heads.tolist()),
    )


def tell_loss(step: int, value: float) -> Alarm:
    """Write the alarm of a loss that is no number; it is the model's, and no layer's."""
    return Alarm(
        step=step,
        grade="act",
        kind="loss",
        layer="",
        head=None,
        value=value,
        threshold=0.0,
        since=step,
        rate=None,
        words=f"the loss is {'NaN' if math.isnan(value) else 'infinite'}. What follows is not to "
        "be trusted; go back to the last checkpoint before this step",
        advice=advice_for("loss", "act"),
    )


def line(alarms: Sequence[Alarm]) -> str:
    """One calm line for the alarms of one step, kind and grade."""
    first = alarms[0]
    others = len(alarms) - 1
    more = f" (and {others} more layer{'s' if others > 1 else ''})" if others else ""
    return f"{first.grade}, step {first.step:,}: {first.words}{more} -> {first.advice}"


def _collapse(finding: Finding, heads: Heads, columns: np.ndarray) -> str:
    lead = columns[np.argmax(heads.trend.slope[columns])]
    score, passes = float(heads.score[columns].max()), float(heads.passes[columns].mean())
    return (
        f"{_named(finding, columns, heads)}: logits run away and the softmax closes since step "
        f"{finding.since:,}; largest logit {_short(score)}, {_speed(heads, lead)}, passes "
        f"{_short(passes)}. A closed softmax no longer learns where to look; the loss tells later"
    )


def _growth(finding: Finding, heads: Heads, columns: np.ndarray) -> str:
    words = (
        f"{_named(finding, columns, heads)}: largest logit {_short(finding.value)}, above "
        f"{_short(finding.threshold)} and {_speed(heads, columns[0])} since step {finding.since:,}"
    )
    if GRADES[finding.grade] == "note":
        return f"{words}. Healthy runs do this too"
    return f"{words}. Logits of this size have ended trainings"


def _saturation(finding: Finding, heads: Heads, columns: np.ndarray) -> str:
    passes = float(heads.passes[columns].mean())
    return (
        f"{_named(finding, columns, heads)}: one-hot since step {finding.since:,} (passes "
        f"{_short(passes)}), as {finding.value:.0%} of the model's heads are. So many heads have "
        "stopped choosing; is the division by sqrt(d_k) there, and the learning rate right?"
    )


def _fading(finding: Finding, heads: Heads, columns: np.ndarray) -> str:
    return (
        f"{_named(finding, columns, heads)}: looks at everything alike since step "
        f"{finding.since:,}. After warm-up a head should choose; scores divided twice, by d_k, or "
        "a learning rate too low for q and k do this"
    )


def _start(finding: Finding, heads: Heads, columns: np.ndarray) -> str:
    _, _, q_rms, k_rms = np.median(heads.opening[:, columns], axis=1)
    sizes = f"q_rms is {_short(q_rms)}, k_rms {_short(k_rms)}"
    known = heads.scales.get(finding.where.layer)
    if known is None:
        cause = f"{sizes}: initialised too large, or is the division by sqrt(d_k) missing?"
    elif known.unit > 1.5:
        cause = f"{_scale_of(known)}: is the division by sqrt(d_k) missing? ({sizes})"
    else:
        cause = f"{sizes}: are they initialised too large? The scale, {known.scale:.3g}, is right"
    return (
        f"{_named(finding, columns, heads)}: logits are far too large from the start, logit_std "
        f"{_short(finding.value)} where about 1 is usual. {cause}"
    )


def _scale(finding: Finding, heads: Heads, columns: np.ndarray) -> str:
    layer, known = finding.where.layer, heads.scales[finding.where.layer]
    std, _, q_rms, k_rms = np.median(heads.opening[:, columns], axis=1)
    if known.unit > 1.5:
        said = f"{_scale_of(known)}: is the division by sqrt(d_k) missing?"
    elif known.unit > 1 / 1.5:
        small, large = ("q", "k") if q_rms < k_rms else ("k", "q")
        said = (
            f"{small} is smaller than {large} by sqrt(d_k), and the call divides by sqrt(d_k), "
            f"too (scale {known.scale:.3g}, d_k = {known.d_k}): is the scale applied twice?"
        )
    elif math.isclose(known.scale * known.d_k, 1, rel_tol=1e-3):
        said = f"{_scale_of(known)}: this is 1/d_k, right for muP alone."
    elif math.isclose(known.scale**2 * known.d_k * len(columns), 1, rel_tol=1e-3):
        said = f"{_scale_of(known)}: this is 1/sqrt(d_model); is d_k meant?"
    else:
        said = f"{_scale_of(known)}: is that meant?"
    return f"{layer or 'the model'}: {said} logit_std starts at {_short(std)}"


def _scale_of(known: Scale) -> str:
    """scale 1 where d_k = 64 (1/sqrt(d_k) is 0.125)"""
    right = f"1/sqrt(d_k) is {known.d_k**-0.5:.3g}"
    return f"scale {known.scale:.3g} where d_k = {known.d_k} ({right})"


def _broken(finding: Finding, heads: Heads, columns: np.ndarray) -> str:
    return (
        f"{_named(finding, columns, heads)}: {finding.value:,.0f} rows hold NaN or inf. What "
        "follows is not to be trusted; go back to the last checkpoint before this step"
    )


def _sink(finding: Finding, heads: Heads, columns: np.ndarray) -> str:
    return (
        f"{_named(finding, columns, heads)}: a sink since step {finding.since:,}, up to "
        f"{finding.value:.0%} of the weight on the first key. That is common and no illness"
    )


WORDS: dict[str, Callable[[Finding, Heads, np.ndarray], str]] = {
    "collapse": _collapse,
    "growth": _growth,
    "saturation": _saturation,
    "fading": _fading,
    "start": _start,
    "scale": _scale,
    "broken": _broken,
    "sink": _sink,
}
GROWING = ("collapse", "growth")


def _named(finding: Finding, columns: np.ndarray, heads: Heads) -> str:
    """blocks.1.attention, heads 0 and 3 of 4"""
    where = finding.where
    total = where.columns.stop - where.columns.start
    numbers = [str(head) for head in where.heads.tolist()]
    if len(numbers) == 1:
        return f"{where.layer}, head {numbers[0]} of {total}"
    if len(numbers) == total:
        return f"{where.layer}, all {total} heads"
    if len(numbers) > SHOWN:
        return f"{where.layer}, {len(numbers)} of {total} heads"
    return f"{where.layer}, heads {', '.join(numbers[:-1])} and {numbers[-1]} of {total}"


def _speed(heads: Heads, column: int) -> str:
    slope = float(heads.trend.slope[column])
    steps = math.log(2) / slope if slope > 0 else math.inf
    return f"doubling every {_short(steps)} steps" if math.isfinite(steps) else "at rest"


def _short(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 10 else f"{number:.2g}"
