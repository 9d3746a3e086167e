"""What to do about it: remedies for the alarms, what each changes, what it did before."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from scaledot.watch.alarms.advice import SCRIPT, remedy_for
from scaledot.watch.alarms.alarm import Alarm
from scaledot.watch.remedies import parse
from scaledot.watch.remedies.proposal import choose
from scaledot.watch.report.evidence import evidence_for

CLOSING = ("collapse", "growth", "saturation")  # kinds of alarm that end in a closed softmax
CURABLE = (*CLOSING, "start", "fading")


@dataclass(frozen=True)
class Remedy:
    name: str  # as it is typed: qk-clip:100
    command: str
    code: str  # the same in a script; "": none was proposed
    changes: str
    keys: str  # what becomes of the state dict
    promise: str
    source: str
    evidence: str


def remedies_for(alarms: Iterable[Alarm]) -> list[Remedy]:
    """Those that grave alarms advise, the gravest first, then what else is proposed for them."""
    grave = [alarm for alarm in alarms if alarm.grade != "note" and alarm.kind in CURABLE]
    if not grave:
        return []
    # Without heads: the code that is proposed then names no layer, which is a word of the store's.
    nameless = [dataclasses.replace(alarm, head=None, heads=()) for alarm in grave]
    proposed = {str(one.remedy): one for one in choose(nameless)}
    in_order = sorted(grave, key=lambda alarm: (alarm.grade, alarm.step))  # act before warn
    advised = [remedy_for(alarm.kind, alarm.grade) for alarm in in_order]
    codes = {name: one.code for name, one in proposed.items()}
    names = dict.fromkeys([*filter(None, advised), *proposed])
    return [_remedy(name, codes.get(name, "")) for name in names]


def _remedy(name: str, code: str) -> Remedy:
    kind = parse(name).kind
    return Remedy(
        name,
        f"scaledot run --remedy {name} {SCRIPT}",
        code,
        kind.changes,
        kind.keys,
        kind.promise,
        kind.source,
        evidence_for(name),
    )
