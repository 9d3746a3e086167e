"""Draws docs/race.svg, how fast each scaling rule learns, from the rows of a CSV alone.

python docs/race.py [benchmarks/results/race.csv]

Above: steps to 90 % accuracy against d_k, each rule at its own best rate. Below: the same against
the rate, at one d_k. A mark is the median over the seeds that got there, the bar their range; no
mark: fewer than half of the seeds did.
"""

import html
import math
import pathlib
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from scaledot.bench import drawing
from scaledot.lab.study import rows as records
from scaledot.lab.study import summary
from scaledot.lab.study.rows import RaceRow

DOCS = pathlib.Path(__file__).parent
CSV, SVG = DOCS.parent / "benchmarks" / "results" / "race.csv", DOCS / "race.svg"


class Series(NamedTuple):
    """One line of each panel, and how it is drawn."""

    rule: str
    label: str
    light: str
    dark: str
    mark: str
    dash: str = ""


SERIES = (
    Series("none", "no scaling", "#bc4c00", "#ffa657", "triangle"),
    Series("sqrt_dk", "sqrt(d_k)", "#0969da", "#58a6ff", "disc"),
    Series("dk", "d_k", "#1a7f37", "#56d364", "square"),
    Series("sqrt_dmodel", "sqrt(d_model), 8 heads", "#8250df", "#d2a8ff", "diamond"),
    Series("cosine", "cosine, learned temperature", "#6e7781", "#9da7b3", "ring", "5 3"),
)

# The page, then one panel, in units of the picture.
WIDTH, LEFT, TOP = 920, 62, 132
PANEL, HEIGHT, GAP_X, GAP_Y = 396, 190, 50, 80
SHOWN_WIDTH = 64  # d_k of the panels below
FLOOR = 20  # steps: the first mean there is

STYLE = ".bar{stroke-width:1}"
Points = dict[float, tuple[float, float, float]]  # place -> median, lowest, highest


def picture(rows: Sequence[RaceRow]) -> str:
    if not rows:
        raise ValueError("no rows; make some with python -m scaledot.lab.study --device cuda")
    optimizers = list(dict.fromkeys(row.optimizer for row in rows))
    top = max(row.steps for row in rows)
    body = _heading(rows)
    for column, optimizer in enumerate(optimizers):
        chosen = [row for row in rows if row.optimizer == optimizer]
        x = LEFT + column * (PANEL + GAP_X)
        name = {"sgd": "SGD", "adam": "Adam"}.get(optimizer, optimizer)
        widths = sorted({float(row.d_k) for row in chosen})
        body += _panel(
            x, TOP, f"{name}, best rate of each rule, against d_k", widths, _by_width(chosen), top
        )
        narrow = [row for row in chosen if row.d_k == SHOWN_WIDTH]
        rates = sorted({row.rate for row in narrow})
        title = f"{name}, d_k = {SHOWN_WIDTH}, against the learning rate"
        body += _panel(x, TOP + HEIGHT + GAP_Y, title, rates, _by_rate(narrow), top)
    height = TOP + 2 * (HEIGHT + GAP_Y)
    body.append(
        f"<text x='24' y='{height - 24}' class='note'>No mark: fewer than half of the seeds got "
        "to 90 %. Both axes are logarithmic.</text>"
    )
    label = (
        "Steps to 90 % accuracy for five scaling rules, against d_k at the best learning rate "
        "of each and against the learning rate"
    )
    return drawing.picture((WIDTH, height), label, SERIES, body, STYLE)


def _by_width(rows: Iterable[RaceRow]) -> dict[str, Points]:
    found: dict[str, Points] = {}
    for best in summary.best_rates(rows):
        if 2 * best.reached >= best.seeds and best.steps_median is not None:
            assert best.steps_low is not None
            assert best.steps_high is not None
            spread = (best.steps_median, float(best.steps_low), float(best.steps_high))
            found.setdefault(best.rule, {})[float(best.d_k)] = spread
    return found


def _by_rate(rows: Iterable[RaceRow]) -> dict[str, Points]:
    cells: dict[tuple[str, float], list[RaceRow]] = {}
    for row in rows:
        cells.setdefault((row.rule, row.rate), []).append(row)
    found: dict[str, Points] = {}
    for (rule, rate), members in cells.items():
        steps = [float(row.steps_to_90) for row in members if row.steps_to_90 is not None]
        if steps and 2 * len(steps) >= len(members):
            found.setdefault(rule, {})[rate] = (records.median(steps), min(steps), max(steps))
    return found


def _heading(rows: Sequence[RaceRow]) -> list[str]:
    first = rows[0]
    seeds = len({row.seed for row in rows})
    words = (
        f"Associative recall of 16 pairs; median and range of {seeds} seeds, {first.steps} steps "
        f"at most. {len(rows)} runs on {first.device}, torch {first.torch}."
    )
    out = ["<text x='24' y='34' class='title'>Steps to 90 % accuracy</text>"]
    out.append(f"<text x='24' y='54' class='note'>{html.escape(words)}</text>")
    x = 24.0
    for number, series in enumerate(SERIES):
        out.append(f"<g class='s{number}'><path d='M{x:.0f} 78h22'{drawing.dash(series.dash)}/>")
        out.append(f"{drawing.mark(series.mark, x + 11, 78)}</g>")
        out.append(f"<text x='{x + 28:.0f}' y='82'>{series.label}</text>")
        x += 28 + 6.6 * len(series.label) + 22  # a little more than letters need
    return out


def _panel(
    x: float, y: float, title: str, places: list[float], lines: dict[str, Points], top: float
) -> list[str]:
    out = [f"<text x='{x}' y='{y - 10}' class='name'>{html.escape(title)}</text>"]
    for steps in _levels(top):
        level = _down(y, steps, top)
        out.append(f"<path class='grid' d='M{x} {level:.1f}h{PANEL}'/>")
        out.append(f"<text x='{x - 8}' y='{level + 4:.1f}' class='note end'>{steps:g}</text>")
    for place in places:
        across = _across(x, place, places)
        out.append(
            f"<text x='{across:.1f}' y='{y + HEIGHT + 18}' class='note mid'>{place:g}</text>"
        )
    for number, series in enumerate(SERIES):
        out += _line(x, y, number, series, lines.get(series.rule, {}), places, top)
    return out


def _line(
    x: float, y: float, number: int, series: Series, points: Points, places: list[float], top: float
) -> list[str]:
    if not points:
        return []
    aside = 3.0 * (number - (len(SERIES) - 1) / 2)  # so that bars of equal medians stay apart
    drawn = []
    for place, (middle, low, high) in sorted(points.items()):
        across = _across(x, place, places) + aside
        drawn.append((across, *(_down(y, steps, top) for steps in (middle, low, high))))
    path = "L".join(f"{across:.1f} {down:.1f}" for across, down, _, _ in drawn)
    bars = "".join(f"M{across:.1f} {low:.1f}V{high:.1f}" for across, _, low, high in drawn)
    marks = "".join(drawing.mark(series.mark, across, down) for across, down, _, _ in drawn)
    return [
        f"<g class='s{number}'><path d='M{path}'{drawing.dash(series.dash)}/>"
        f"<path class='bar' d='{bars}'/>{marks}</g>"
    ]


def _levels(top: float) -> list[float]:
    return [steps for steps in (20, 50, 100, 200, 500, 1000, 2000, 5000) if steps <= top]


def _down(y: float, steps: float, top: float) -> float:
    """Steps grow by factors, so the scale is logarithmic."""
    share = math.log(max(steps, FLOOR) / FLOOR) / math.log(max(top, 2 * FLOOR) / FLOOR)
    return y + HEIGHT * (1 - share)


def _across(x: float, place: float, places: list[float]) -> float:
    """Widths and rates grow by factors, so their places are even."""
    return x + PANEL * (places.index(place) + 0.5) / len(places)


if __name__ == "__main__":
    source = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else CSV
    SVG.write_text(picture(records.read(source, RaceRow)), encoding="utf-8")
