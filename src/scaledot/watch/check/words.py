"""What check says of heads, in words: the same in the terminal and in the data."""

import math
import os
from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

from scaledot.fields import BANDS
from scaledot.printable import one_line
from scaledot.watch.check.examine import Examination
from scaledot.watch.check.heads import POSITIONAL_ABOVE, SINK_ABOVE, Head

MEANINGS = {
    "broken": "its logits hold NaN or infinity",
    "positional": f"over {POSITIONAL_ABOVE:.0%} of its weight at one distance from the query",
    "sink": f"over {SINK_ABOVE:.0%} of its weight on the first token",
    "saturated": f"over {BANDS['saturated'].high:.0%} of its rows one-hot (top_p above 0.99)",
    "flat": f"looks at everything alike (entropy_ratio above {BANDS['entropy_ratio'].high})",
}
SHARP_BY_RIGHT = {"positional", "sink"}


def verdict(examination: Examination) -> str:
    heads = examination.heads
    sick = [head for head in heads if head.outside]
    if not sick and not examination.enough:
        return f"too little seen: {examination.coverage}"
    if not sick:
        return f"all {len(heads)} heads are inside their healthy bands"
    verb = "is" if len(sick) == 1 else "are"
    text = f"{len(sick)} of {len(heads)} heads {verb} outside a healthy band"
    known = sum(bool(SHARP_BY_RIGHT & set(head.roles)) for head in sick)
    if known:
        text += f", {known} of them positional or a sink, which may be sharp without harm"
    return text


def of_head(head: Head) -> str:
    """What the head does, with its numbers."""
    said = {
        "broken": f"{head.vitals['nonfinite']:.0f} rows with NaN or infinity",
        "positional": f"{head.offset} {_share(head.offset.weight)}" if head.offset else "",
        "sink": f"sink {_share(head.vitals['sink'])}",
        "saturated": f"saturated {_share(head.vitals['saturated'])}",
        "flat": "flat",
    }
    return ", ".join(said[role] for role in head.roles)


def _share(share: float) -> str:
    """Never 100 % of what is only nearly all."""
    return ">99%" if 0.995 <= share < 1 else f"{share:.0%}"


def divisors(examination: Examination) -> list[str]:
    """What the scores are divided by, one line for each width and divisor."""
    groups: dict[tuple[int | None, float | None], set[str]] = {}
    for head in examination.heads:
        groups.setdefault((head.d_k, head.divisor), set()).add(head.layer)
    if len(groups) == 1:
        return [_divisor(*group) for group in groups]
    return [
        f"{_divisor(*group)}: {len(layers)} layer{'s' * (len(layers) != 1)}"
        for group, layers in groups.items()
    ]


def _divisor(d_k: int | None, divisor: float | None) -> str:
    if d_k is None:
        return "what the scores are divided by, and their width, is not one number"
    root = f"√d_k = √{d_k} = {math.sqrt(d_k):.3g}"
    if divisor is None:
        return f"the scores have no single divisor, so not {root} alone"
    if _by_root(d_k, divisor):
        return f"the scores are divided by {root}"
    return f"the scores are divided by {divisor:.3g}, not by {root}"


def spreads(examination: Examination) -> list[tuple[str, str, str, str]]:
    """Name, least .. median .. most, what it is held against, how many heads are outside."""
    heads = examination.heads
    limits = sorted({f"{head.freezing:.2f}" for head in heads})
    limit = limits[0] if len(limits) == 1 else f"{limits[0]} to {limits[-1]}"
    healthy = BANDS["logit_std"]
    against = {
        "logit_std": f"√d_k promises 1; healthy {healthy.low:g}..{healthy.high:g}",
        "row_std": f"freezes above √(2 ln n) = {limit}",
    }
    lines = []
    for name, meaning in against.items():
        values = [head.vitals[name] for head in heads if math.isfinite(head.vitals[name])]
        spread = (
            f"{min(values):.2f} .. {median(values):.2f} .. {max(values):.2f}" if values else "-"
        )
        outside = sum(name in head.outside for head in heads)
        lines.append((name, spread, meaning, f"{outside or 'no'} head{'s' * (outside != 1)}"))
    return lines


def scale_verdict(examination: Examination) -> str:
    heads = examination.heads
    wrong = [head for head in heads if not head.scale_holds]
    what = "√d_k is still right for" if _all_by_root(heads) else "the divisor fits"
    if not wrong:
        return f"{what} all {len(heads)} heads"
    text = f"{what} {len(heads) - len(wrong)} of {len(heads)} heads"
    known = [head for head in wrong if head.divisor and head.vitals["logit_std"] > 0]
    if not known:
        return text
    worst = max(known, key=lambda head: abs(math.log(head.vitals["logit_std"])))
    return (
        f"{text}; furthest off is head {worst.head} of {worst.layer}, whose logit_std would be 1 "
        f"with a divisor of {(worst.divisor or 0) * worst.vitals['logit_std']:.3g}"
    )


def _all_by_root(heads: Iterable[Head]) -> bool:
    return all(_by_root(head.d_k, head.divisor) for head in heads)


def _by_root(d_k: int | None, divisor: float | None) -> bool:
    return bool(d_k and divisor) and math.isclose(divisor or 0, math.sqrt(d_k or 0), rel_tol=1e-5)


def unknown(examination: Examination) -> list[str]:
    """What the reader might believe was looked at, and was not."""
    lines = []
    if made_up := examination.subject.made_up:
        more = f" and {len(made_up) - 3} more" if len(made_up) > 3 else ""
        lines.append(
            f"not in the file, so drawn at random: {', '.join(made_up[:3])}{more}; numbers that "
            f"depend on them mean nothing"
        )
    for reason in dict.fromkeys(examination.unplaced.values()):
        layers = [name for name, why in examination.unplaced.items() if why == reason]
        more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
        lines.append(f"not known whether positional ({reason}): {', '.join(layers[:3])}{more}")
    return lines


class Names(NamedTuple):
    """What a table calls the layers, and what explains it: a pattern, or else the map's labels."""

    short: dict[str, str]
    pattern: str

    def label(self, layer: str) -> str:
        return self.short[layer] if self.pattern else f"{self.short[layer]} {layer}"


def short_names(layers: list[str]) -> Names:
    """encoder.layer.0.attention -> 0, and the pattern; just numbers where none fits."""
    parts = {layer: layer.split(".") for layer in layers}
    if len({len(part) for part in parts.values()}) == 1:
        columns = list(zip(*parts.values(), strict=True))
        differing = [i for i, column in enumerate(columns) if len(set(column)) > 1]
        if len(differing) == 1:
            (at,) = differing
            pattern = ".".join("N" if i == at else column[0] for i, column in enumerate(columns))
            return Names({layer: part[at] for layer, part in parts.items()}, pattern)
    return Names({layer: str(number) for number, layer in enumerate(layers)}, "")


def shown(path: str) -> str:
    """As short as it can be typed here."""
    short = os.path.relpath(path)
    return one_line(short if len(short) < len(path) else path)
