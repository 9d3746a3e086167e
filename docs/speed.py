"""Draws docs/speed.svg, TFLOP/s against length for each head width, from the rows of a CSV alone.

python docs/speed.py [benchmarks/results/gpu.csv]
"""

import html
import pathlib
import sys
from collections.abc import Iterable
from typing import NamedTuple

from scaledot.bench import drawing, results

DOCS = pathlib.Path(__file__).parent
CSV, SVG = DOCS.parent / "benchmarks" / "results" / "gpu.csv", DOCS / "speed.svg"


class Series(NamedTuple):
    """One line of each panel: the side of the case whose speed it is, and how it is drawn."""

    label: str
    case: str
    side: str
    light: str
    dark: str
    mark: str
    dash: str = ""


SERIES = (
    Series("scaledot", "own_cudnn", "ours", "#0969da", "#58a6ff", "disc"),
    Series("scaledot with vitals", "vitals_cost", "ours", "#0969da", "#58a6ff", "ring", "5 3"),
    Series("FlashAttention-4", "own_fa4", "peer", "#bc4c00", "#ffa657", "triangle"),
    Series("cuDNN", "own_cudnn", "peer", "#1a7f37", "#56d364", "square"),
    Series("FlexAttention", "triton_flex", "peer", "#8250df", "#d2a8ff", "cross"),
    Series("FlashAttention-2", "own_flash", "peer", "#6e7781", "#9da7b3", "diamond"),
)

# The page, then one panel, in units of the picture.
WIDTH, LEFT, TOP = 920, 62, 122
PANEL, HEIGHT, GAP_X, GAP_Y = 254, 190, 30, 62
STEP = 200  # TFLOP/s between two lines of the grid

Points = dict[int, float]  # length -> TFLOP/s


def _with_all_peers(rows: list[results.Row]) -> list[results.Row]:
    """Without later runs that lacked FlashAttention-4: its line and ours are of one run."""
    commits = [row.commit for row in rows if row.case == "own_fa4"]
    while commits and rows[-1].commit != commits[-1]:
        rows = rows[:-1]
    return rows


def picture(rows: Iterable[results.Row]) -> str:
    rows = results.latest(_with_all_peers(list(rows)))
    speeds = {(series, *cell): points for series in SERIES for cell, points in _of(series, rows)}
    if not speeds:
        raise ValueError("no row has the speed of a GPU; make some with `scaledot bench --gpu`")
    widths = sorted({width for _, width, _ in speeds})
    maskings = sorted({causal for _, _, causal in speeds})
    lengths = sorted({length for points in speeds.values() for length in points})
    top = STEP * -(-max(max(points.values()) for points in speeds.values()) // STEP)
    body = [*_heading(rows, [s for s in SERIES if any(key[0] is s for key in speeds)])]
    for row, causal in enumerate(maskings):
        for column, width in enumerate(widths):
            x, y = LEFT + column * (PANEL + GAP_X), TOP + row * (HEIGHT + GAP_Y)
            title = f"d = {width}, {'causal' if causal else 'all keys'}"
            body += _axes(x, y, title, lengths, top, labelled=column == 0)
            for series in reversed(SERIES):  # ours last: on top
                points = speeds.get((series, width, causal), {})
                body += _line(x, y, SERIES.index(series), series, points, lengths, top)
    height = TOP + len(maskings) * (HEIGHT + GAP_Y)
    label = (
        "TFLOP/s of the forward pass against sequence length, scaledot beside cuDNN, "
        "FlashAttention and FlexAttention"
    )
    return drawing.picture((WIDTH, height), label, SERIES, body)


def _of(series: Series, rows: list[results.Row]) -> list[tuple[tuple[int, bool], Points]]:
    """What the series shows: for each head width, causal or not, its points."""
    cells: dict[tuple[int, bool], Points] = {}
    for row in rows:
        speed = row.ours_tflops if series.side == "ours" else row.peer_tflops
        if row.case == series.case and speed is not None:
            _, _, length, width = map(int, row.shape.split("x"))
            cells.setdefault((width, row.causal), {})[length] = speed
    return list(cells.items())


def _heading(rows: list[results.Row], shown: list[Series]) -> list[str]:
    last = max(rows, key=lambda row: row.date)
    cases = {series.case for series in shown}
    drawn = sorted((row for row in rows if row.case in cases), key=lambda row: row.date)
    commits = ", ".join(dict.fromkeys(row.commit for row in drawn))  # cells are measured apart
    title = f"Forward pass on one {last.gpu}, TFLOP/s"
    words = (
        f"By sequence length; bfloat16, 16k tokens in all, H·D = 2048; torch {last.torch}, "
        f"cuDNN {last.cudnn}, triton {last.triton}; commits {commits}."
    )
    out = [f"<text x='24' y='34' class='title'>{html.escape(title)}</text>"]
    out.append(f"<text x='24' y='54' class='note'>{html.escape(words)}</text>")
    x = 24.0
    for series in shown:
        number = SERIES.index(series)
        out.append(f"<g class='s{number}'><path d='M{x:.0f} 74h22'{drawing.dash(series.dash)}/>")
        out.append(f"{drawing.mark(series.mark, x + 11, 74)}</g>")
        out.append(f"<text x='{x + 28:.0f}' y='78'>{series.label}</text>")
        x += 28 + 7.2 * len(series.label) + 24  # a little more than letters need
    return out


def _axes(
    x: float, y: float, title: str, lengths: list[int], top: float, *, labelled: bool
) -> list[str]:
    out = [f"<text x='{x}' y='{y - 8}' class='name'>{title}</text>"]
    for speed in range(0, int(top) + 1, STEP):
        level = y + HEIGHT * (1 - speed / top)
        out.append(f"<path class='grid' d='M{x} {level:.1f}h{PANEL}'/>")
        if labelled:
            out.append(f"<text x='{x - 8}' y='{level + 4:.1f}' class='note end'>{speed}</text>")
    for length in lengths:
        words = f"{length // 1024}k" if length % 1024 == 0 else str(length)
        place = _across(x, length, lengths)
        out.append(f"<text x='{place:.1f}' y='{y + HEIGHT + 18}' class='note mid'>{words}</text>")
    return out


def _line(
    x: float, y: float, number: int, series: Series, points: Points, lengths: list[int], top: float
) -> list[str]:
    if not points:
        return []
    places = [
        (_across(x, length, lengths), y + HEIGHT * (1 - speed / top))
        for length, speed in sorted(points.items())
    ]
    path = "L".join(f"{across:.1f} {down:.1f}" for across, down in places)
    marks = "".join(drawing.mark(series.mark, across, down) for across, down in places)
    return [f"<g class='s{number}'><path d='M{path}'{drawing.dash(series.dash)}/>{marks}</g>"]


def _across(x: float, length: int, lengths: list[int]) -> float:
    """Lengths grow by factors, so their places are even."""
    return x + PANEL * (lengths.index(length) + 0.5) / len(lengths)


if __name__ == "__main__":
    source = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else CSV
    SVG.write_text(picture(results.read(source)), encoding="utf-8")
