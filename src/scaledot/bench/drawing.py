"""What the project's line pictures (SVG) have in common: marks, dashes, colours on light and dark.

A line is a group of class s0, s1, ... with marks in it; words have the classes title, name, note.
"""

from collections.abc import Sequence
from typing import Protocol

INK = "#1b1f24", "#59636e", "#d8dee4", "#ffffff"  # words, notes, grid, paper
INK_IN_THE_DARK = "#e6edf3", "#9da7b3", "#30363d", "#0d1117"


class Series(Protocol):
    """How a line is drawn."""

    @property
    def light(self) -> str: ...

    @property
    def dark(self) -> str: ...


def dash(pattern: str) -> str:
    return f" stroke-dasharray='{pattern}'" if pattern else ""


def mark(kind: str, x: float, y: float) -> str:
    """A shape for each line: colour alone does not tell them apart for everybody."""
    if kind in ("disc", "ring"):
        return f"<circle class='{kind}' cx='{x:.1f}' cy='{y:.1f}' r='3.6'/>"
    shape = {
        "square": "m-3.2 -3.2h6.4v6.4h-6.4z",
        "triangle": "m0 -4.4l4 7.2h-8z",
        "diamond": "m0 -4.4l4.4 4.4l-4.4 4.4l-4.4 -4.4z",
        "cross": "m-3.4 -3.4l6.8 6.8m0 -6.8l-6.8 6.8",
    }[kind]
    return f"<path class='{'open' if kind == 'cross' else 'disc'}' d='M{x:.1f} {y:.1f}{shape}'/>"


def picture(
    size: tuple[int, int], label: str, lines: Sequence[Series], body: Sequence[str], more: str = ""
) -> str:
    """label: for who does not see it; more: rules of style besides those of every picture."""
    width, height = size
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' role='img' "
        f"aria-label='{label}'>\n"
        f"<style>{_style(lines, more)}</style>\n"
        f"<rect class='page' width='{width}' height='{height}'/>\n" + "\n".join(body) + "\n</svg>\n"
    )


def _style(lines: Sequence[Series], more: str) -> str:
    """Paper and ink change together, so that either reads well wherever the picture lies."""
    light = _colours(*INK, [line.light for line in lines])
    dark = _colours(*INK_IN_THE_DARK, [line.dark for line in lines])
    return (
        "text{font-family:ui-sans-serif,system-ui,sans-serif;font-size:13px}"
        ".title{font-size:18px;font-weight:600}.name{font-weight:600}.note{font-size:12px}"
        ".end{text-anchor:end}.mid{text-anchor:middle}path{fill:none}g{stroke-width:2}"
        f"{more}{light}@media (prefers-color-scheme:dark){{{dark}}}"
    )


def _colours(ink: str, faint: str, grid: str, page: str, lines: Sequence[str]) -> str:
    drawn = "".join(
        f".s{number}{{stroke:{colour}}}.s{number} .disc{{fill:{colour}}}"
        f".b{number}{{fill:{colour};fill-opacity:.08}}"
        for number, colour in enumerate(lines)
    )
    return (
        f".page,.ring{{fill:{page}}}text{{fill:{ink}}}.note{{fill:{faint}}}"
        f".grid{{stroke:{grid}}}.plain{{stroke:{faint}}}{drawn}"
    )
