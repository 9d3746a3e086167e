"""docs/scaling.svg: efficiency over the number of GPUs, from the rows of the CSV alone."""

import html
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.scaling.rows import Row
from scaledot.bench import drawing


class Series(NamedTuple):
    """One sequence length, and how it is drawn."""

    tokens: int
    label: str
    light: str
    dark: str
    mark: str


SERIES = (
    Series(131_072, "128k tokens", "#bc4c00", "#ffa657", "triangle"),
    Series(1_048_576, "1M tokens", "#0969da", "#58a6ff", "disc"),
    Series(10_485_760, "10M tokens", "#1a7f37", "#56d364", "square"),
)

# The page, then one panel, in units of the picture.
WIDTH, LEFT, TOP = 920, 62, 132
PANEL, HEIGHT, GAP = 396, 240, 50
NODE = 8  # the last place where all links are NVLink

STYLE = ".thin{stroke-width:1.4}"
Points = dict[int, float]  # GPUs -> efficiency


def picture(rows: Sequence[Row]) -> str:
    chosen = [row for row in rows if row.question == "strong"]
    if not chosen:
        raise ValueError("no rows; make them with: python -m benchmarks.scaling")
    ranks = sorted({row.ranks for row in chosen})
    body = _heading(chosen[0])
    for column, direction in enumerate(("forward", "backward")):
        x = LEFT + column * (PANEL + GAP)
        body += _axes(x, f"{direction.capitalize()} pass", ranks)
        for number, series in enumerate(SERIES):
            for form, kind in (("double_ring", "model"), ("ring", "simulated")):
                points = _points(chosen, series.tokens, direction, form, kind)
                body += _line(x, number, series.mark, points, ranks, dashed=form == "double_ring")
    height = TOP + HEIGHT + 66
    body.append(
        f"<text x='24' y='{height - 18}' class='note'>GPUs, in nodes of eight. Computed from "
        "measured kernel speeds and assumed links: docs/scaling.md says which.</text>"
    )
    label = (
        "Efficiency of ring attention against the number of GPUs for sequences of 128k, 1M "
        "and 10M tokens, forward and backward"
    )
    return drawing.picture((WIDTH, height), label, SERIES, body, STYLE)


def _points(rows: Sequence[Row], tokens: int, direction: str, form: str, kind: str) -> Points:
    wanted = (tokens, direction, form, kind)
    return {
        row.ranks: row.efficiency
        for row in rows
        if (row.tokens, row.direction, row.form, row.kind) == wanted and row.efficiency is not None
    }


def _heading(row: Row) -> list[str]:
    words = (
        f"Share of the speed of as many GPUs without messages; causal, zigzag, bfloat16, "
        f"{row.heads} query heads, {row.groups} key heads, d = {row.width}."
    )
    out = ["<text x='24' y='34' class='title'>Ring attention: where it stops scaling</text>"]
    out.append(f"<text x='24' y='54' class='note'>{html.escape(words)}</text>")
    x = 24.0
    for number, series in enumerate(SERIES):
        out.append(f"<g class='s{number}'><path d='M{x:.0f} 78h22'/>")
        out.append(f"{drawing.mark(series.mark, x + 11, 78)}</g>")
        out.append(f"<text x='{x + 28:.0f}' y='82'>{series.label}</text>")
        x += 140
    out.append(f"<g class='plain'><path d='M{x:.0f} 78h22' stroke-dasharray='5 3'/></g>")
    words = "the same as a ring of nodes around rings inside"
    out.append(f"<text x='{x + 28:.0f}' y='82'>{words}</text>")
    return out


def _axes(x: float, title: str, ranks: list[int]) -> list[str]:
    out = [f"<text x='{x}' y='{TOP - 12}' class='name'>{title}</text>"]
    for percent in (0, 25, 50, 75, 100):
        level = _down(percent / 100)
        out.append(f"<path class='grid' d='M{x} {level:.1f}h{PANEL}'/>")
        out.append(f"<text x='{x - 8}' y='{level + 4:.1f}' class='note end'>{percent} %</text>")
    for number in ranks:
        place = _across(x, number, ranks)
        out.append(
            f"<text x='{place:.1f}' y='{TOP + HEIGHT + 18}' class='note mid'>{number}</text>"
        )
    border = (_across(x, NODE, ranks) + _across(x, 2 * NODE, ranks)) / 2
    out.append(f"<path class='grid' stroke-dasharray='2 3' d='M{border:.1f} {TOP}v{HEIGHT}'/>")
    out.append(f"<text x='{border + 5:.1f}' y='{TOP + HEIGHT - 6}' class='note'>network</text>")
    return out


def _line(
    x: float, number: int, mark: str, points: Points, ranks: list[int], *, dashed: bool
) -> list[str]:
    places = [(_across(x, r, ranks), _down(share)) for r, share in sorted(points.items())]
    path = "L".join(f"{across:.1f} {down:.1f}" for across, down in places)
    if dashed:
        return [f"<g class='s{number} thin'><path d='M{path}' stroke-dasharray='5 3'/></g>"]
    marks = "".join(drawing.mark(mark, across, down) for across, down in places)
    return [f"<g class='s{number}'><path d='M{path}'/>{marks}</g>"]


def _across(x: float, number: int, ranks: list[int]) -> float:
    """GPUs grow by factors, so their places are even."""
    return x + PANEL * (ranks.index(number) + 0.5) / len(ranks)


def _down(share: float) -> float:
    return TOP + HEIGHT * (1 - share)
