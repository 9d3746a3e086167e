"""Alarms: rules over the history of readings, in three grades, each said once and in words.

The way of a number: `heads` (what is known of every head; its `trend` and `stretch`) -> `findings`
(the rules, pure) -> `judge` (what is news) -> `words` -> `Alarm`. The thresholds are in `rules`.
"""

from scaledot.watch.alarms.alarm import GRADES, Alarm, Grade, as_json, at_least, from_json
from scaledot.watch.alarms.judge import Judge, of_run
from scaledot.watch.alarms.rules import KINDS, RULES, Rule, overridden

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
