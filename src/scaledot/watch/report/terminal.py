"""The report in a terminal: the verdict, the story, the worst heads and what to type next."""

import os
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from scaledot.printable import one_line, typed
from scaledot.terminal import Console
from scaledot.watch.report.compare import CHANCE, Row
from scaledot.watch.report.facts import Facts, sample_in
from scaledot.watch.report.judged import grouped
from scaledot.watch.report.page import GRADES, SIGNS, cost_of
from scaledot.watch.report.verdict import Verdict
from scaledot.watch.report.words import count, number, sentence
from scaledot.watch.top import curve
from scaledot.watch.top.words import brief

COLOURS = {
    "broken": "red",
    "sick": "red",
    "watch": "yellow",
    "healthy": "green",
    "unknown": "dim",
}
STYLES = {"act": "red", "warn": "yellow"}
WIDEST = 100
SPARK = 16


def show(facts: Facts, verdict: Verdict, console: Console, written: bool = False) -> None:
    """written: the page is there already."""
    width = min(console.width, WIDEST)
    console.print(_headline(facts, verdict), width=width)
    for block in (Text(one_line(" ".join(verdict.sentences))), *_alarms(facts)):
        if block:
            console.print(Text(), block, sep="\n", width=width)
    if facts.worst:
        console.print(Text(), _heads(facts), sep="\n", width=width)
    console.print()
    for line in (_watch(facts), *verdict.unknown):
        console.print(Text(one_line(line), "dim"), width=width)
    if facts.remedies:
        console.print(Text("\nTo try next:"), width=width)
        console.print(Text(f"  {facts.remedies[0].command}", "green"), soft_wrap=True)
    if not written:
        line = f"  scaledot report {typed(_shown(facts.path))} --html report.html"
        console.print(Text("The whole story, with pictures:"), width=width)
        console.print(Text(line, "green"), soft_wrap=True)


def show_two(runs: Sequence[tuple[Facts, Verdict]], rows: Sequence[Row], console: Console) -> None:
    width = min(console.width, WIDEST)
    for letter, (facts, verdict) in zip("AB", runs, strict=True):
        console.print(Text(f"{letter}  "), _headline(facts, verdict), sep="", width=width)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("", "A", "B", "B - A"):
        table.add_column(title, justify="left" if not title else "right", overflow="fold")
    for row in rows:
        table.add_row(row.name, *row.shown)
    console.print(Text(), table, Text(CHANCE, "dim"), sep="\n", width=width)


def _headline(facts: Facts, verdict: Verdict) -> Text:
    return Text.assemble(
        (
            f"{SIGNS[verdict.state]} {verdict.name}{verdict.since}. ",
            f"bold {COLOURS[verdict.state]}",
        ),
        (one_line(verdict.headline), "bold"),
        (f"  ({one_line(facts.name)})", "dim"),
    )


def _alarms(facts: Facts) -> list[Text]:
    """One line for each kind and grade: its first alarm, and how many there are besides."""
    return [
        Text.assemble(
            (f"{GRADES[first.grade]}, step {first.step:,}: ", STYLES[first.grade]),
            one_line(sentence(brief(first.words))),
            (f" (and {count(len(rest), 'further layer')})" if rest else "", "dim"),
        )
        for first, *rest in grouped(facts.alarms)
        if first.grade != "note"
    ]


def _heads(facts: Facts) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("worst heads", "logit", "passes", "left at step", "logit over time"):
        table.add_column(title, justify="left" if title[0] == "w" else "right", overflow="fold")
    for head in facts.worst:
        line = head.curves["max_logit"]
        table.add_row(
            f"{one_line(head.layer) or 'model'} [{head.head}]{' (sink)' if head.sink else ''}",
            number(head.last["max_logit"]),
            number(head.last["passes"]),
            "-" if head.left is None else f"{head.left:,}",
            curve.draw(line.steps, line.numbers, "max_logit", SPARK),
        )
    return table


def _shown(path: str) -> str:
    """As short as it can be typed here."""
    beside = os.path.relpath(path)
    return path if beside.startswith(os.pardir) else beside


def _watch(facts: Facts) -> str:
    parts = [
        facts.coverage,
        f"{facts.evidence}, {count(facts.heads, 'head')} each" if facts.evidence.steps else "",
        sample_in(facts),
        cost_of(facts),
    ]
    return "; ".join(filter(None, parts))
