"""An alarm: one plain record, for people (`words`, `advice`) and for programs (`as_json`)."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from scaledot.watch.alarms.advice import advice_for

Grade = Literal["note", "warn", "act"]
GRADES: tuple[Grade, ...] = get_args(Grade)  # from the mildest to the gravest


@dataclass(frozen=True)
class Alarm:
    """Raised once for a layer and a kind, and again only when its grade rises."""

    step: int
    grade: Grade
    kind: str
    layer: str
    head: int | None  # None: the layer as a whole
    value: float
    threshold: float
    since: int  # the step with which it began
    rate: float | None  # growth of ln(score) a step; None: this kind does not grow
    words: str
    advice: str  # the command or the line of code to use
    heads: tuple[int, ...] = ()  # all that are concerned


def as_json(alarm: Alarm) -> dict[str, Any]:
    """Ready for json.dumps: a number that is not finite becomes a string ("nan", "inf")."""
    return {name: _plain(value) for name, value in dataclasses.asdict(alarm).items()}


def from_json(data: Mapping[str, Any]) -> Alarm:
    """Read what `as_json` gave. The advice is the declared one: a file gives no command to type."""
    named = dict(data)
    for name in ("value", "threshold", "rate"):
        named[name] = None if data[name] is None else float(data[name])
    named["heads"] = tuple(data["heads"])
    named["advice"] = advice_for(named["kind"], named["grade"])
    return Alarm(**named)


def at_least(grade: Grade, wanted: Grade) -> bool:
    return GRADES.index(grade) >= GRADES.index(wanted)


def is_loud(alarm: Alarm) -> bool:
    """Whether it is shown without being asked for; of the notes, those about the call's scale."""
    return alarm.grade != "note" or alarm.kind == "scale"


def misses_division(alarm: Alarm) -> bool:
    """Whether the call's scale is far above 1/sqrt(d_k)."""
    return alarm.kind == "scale" and alarm.value > 1


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
