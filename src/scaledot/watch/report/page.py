"""The report as one HTML page: no network, no script, opens from disk, prints."""

from collections.abc import Iterable, Sequence
from importlib import resources

import numpy as np

import scaledot
from scaledot.watch.alarms.alarm import Alarm
from scaledot.watch.report import figure, heat, words
from scaledot.watch.report.facts import Facts, edge, sample_in
from scaledot.watch.report.figure import Line, Mark
from scaledot.watch.report.heads import Head
from scaledot.watch.report.history import History
from scaledot.watch.report.judged import grouped
from scaledot.watch.report.markup import Markup, element, joined
from scaledot.watch.report.remedy import Remedy
from scaledot.watch.report.scales import SCALES
from scaledot.watch.report.verdict import Verdict
from scaledot.watch.report.words import count, number, sentence, share
from scaledot.watch.top.words import brief

# Nothing may be fetched, whatever the names in a store look like; styles and pictures are inside.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
MOST_ATTRIBUTES = 60
MOST_ALARMS = 12  # of a grade and a kind that are listed
SIGNS = {"broken": "✖", "sick": "✖", "watch": "▲", "healthy": "✔", "unknown": "?"}
GRADES = {"act": "✖ act", "warn": "▲ warn", "note": "· note"}


def page(facts: Facts, verdict: Verdict) -> str:
    """The whole document."""
    content = joined(
        header(verdict, facts),
        element(
            "main",
            _numbers(facts),
            story(facts),
            heat_maps(facts) if facts.readings else None,
            worst_heads(facts) if facts.readings else None,
            alarms(facts),
            remedies(facts.remedies) if facts.remedies else None,
            watched(facts, verdict),
            about(facts),
        ),
        footer(),
    )
    return document(f"{verdict.name}: {facts.name}", content)


def document(title: str, content: Markup) -> str:
    style = (
        resources.files("scaledot.watch.report").joinpath("page.css").read_text(encoding="utf-8")
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"{title} · scaledot report"),
        element("style", Markup(style)),
    )
    return f"<!doctype html>\n{element('html', head, element('body', content), lang='en')}\n"


def header(verdict: Verdict, facts: Facts) -> Markup:
    return element("header", verdict_block(verdict, facts, "h1"))


def verdict_block(verdict: Verdict, facts: Facts, heading: str) -> Markup:
    return element(
        "div",
        element("p", "Report of the run ", element("code", facts.name), class_="run"),
        element(
            heading,
            element(
                "span", f"{SIGNS[verdict.state]} {verdict.name}{verdict.since}.", class_="state"
            ),
            " ",
            verdict.headline,
        ),
        element("p", " ".join(verdict.sentences)) if verdict.sentences else None,
        _next_step(facts),
        class_=f"verdict {verdict.state}",
    )


def _next_step(facts: Facts) -> Markup | None:
    if not facts.remedies:
        return None
    return joined(
        element("p", "To try next:"),
        element("pre", element("code", facts.remedies[0].command)),
    )


def _numbers(facts: Facts) -> Markup:
    entries = [
        ("Steps", _steps(facts), _readings(facts)),
        ("Heads", Markup(f"{facts.heads:,}"), f"in {count(len(facts.history.layers), 'layer')}"),
    ]
    if facts.loss.final is not None:
        many = facts.loss.averaged > 1
        averaged = f"mean of the last {facts.loss.averaged:,} that were kept" if many else ""
        entries.append(("Final loss", data(facts.loss.final), averaged))
    if facts.peak is not None:
        place = f"{words.where(facts.peak.layer, facts.peak.head)}, step {facts.peak.peak_step:,}"
        entries.append(("Largest logit read", data(facts.peak.peak), place))
    if facts.readings:
        entries.append(
            (
                "Closed heads at the end",
                Markup(f"{facts.closed:,} of {facts.heads:,}"),
                f"passes below {edge('passes'):g}",
            )
        )
        steady = "" if facts.steady_cost is None else f"; {share(facts.steady_cost)} steady"
        step = "" if facts.step_time is None else f", {number(facts.step_time)} s a step"
        entries.append(
            ("Cost of the watch", Markup(share(facts.cost)), f"of the whole run{steady}{step}")
        )
    return element(
        "dl",
        [
            element(
                "div",
                element("dt", name),
                element("dd", value, element("small", small) if small else None),
            )
            for name, value, small in entries
        ],
        class_="numbers",
    )


def data(value: float, text: str | None = None) -> Markup:
    """A number for people that keeps all its digits for programs."""
    return element("data", number(value) if text is None else text, value=repr(float(value)))


def story(facts: Facts) -> Markup | None:
    """Curves over the steps, with the alarms and the end as vertical lines."""
    charts = curves([(facts.name, facts, "a")], marks_of(facts))
    if not charts:
        return None
    return element("section", element("h2", "What happened"), _key(facts), charts)


def curves(runs: Sequence[tuple[str, Facts, str]], marks: Sequence[Mark] = ()) -> Markup | None:
    """The same four curves of one run or of two, on the same axes."""
    steps = figure.steps_axis(*((facts.first_step, facts.last_step) for _, facts, _ in runs))
    read = [(name, facts, kind) for name, facts, kind in runs if facts.readings]
    overall = {kind: overview(facts.history) for _, facts, kind in read}
    charts = [
        figure.chart(
            "Loss",
            [Line(name, facts.loss.steps, facts.loss.values, kind) for name, facts, kind in runs],
            steps,
            marks=marks,
        ),
        figure.chart(
            "Largest logit of any head",
            [Line(name, *overall[kind][0], kind) for name, _, kind in read],
            steps,
            log=True,
            marks=marks,
            edge=edge("max_logit"),
            note="logarithmic",
        ),
        figure.chart(
            "Closed heads, percent",
            [Line(name, *overall[kind][1], kind) for name, _, kind in read],
            steps,
            marks=marks,
            note=f"passes below {edge('passes'):g}",
        ),
        figure.chart(
            "Learning rate",
            [
                Line(name, facts.learning_rate.steps, facts.learning_rate.values, kind)
                for name, facts, kind in runs
            ],
            steps,
            marks=marks,
        ),
    ]
    drawn = [chart for chart in charts if chart is not None]
    return element("div", drawn, class_="charts") if drawn else None


def overview(history: History):
    """(steps, largest logit of all heads), (steps, percent of heads that have closed)."""
    columns = history.columns
    logits, passes = history.spread("max_logit"), history.spread("passes")
    known = ~np.isnan(logits).all(axis=1)
    largest = np.fmax.reduce(logits[known], axis=1)
    measured = ~np.isnan(passes)
    there = measured.any(axis=1)
    closed = (passes < edge("passes"))[there].sum(axis=1) / measured[there].sum(axis=1)
    return (columns[known], largest), (columns[there], 100 * closed)


def marks_of(facts: Facts) -> list[Mark]:
    """The first alarm of each grave grade, and the end where it was no good one."""
    marks = []
    for grade in ("warn", "act"):
        found = [alarm for alarm in facts.alarms if alarm.grade == grade]
        if found:
            first = min(found, key=lambda alarm: alarm.step)
            marks.append(Mark(first.step, f"first {grade} alarm, step {first.step:,}", grade))
    for crash in facts.crashes:
        marks.append(Mark(crash.step, f"{crash.words}, step {crash.step:,}", "crash"))
    return marks


def _key(facts: Facts) -> Markup | None:
    marks = [
        element("span", element("span", class_=f"swatch {mark.kind}"), mark.words, class_="key")
        for mark in marks_of(facts)
    ]
    edges = element(
        "span",
        element("span", class_="swatch edge"),
        f"edge of the healthy band ({edge('max_logit'):g})",
        class_="key",
    )
    return element("p", "Vertical lines: " if marks else None, marks, edges)


def heat_maps(facts: Facts) -> Markup:
    history = facts.history
    parts = [
        joined(
            element("h3", scale.title),
            element("p", f"{scale.words[0].upper()}{scale.words[1:]}.", class_="quiet"),
            heat.legend(vital),
            heat.over_time(history, vital),
            heat.moments(history, vital) if len(history.steps) > 1 else None,
        )
        for vital, scale in SCALES.items()
    ]
    return element(
        "section",
        element("h2", "Every head over time"),
        element(
            "p",
            "The left end of a scale is healthy, its middle is the edge of the healthy band, its "
            "right end is ill. Blue: rows that hold NaN or infinity. The scales are the same in "
            "every report, so two reports can be held side by side.",
        ),
        parts,
    )


def worst_heads(facts: Facts) -> Markup:
    rows = [_head_row(head) for head in facts.worst]
    note = "Heads that alarms name come first, then the largest logit at the last reading."
    titles = (
        ("Head", "path"),
        ("Left its band at step", "n"),
        ("Logit: first", "n"),
        ("largest", "n"),
        ("last", "n"),
        ("Passes, last", "n"),
        ("Entropy ratio, last", "n"),
        ("Largest logit over time", ""),
    )
    return element(
        "section",
        element("h2", f"The {_number_word(len(rows))} to look at first"),
        table(note, titles, rows, "worst heads"),
    )


def _head_row(head: Head) -> Markup:
    name = [element("code", head.layer or "model"), " ", element("strong", f"head {head.head}")]
    left = "-" if head.left is None else f"{head.left:,}"
    cells = [
        element("th", name, " (sink)" if head.sink else None, scope="row", class_="path"),
        element("td", left, class_="n"),
        element("td", data(head.first), class_="n"),
        element("td", data(head.peak), class_="n"),
        element("td", data(head.last["max_logit"]), class_="n"),
        element("td", data(head.last["passes"]), class_="n"),
        element("td", data(head.last["entropy_ratio"]), class_="n"),
        element("td", _spark(head)),
    ]
    return element("tr", cells)


def _spark(head: Head) -> Markup | str:
    curve = head.curves["max_logit"]
    numbers = np.array(curve.numbers)
    axis = figure.axis_of(numbers, log=bool((numbers[np.isfinite(numbers)] > 0).all()))
    if axis is None:
        return "-"
    steps = figure.steps_axis((curve.steps[0], curve.steps[-1]))
    words_ = f"from {number(head.first)} to {number(head.last['max_logit'])}"
    return element(
        "svg",
        figure.shape(Line("", curve.steps, curve.numbers), steps, axis),
        class_="spark",
        viewBox=f"0 0 {figure.WIDTH} {figure.HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"Largest logit of head {head.head}: {words_}",
    )


def alarms(facts: Facts) -> Markup:
    groups = grouped(facts.alarms)
    number_of = count(len(facts.alarms), "alarm") if groups else "No alarm"
    return element(
        "section",
        element("h2", "Alarms"),
        element("p", f"{number_of}, {facts.judged}.", class_="quiet"),
        element("ol", [_group(group) for group in groups], class_="alarms") if groups else None,
    )


def _group(alarms: list[Alarm]) -> Markup:
    """All alarms of a grade and a kind: the advice is the same."""
    first, last = alarms[0], alarms[-1]
    when = f"step {first.step:,}"
    if last.step != first.step:
        when = f"steps {first.step:,} to {last.step:,}"
    more = len(alarms) - MOST_ALARMS
    return element(
        "li",
        element(
            "p",
            element("span", GRADES[first.grade], class_=f"grade {first.grade}"),
            f" · {brief(first.kind)} · {when}",
        ),
        element(
            "ul",
            [
                element("li", f"Step {one.step:,}: {sentence(brief(one.words))}")
                for one in alarms[:MOST_ALARMS]
            ],
            element("li", f"{count(more, 'further alarm')}; `--json` lists all.")
            if more > 0
            else None,
        ),
        element("pre", element("code", first.advice))
        if first.grade != "note" and first.advice
        else None,
    )


def remedies(found: Iterable[Remedy]) -> Markup:
    parts = [
        joined(
            element("h3", element("code", remedy.name)),
            element("p", remedy.evidence),
            element("p", f"It changes {remedy.changes}. What it promises: {remedy.promise}."),
            element("pre", element("code", remedy.command)),
            joined(element("p", "or in a script:"), element("pre", element("code", remedy.code)))
            if remedy.code
            else None,
            element("p", f"State dict: {remedy.keys}. From {remedy.source}.", class_="quiet"),
        )
        for remedy in found
    ]
    return element("section", element("h2", "Suggested remedy"), parts)


def watched(facts: Facts, verdict: Verdict) -> Markup:
    said = " ".join(f"{line[0].upper()}{sentence(line[1:])}" for line in _watch(facts))
    missing = verdict.unknown or ["Nothing that this report would know of."]
    return element(
        "section",
        element("h2", "What was watched, and what is not known"),
        element("p", said) if said else None,
        element("p", "Not known:"),
        element("ul", [element("li", line) for line in missing]),
    )


def _watch(facts: Facts) -> list[str]:
    read = str(facts.evidence) if facts.evidence.steps else ""
    lines = (facts.coverage, read, sample_in(facts), cost_of(facts) or facts.cadence)
    return [line for line in lines if line]


def cost_of(facts: Facts) -> str:
    """What the watch cost: the whole run with its early readings, and the steady state."""
    if facts.cost is None:
        return ""
    whole = f"the watch cost {share(facts.cost)} of the whole run"
    if facts.steady_cost is None or facts.steady_every is None:
        return whole
    every = "every step" if facts.steady_every == 1 else f"every {facts.steady_every:,} steps"
    once = "" if facts.startup is None else f", and {facts.startup:.2g} s once, at the start"
    steady = f"{share(facts.steady_cost)} when steady, {every}"
    return f"{whole} (early readings included), {steady}{once}"


def about(facts: Facts) -> Markup:
    rows = [
        element("tr", element("th", name, scope="row"), element("td", element("code", value)))
        for name, value in attributes_of(facts).items()
    ]
    return element(
        "section",
        element("h2", "The run"),
        table("What the store says of the run", (("What", ""), ("Value", "")), rows, "attributes"),
    )


def attributes_of(facts: Facts) -> dict[str, str]:
    """Names and values, without those that say nothing."""
    attributes = facts.attributes
    named = {
        "command": " ".join(attributes.command),
        "model": attributes.model,
        "started": "" if facts.started is None else words.moment(facts.started),
        "took": words.duration(facts.seconds) if facts.seconds > 0 else "",
        "continued": count(facts.segments - 1, "time") if facts.segments > 1 else "",
        **{name: version for name, version in attributes.versions.items()},
        **{
            name: str(value)
            for name, value in attributes.more.items()
            if isinstance(value, str | int | float) and name not in ("coverage", "cadence")
        },
    }
    shown = [(brief(name), brief(value)) for name, value in named.items() if value]
    return dict(shown[:MOST_ATTRIBUTES])


def table(
    caption: str, titles: Sequence[tuple[str, str]], rows: Sequence[Markup], name: str
) -> Markup:
    """A table that scrolls by itself where the page is narrow."""
    head = element(
        "tr",
        [element("th", title, scope="col", class_=kind or None) for title, kind in titles],
    )
    return element(
        "div",
        element(
            "table",
            element("caption", caption),
            element("thead", head),
            element("tbody", rows),
        ),
        class_="table",
        role="region",
        tabindex="0",
        aria_label=f"Table: {name}",
    )


def footer() -> Markup:
    return element(
        "footer",
        element("p", f"Written by scaledot {scaledot.__version__}. This page fetches nothing."),
    )


def _steps(facts: Facts) -> Markup:
    if facts.last_step is None:
        return Markup("none")
    return data(facts.last_step, f"{facts.last_step:,}")


def _readings(facts: Facts) -> str:
    if not facts.readings:
        return ""
    return f"the last; {facts.evidence}" if facts.evidence.steps else "the last"


def _number_word(heads: int) -> str:
    names = {1: "head", 2: "two heads", 3: "three heads", 4: "four heads", 5: "five heads"}
    return names.get(heads, f"{heads} heads")
