"""What to do about it: remedies for the alarms, what each changes, what it did before."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from scaledot.watch.alarms.alarm import Alarm
from scaledot.watch.report.evidence import evidence_for

CLOSING = ("collapse", "growth", "saturation")  # kinds of alarm that end in a closed softmax
CURABLE = (*CLOSING, "fading")
FLAG = re.compile(r"--remedy[ =](\S+)")


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
    # Late: a healthy run needs none of it, and the probes behind it take a second to load.
    from scaledot.watch.remedies import propose

    proposed = {str(one.remedy): one for one in propose(_Anybody(), grave)}
    commands: dict[str, str] = {}
    for alarm in sorted(grave, key=lambda alarm: (alarm.grade, alarm.step)):  # act before warn
        found = FLAG.search(alarm.advice)
        if found is not None:
            commands.setdefault(found[1], alarm.advice)
    for name, one in proposed.items():
        commands.setdefault(name, one.command)
    codes = {name: one.code for name, one in proposed.items()}
    found = [_remedy(name, command, codes.get(name, "")) for name, command in commands.items()]
    return [one for one in found if one is not None]


class _Anybody:
    """A watch whose model is gone: a store holds numbers, no weights."""

    model = None


def _remedy(name: str, command: str, code: str) -> Remedy | None:
    from scaledot.watch.remedies import RemedyError, parse

    try:
        kind = parse(name).kind
    except RemedyError:  # a store may come from another version, with other remedies
        return None
    return Remedy(
        name, command, code, kind.changes, kind.keys, kind.promise, kind.source, evidence_for(name)
    )
