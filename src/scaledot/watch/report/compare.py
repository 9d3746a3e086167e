"""Two runs side by side: verdicts, what was different, the same pictures on the same scales."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from scaledot.watch.report import heat, page
from scaledot.watch.report.data import as_data, plain
from scaledot.watch.report.facts import Facts
from scaledot.watch.report.markup import Markup, element, joined
from scaledot.watch.report.scales import SCALES
from scaledot.watch.report.verdict import Verdict
from scaledot.watch.report.words import number, signed

Judged = tuple[Facts, Verdict]
LETTERS = ("A", "B")
CHANCE = "One run each: a difference of some hundredths in the loss may be chance."


@dataclass(frozen=True)
class Row:
    """One number of both runs."""

    name: str
    a: float | None
    b: float | None

    @property
    def difference(self) -> float | None:
        if self.a is None or self.b is None:
            return None
        found = self.b - self.a
        return found if math.isfinite(found) else None

    @property
    def shown(self) -> tuple[str, str, str]:
        difference = self.difference
        return number(self.a), number(self.b), "-" if difference is None else signed(difference)


NUMBERS: tuple[tuple[str, Callable[[Facts], float | None]], ...] = (
    ("final loss", lambda facts: facts.loss.final),
    ("lowest loss", lambda facts: facts.loss.lowest),
    ("largest logit read", lambda facts: None if facts.peak is None else facts.peak.peak),
    ("largest logit at the end", lambda facts: _worst(facts, "max_logit", max)),
    ("least that a softmax passes at the end", lambda facts: _worst(facts, "passes", min)),
    ("least entropy at the end", lambda facts: _worst(facts, "entropy_ratio", min)),
    ("heads with logits above the band", lambda facts: float(facts.high)),
    ("closed heads", lambda facts: float(facts.closed)),
    ("alarms to act on", lambda facts: float(_alarms(facts, "act"))),
    ("alarms to look at", lambda facts: float(_alarms(facts, "warn"))),
    ("last step", lambda facts: None if facts.last_step is None else float(facts.last_step)),
    ("cost of the watch, share of the whole run", lambda facts: facts.cost),
    ("cost of the watch when steady", lambda facts: facts.steady_cost),
)


def rows_of(a: Facts, b: Facts) -> list[Row]:
    rows = [Row(name, read(a), read(b)) for name, read in NUMBERS]
    return [row for row in rows if row.a is not None or row.b is not None]


def differing(a: Facts, b: Facts) -> dict[str, tuple[str, str]]:
    """Attributes that are not the same; how long and when they ran is no setting."""
    ours, theirs = page.attributes_of(a), page.attributes_of(b)
    names = [name for name in dict.fromkeys((*ours, *theirs)) if name not in ("started", "took")]
    pairs = {name: (ours.get(name, "-"), theirs.get(name, "-")) for name in names}
    rates = [_highest_rate(facts) for facts in (a, b)]
    if rates[0] != rates[1]:
        pairs["highest learning rate"] = (number(rates[0]), number(rates[1]))
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def compare_page(a: Judged, b: Judged) -> str:
    runs = (a, b)
    named = [
        (f"{letter}: {facts.name}", facts, letter.lower())
        for letter, (facts, _) in zip(LETTERS, runs, strict=True)
    ]
    blocks = [
        element(
            "section",
            element("p", element("strong", f"Run {letter}")),
            page.verdict_block(verdict, facts, "h2"),
            class_="run-block",
        )
        for letter, (facts, verdict) in zip(LETTERS, runs, strict=True)
    ]
    content = joined(
        element("header", element("h1", f"{a[0].name} and {b[0].name}, side by side")),
        element(
            "main",
            element("div", blocks, class_="pair"),
            _numbers(a[0], b[0]),
            _settings(a[0], b[0]),
            element("section", element("h2", "What happened"), page.curves(named)),
            _heat_maps([facts for facts, _ in runs]),
            [_of_run(letter, run) for letter, run in zip(LETTERS, runs, strict=True)],
        ),
        page.footer(),
    )
    return page.document(f"{a[0].name} and {b[0].name}", content)


def compare_data(a: Judged, b: Judged) -> dict[str, Any]:
    return {
        "a": as_data(*a),
        "b": as_data(*b),
        "differences": {
            row.name: plain({"a": row.a, "b": row.b, "b_minus_a": row.difference})
            for row in rows_of(a[0], b[0])
        },
        "settings": {
            name: {"a": pair[0], "b": pair[1]} for name, pair in differing(a[0], b[0]).items()
        },
    }


def _numbers(a: Facts, b: Facts) -> Markup:
    rows = [
        element(
            "tr",
            element("th", row.name, scope="row"),
            [element("td", _cell(value), class_="n") for value in (row.a, row.b)],
            element("td", row.shown[2], class_="n"),
        )
        for row in rows_of(a, b)
    ]
    titles = (("Number", ""), ("A", "n"), ("B", "n"), ("B - A", "n"))
    return element(
        "section",
        element("h2", "In numbers"),
        page.table("Loss and worst vitals of both runs", titles, rows, "numbers of both runs"),
        element("p", CHANCE),
    )


def _cell(value: float | None) -> Markup | str:
    return "-" if value is None else page.data(value)


def _settings(a: Facts, b: Facts) -> Markup:
    rows = [
        element(
            "tr",
            element("th", name, scope="row"),
            [element("td", element("code", value)) for value in pair],
        )
        for name, pair in differing(a, b).items()
    ]
    titles = (("What", ""), ("A", ""), ("B", ""))
    body = (
        page.table("Only what differs", titles, rows, "differing settings")
        if rows
        else element("p", "The stores name no difference: same command, model and versions.")
    )
    return element("section", element("h2", "What was different"), body)


def _heat_maps(runs: Sequence[Facts]) -> Markup | None:
    read = [(letter, facts) for letter, facts in zip(LETTERS, runs, strict=True) if facts.readings]
    if not read:
        return None
    parts = [
        joined(
            element("h3", scale.title),
            heat.legend(vital),
            element(
                "div",
                [
                    element(
                        "div",
                        element("p", element("strong", f"Run {letter}")),
                        heat.over_time(facts.history, vital),
                        heat.moments(facts.history, vital),
                    )
                    for letter, facts in read
                ],
                class_="pair",
            ),
        )
        for vital, scale in SCALES.items()
    ]
    return element(
        "section",
        element("h2", "Every head over time"),
        element(
            "p",
            "The colours mean the same in both: the left end of a scale is healthy, the right end "
            "is ill.",
        ),
        parts,
    )


def _of_run(letter: str, run: Judged) -> Markup:
    facts, verdict = run
    said = [facts.coverage, *verdict.unknown]
    return element(
        "section",
        element("h2", f"Run {letter}: what was watched, and what is not known"),
        element("ul", [element("li", line) for line in said if line]),
    )


def _worst(facts: Facts, vital: str, worst: Callable[..., float]) -> float | None:
    known = [value for value in facts.history.last(vital).tolist() if math.isfinite(value)]
    return worst(known) if known else None


def _alarms(facts: Facts, grade: str) -> int:
    return sum(alarm.grade == grade for alarm in facts.alarms)


def _highest_rate(facts: Facts) -> float | None:
    values = facts.learning_rate.values
    return float(values.max()) if len(values) else None
