"""Makes docs/alarms.svg and the tables of docs/alarms.md from the rows of the two CSVs alone.

python benchmarks/alarms/page.py
"""

import html
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import rates
from cadences import PACES
from rates import GRID, Row

from scaledot.bench import drawing
from scaledot.watch.alarms import RULES

ROOT = Path(__file__).parents[2]
CSV = ROOT / "benchmarks" / "results" / "alarms.csv"
LARGE_CSV = CSV.with_name("alarms_large.csv")
PAGE, SVG = ROOT / "docs" / "alarms.md", ROOT / "docs" / "alarms.svg"


class Series(NamedTuple):
    name: str  # of the columns score_... and step_...
    label: str
    light: str
    dark: str
    mark: str
    dash: str = ""


SERIES = (
    Series("rules", "scaledot's collapse rule", "#0969da", "#58a6ff", "disc"),
    Series("max_logit", "max logit", "#bc4c00", "#ffa657", "triangle"),
    Series("entropy", "entropy", "#1a7f37", "#56d364", "square"),
    Series("gradient_norm", "gradient norm", "#8250df", "#d2a8ff", "diamond", "6 3"),
    Series("loss", "loss spike", "#6e7781", "#9da7b3", "cross", "2 3"),
)
WARNERS = (  # rows of the table: column, words
    ("step_warn", "scaledot, warn or act"),
    ("step_act", "scaledot, act"),
    *(
        (f"step_{grade}_{pace.name}{kind}", f"{words}, {pace.words}{more}")
        for pace in PACES
        for kind, more in (("", ""), ("_sampled", ", samples of the batch"))
        for grade, words in (("warn", "warn or act"), ("act", "act"))
    ),
    ("step_rules", "scaledot, rule `collapse` alone"),
    ("step_max_logit", "max logit above 100"),
    ("step_entropy", "a layer's entropy ratio below 0.1"),
    ("step_gradient_norm", "gradient norm 3 x its median"),
    ("step_loss", "loss 0.5 above its lowest"),
)
WIDTH, HEIGHT, LEFT, TOP = 760, 560, 62, 112
SIDE_X, SIDE_Y = 660, 380


def main() -> int:
    rows = rates.read(CSV)
    SVG.write_text(picture(rows), encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8")
    for name, table in TABLES.items():
        text = _filled(text, name, table(rows))
    PAGE.write_text(with_larger_runs(text), encoding="utf-8")
    return 0


def with_larger_runs(text: str) -> str:
    """Nothing is said of them before there are any."""
    section = larger_section(rates.read(LARGE_CSV)) if LARGE_CSV.exists() else ""
    return _filled(text, "larger", section)


def _filled(text: str, name: str, table: str) -> str:
    """Between the marks of this name."""
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if start not in text or end not in text:
        raise ValueError(f"{PAGE} lacks the marks {start} and {end}")
    return re.sub(
        f"{re.escape(start)}.*?{re.escape(end)}",
        lambda _: "\n".join(filter(None, (start, table, end))),
        text,
        flags=re.S,
    )


def runs_table(rows: list[Row]) -> str:
    lines = [
        "| runs | set | sick | between | healthy | learning rates |",
        "|---|---|---|---|---|---|",
    ]
    for family in dict.fromkeys(row["family"] for row in rows):
        mine = [row for row in rows if row["family"] == family]
        counts = [sum(row["label"] == label for row in mine) for label in LABELS]
        each = ", ".join(f"{rate:g}" for rate in sorted({float(row["rate"]) for row in mine}))
        cells = [family, mine[0]["set"], *map(str, counts), each]
        lines.append(f"| {' | '.join(cells)} |")
    totals = [str(sum(row["label"] == label for row in rows)) for label in LABELS]
    lines.append(f"| all {len(rows)} | | {' | '.join(totals)} | |")
    return "\n".join(lines)


LABELS = ("sick", "between", "healthy")


def rates_table(which: str) -> Callable[[list[Row]], str]:
    def table(rows: list[Row]) -> str:
        sick, healthy = rates.labelled(rows, which)
        lines = [
            f"| {which} runs | found, of {len(sick)} sick "
            f"| false alarms, of {len(healthy)} healthy | median lead | least lead |",
            "|---|---|---|---|---|",
        ]
        for column, words in (one for one in WARNERS if one[0] in rows[0]):
            found, false = rates.share(sick, column), rates.share(healthy, column)
            ahead = rates.lead(sick, column)
            least = "" if ahead.least is None else str(ahead.least)
            middle = "" if ahead.median is None else f"{ahead.median:g}"
            cells = (words, _rate(found), _rate(false), middle, least)
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)

    return table


def area_table(rows: list[Row]) -> str:
    sick, healthy = rates.labelled(rows, "judged")
    lines = ["| detector, swept over its threshold | area below the ROC (90 %) |", "|---|---|"]
    for series in SERIES:
        one = rates.curve(sick, healthy, series.name)
        lines.append(
            f"| {series.label} | {one.area:.2f} ({one.area_low:.2f} to {one.area_high:.2f}) |"
        )
    return "\n".join(lines)


def time_table(rows: list[Row]) -> str:
    trainings = sum(int(row["trainings"]) for row in rows)
    seconds = sum(float(row["seconds"]) for row in rows)
    return (
        f"{len(rows)} runs and {trainings - len(rows)} twins. Their training times add up to "
        f"{seconds / 60:.0f} minutes on a core."
    )


def larger_section(rows: list[Row]) -> str:
    """Everything that the page says of the larger runs."""
    parts = (
        LARGER_WORDS.format(**_larger_facts(rows)),
        runs_table(rows),
        rates_table("judged")(rows),
    )
    return "\n\n".join(parts)


LARGER_WORDS = """\
## Larger runs

The same study with models of {weights} million weights: width {width}, {tokens} characters a
sequence, {batch} sequences a step, {steps} steps, bfloat16 autocast, on {device} (torch {torch}).
All of these runs are judged: no threshold was set or changed with one of them in sight, and the
learning rates were chosen before the first. Sick and healthy mean the same as above. {runs} runs
and {twins} twins; their training times add up to {minutes} minutes, several at a time on one GPU.
One row a run in [alarms_large.csv](../benchmarks/results/alarms_large.csv), which
`python benchmarks/alarms/study.py --large` makes.

On a GPU the reading of a step reaches the host some steps later, since nobody waits for it. So the
twins are not clipped from readings, as the small ones are, but by `scaledot.watch.remedies` as it
ships (`qk-clip:30`), which makes the factors of a step's own scores on the device. The alarms are
replayed afterwards, each step with its own reading: in a run they would speak up to 8 steps later
in time, and name the same step. They were not replayed at the default cadence."""


def _larger_facts(rows: list[Row]) -> dict[str, str]:
    trainings = sum(int(row["trainings"]) for row in rows)
    weights = sorted({round(int(row["parameters"]) / 1e6) for row in rows})
    return {
        "weights": " to ".join(str(one) for one in dict.fromkeys((weights[0], weights[-1]))),
        "runs": str(len(rows)),
        "twins": str(trainings - len(rows)),
        "minutes": f"{sum(float(row['seconds']) for row in rows) / 60:.0f}",
        **{name: _values(rows, name) for name in LARGER_FACTS},
    }


LARGER_FACTS = ("width", "tokens", "batch", "steps", "device", "torch")


def _values(rows: list[Row], name: str) -> str:
    return " or ".join(sorted({row[name] for row in rows}))


def rules_table(rows: list[Row]) -> str:
    lines = ["| name | threshold | raises | meaning | source |", "|---|---|---|---|---|"]
    for name, rule in RULES.items():
        cells = (f"`{name}`", f"{rule.threshold:g}", rule.grade or "", rule.meaning, rule.source)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


TABLES: dict[str, Callable[[list[Row]], str]] = {
    "rules": rules_table,
    "runs": runs_table,
    "judged": rates_table("judged"),
    "tuned": rates_table("tuned"),
    "areas": area_table,
    "time": time_table,
}


def _rate(rate: rates.Rate) -> str:
    if not rate.total:
        return ""
    return f"{rate.found} ({rate.value:.0%}; {rate.low:.0%} to {rate.high:.0%})"


def picture(rows: list[Row]) -> str:
    sick, healthy = rates.labelled(rows, "judged")
    body = [*_heading(len(sick), len(healthy)), *_axes()]
    curves = {series: rates.curve(sick, healthy, series.name) for series in SERIES}
    body += [_band(number, curves[series]) for number, series in enumerate(SERIES)]
    for number, series in reversed(list(enumerate(SERIES))):  # ours last: on top
        point = [rates.share(part, f"step_{series.name}").value for part in (healthy, sick)]
        body.append(_line(number, series, curves[series].found, point))
    label = (
        "Share of sick runs found against share of false alarms, for scaledot, max logit, "
        "entropy, gradient norm and loss"
    )
    return drawing.picture((WIDTH, HEIGHT), label, SERIES, body)


def _heading(sick: int, healthy: int) -> list[str]:
    title = "Who notices a sick run, and who cries wolf"
    words = (
        f"{sick} sick and {healthy} healthy runs that set no threshold; bands hold 90 % of "
        "resamples; marks: usual settings."
    )
    out = [f"<text x='24' y='34' class='title'>{html.escape(title)}</text>"]
    out.append(f"<text x='24' y='54' class='note'>{html.escape(words)}</text>")
    x = 24.0
    for number, series in enumerate(SERIES):
        out.append(f"<g class='s{number}'><path d='M{x:.0f} 78h22'{drawing.dash(series.dash)}/>")
        out.append(f"{drawing.mark(series.mark, x + 11, 78)}</g>")
        out.append(f"<text x='{x + 28:.0f}' y='82'>{html.escape(series.label)}</text>")
        x += 28 + 7.2 * len(series.label) + 12  # a little more than letters need
    return out


def _axes() -> list[str]:
    out = []
    for tenth in range(0, 11, 2):
        x, y = _place(tenth / 10, tenth / 10)
        out.append(f"<path class='grid' d='M{LEFT} {y:.1f}h{SIDE_X}M{x:.1f} {TOP}v{SIDE_Y}'/>")
        out.append(f"<text x='{LEFT - 8}' y='{y + 4:.1f}' class='note end'>{tenth * 10} %</text>")
        below = TOP + SIDE_Y + 18
        out.append(f"<text x='{x:.1f}' y='{below}' class='note mid'>{tenth * 10} %</text>")
    middle = LEFT + SIDE_X / 2
    out.append(
        f"<text x='{middle}' y='{TOP + SIDE_Y + 42}' class='note mid'>healthy runs with an alarm"
        "</text>"
    )
    out.append(f"<text x='{LEFT}' y='{TOP - 8}' class='note'>sick runs found</text>")
    return out


def _place(false: float, found: float) -> tuple[float, float]:
    return LEFT + SIDE_X * false, TOP + SIDE_Y * (1 - found)


def _path(false: np.ndarray, found: np.ndarray) -> str:
    places = (_place(a, b) for a, b in zip(false.tolist(), found.tolist(), strict=True))
    return "L".join(f"{x:.1f} {y:.1f}" for x, y in places)


def _band(number: int, curve: rates.Curve) -> str:
    there, back = _path(GRID, curve.high), _path(GRID[::-1], curve.low[::-1])
    return f"<path class='b{number}' d='M{there}L{back}Z'/>"


def _line(number: int, series: Series, found: np.ndarray, point: list[float]) -> str:
    mark = drawing.mark(series.mark, *_place(*point))
    dash = drawing.dash(series.dash)
    return f"<g class='s{number}'><path d='M{_path(GRID, found)}'{dash}/>{mark}</g>"


if __name__ == "__main__":
    sys.exit(main())
