"""Alarms: rules over the history of readings, in three grades, each said once and in words.

The way of a number: `heads` (what is known of every head; its `trend` and `stretch`) -> `findings`
(the rules, pure) -> `judge` (what is news) -> `words` -> `Alarm`. The thresholds are in `rules`.
"""

from typing import TYPE_CHECKING, Any

from scaledot.watch.alarms.alarm import GRADES, Alarm, Grade, as_json, at_least, from_json
from scaledot.watch.alarms.rules import KINDS, RULES, Rule, overridden

if TYPE_CHECKING:
    from scaledot.watch.alarms.judge import Judge, of_run

__all__ = [
    "GRADES",
    "KINDS",
    "RULES",
    "Alarm",
    "Grade",
    "Judge",
    "Rule",
    "as_json",
    "at_least",
    "from_json",
    "of_run",
    "overridden",
]


def __getattr__(name: str) -> Any:
    if name in ("Judge", "of_run"):  # on first use: the rules alone need neither numpy nor torch
        from scaledot.watch.alarms import judge

        return getattr(judge, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
