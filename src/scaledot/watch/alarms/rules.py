"""Every threshold in one table, with where it comes from. Each can be set by argument.

`collapse` is a rule's threshold, `collapse.act` that of its next grade, and the other names after a
dot are the parts of its condition. The names "own study" and "tuned" mean benchmarks/alarms:
docs/alarms.md says which runs set these numbers and which judged them.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from scaledot.watch.alarms.alarm import Grade


class Rule(NamedTuple):
    kind: str
    threshold: float
    grade: Grade | None  # what crossing it raises; None: a part of the kind's condition
    meaning: str
    source: str


_KIMI = "Kimi K2, arXiv 2507.20534"
_TUNED = "tuned: docs/alarms.md"
_MEASURED = "measured on first steps: docs/alarms.md"

RULES: dict[str, Rule] = {
    "collapse": Rule(
        "collapse", 0.5, "warn", "share of a layer's heads that run away, sinks apart", _TUNED
    ),
    "collapse.act": Rule(
        "collapse", 0.75, "act", "share of all heads that run away and are closed", _TUNED
    ),
    "collapse.score": Rule(
        "collapse", 50.0, None, "a head runs away above this logit", "Gemma 2 caps scores at 50"
    ),
    "collapse.projected": Rule(
        "collapse",
        1e3,
        None,
        "and at its speed passes this before the run is twice as old",
        "Wortsman et al., arXiv 2309.14322, fig. 10: the loss suffers from 1e3 on",
    ),
    "collapse.passes": Rule(
        "collapse", 0.3, None, "and where its softmax passes less than this", _TUNED
    ),
    "collapse.closed": Rule(
        "collapse", 0.1, None, "for act: passes less than this", "measure.BANDS['passes']"
    ),
    "growth": Rule(
        "growth", 100.0, "note", "largest logit of a head that still grows", f"{_KIMI}: tau = 100"
    ),
    "growth.warn": Rule("growth", 1e3, "warn", "the same", f"{_KIMI}: plain Muon passed 1000"),
    "growth.act": Rule(
        "growth",
        1e4,
        "act",
        "the same",
        "Wortsman et al., arXiv 2309.14322: all above 1e4 diverged",
    ),
    "growth.rate": Rule(
        "growth", 1.0, None, "growing: like step ** this", f"{_KIMI}: linear or superlinear"
    ),
    "saturation": Rule(
        "saturation", 0.75, "note", "share of all heads that are saturated, sinks apart", _TUNED
    ),
    "saturation.warn": Rule("saturation", 0.9, "warn", "the same", _TUNED),
    "saturation.passes": Rule(
        "saturation", 0.05, None, "saturated: the softmax passes less than this", _TUNED
    ),
    "fading": Rule(
        "fading", 0.5, "note", "share of a layer's heads that look at everything", _TUNED
    ),
    "fading.warn": Rule(
        "fading", 0.75, "warn", "share of all heads, after twice the warm-up", _TUNED
    ),
    "fading.entropy": Rule(
        "fading", 0.98, None, "entropy_ratio above this is flat", "measure.BANDS; arXiv 2501.19399"
    ),
    "fading.warm_up": Rule("fading", 200.0, None, "steps before flat heads count", _TUNED),
    "start": Rule(
        "start", 4.0, "warn", "logit_std and row_std at the first reading", "measure.BANDS"
    ),
    "start.heads": Rule("start", 0.9, None, "in this share of all heads", _MEASURED),
    "start.later": Rule(
        "start",
        8.0,
        None,
        "the same at any later reading: the report calls no such run healthy",
        _MEASURED,
    ),
    "scale": Rule(
        "scale",
        2.0,
        "note",
        "at the first reading: the call's scale x sqrt(d_k) is this, or 1 over it",
        _MEASURED,
    ),
    "scale.alike": Rule(
        "scale", 2.0, None, "and q_rms and k_rms differ by less: nothing is folded in", _MEASURED
    ),
    "broken": Rule("broken", 0.0, "act", "rows that hold NaN or inf", "there is no healthy number"),
    "loss": Rule("loss", 0.0, "act", "losses that are NaN or inf", "there is no healthy number"),
    "sink": Rule(
        "sink", 0.3, "note", "weight on the first key: a sink", "Gu et al., arXiv 2410.10781: 0.3"
    ),
    "sink.passes": Rule(
        "sink", 0.3, None, "and the softmax passes less than this: worth a label", _TUNED
    ),
}
KINDS = tuple(dict.fromkeys(rule.kind for rule in RULES.values()))
OFF = float("inf")  # no share, score or count reaches it


def overridden(given: Mapping[str, float] | Iterable[str]) -> dict[str, Rule]:
    """The table with other thresholds: {"growth": 200}, or "growth=200" as on a command line.

    "growth=off" switches the whole kind off.
    """
    pairs = given.items() if isinstance(given, Mapping) else map(_split, given)
    rules = dict(RULES)
    for name, value in pairs:
        if name not in rules:
            raise ValueError(f"there is no alarm threshold {name!r}; there are {', '.join(rules)}")
        if value == OFF and name in KINDS:
            for key, rule in RULES.items():
                if rule.kind == name and rule.grade is not None:
                    rules[key] = rule._replace(threshold=OFF)
        elif value != value or value < 0:
            raise ValueError(f"the alarm threshold {name} is {value}; give a number from 0 up")
        else:
            rules[name] = rules[name]._replace(threshold=float(value), source="set by hand")
    return rules


def _split(text: str) -> tuple[str, float]:
    name, equals, number = text.partition("=")
    if equals and number == "off":
        return name, OFF
    try:
        return name, float(number)
    except ValueError:
        raise ValueError(
            f"{text!r} sets no threshold; type NAME=NUMBER or NAME=off, such as growth=200"
        ) from None
