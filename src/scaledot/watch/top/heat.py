"""The heat map: layers down, heads across. Every cell says by its character what its colour says.

A cell is a number where there is room for it, else a shade. Where even shades do not fit, several
layers or heads share a cell, which shows the worst of them.
"""

import math
from dataclasses import dataclass

import numpy as np
from rich.text import Text

from scaledot.watch.top import health, words
from scaledot.watch.top.frame import Row

LABEL = 20  # most columns for a layer's name
NUMBER, SHADE = 5, 2  # columns of a cell
BELOW, ABOVE = "▼", "▲"
SHADES = "·░▒▓"

# Blue, yellow and red stay apart for almost every eye; the last is the one outside the band.
CALM = ("#3f6fb5", "#5b93c9", "#a3b86c", "#e0c341")
ILL = "bold #ffffff on #b5202a"
UNKNOWN = "dim"


@dataclass(frozen=True)
class Map:
    lines: list[Text]
    pattern: str  # of the layers' names
    layers_a_cell: int
    heads_a_cell: int
    numbers: bool  # cells are numbers, not shades


def draw(rows: list[Row], vital: str, width: int, height: int) -> Map:
    """At most `height` lines of at most `width` columns, the first counts the heads."""
    pattern, names = words.short_layers([row.layer for row in rows])
    heads = max(len(row.numbers) for row in rows)
    layers_a_cell = math.ceil(len(rows) / max(height - 1, 1))
    labels = _block_labels(names, layers_a_cell)
    label = min(LABEL, max(map(len, labels)))
    room = width - label - 1
    cell = next((size for size in (NUMBER, SHADE) if heads * size <= room), 1)
    heads_a_cell = math.ceil(heads / max(room // cell, 1))
    numbers = _pooled(rows, vital, layers_a_cell, heads_a_cell)
    scores = health.badness(numbers, vital)
    flags = health.outside(numbers, vital)
    lines = [_header(label, heads, cell, heads_a_cell)]
    for place, name in enumerate(labels):
        shown = words.cut(name, label, keep_end=True).rjust(label)
        line = Text.assemble((shown, "dim"), " ")
        block = rows[place * layers_a_cell : (place + 1) * layers_a_cell]
        there = math.ceil(max(len(row.numbers) for row in block) / heads_a_cell)
        for column in range(there):
            at = (place, column)
            line.append_text(_cell(numbers[at], scores[at], int(flags[at]), cell))
        lines.append(line)
    return Map(lines, pattern, layers_a_cell, heads_a_cell, cell == NUMBER)


def mark(flag: int) -> str:
    return (" ", ABOVE, BELOW)[flag]


def style(score: float, flag: int) -> str:
    if math.isnan(score):
        return UNKNOWN
    if flag:
        return ILL
    return CALM[_level(score)]


def _cell(number: float, score: float, flag: int, width: int) -> Text:
    if width == NUMBER:
        shown = words.short(number)[: NUMBER - 1]
        return Text(f"{shown:>{NUMBER - 1}}{mark(flag)}", style(score, flag))
    glyph = "-" if math.isnan(score) else mark(flag) if flag else SHADES[_level(score)]
    return Text.assemble((glyph, style(score, flag)), " " * (width - 1))


def _level(score: float) -> int:
    return min(int(min(max(score, 0.0), 1.0) * len(SHADES)), len(SHADES) - 1)


def _pooled(rows: list[Row], vital: str, layers: int, heads: int) -> np.ndarray:
    """[blocks of layers, blocks of heads]: the worst of each block; NaN where there is none."""
    widest = max(len(row.numbers) for row in rows)
    down, across = math.ceil(len(rows) / layers), math.ceil(widest / heads)
    full = np.full((down * layers, across * heads), np.nan)
    for place, row in enumerate(rows):
        full[place, : len(row.numbers)] = row.numbers
    blocks = full.reshape(down, layers, across, heads).swapaxes(1, 2).reshape(down, across, -1)
    scores = np.nan_to_num(health.badness(blocks, vital), nan=-np.inf, neginf=-1e300)
    worst = scores.argmax(-1)[..., None]
    return np.take_along_axis(blocks, worst, -1)[..., 0]


def _block_labels(names: list[str], layers: int) -> list[str]:
    blocks = [names[start : start + layers] for start in range(0, len(names), layers)]
    return [
        block[0] if len(block) == 1 else f"{block[0]} to {block[-1].removeprefix('layer ')}"
        for block in blocks
    ]


def _header(label: int, heads: int, cell: int, heads_a_cell: int) -> Text:
    """The heads' numbers: every one where there is room, else every tenth column."""
    columns = math.ceil(heads / heads_a_cell)
    every = 1 if cell == NUMBER else 5 if cell == SHADE else 10
    line = " " * (label + 1)
    for column in range(0, columns, every):
        name = f"h{column * heads_a_cell}"
        line += f"{name:>{NUMBER - 1}} " if cell == NUMBER else name.ljust(cell * every)
    return Text(line.rstrip(), "dim")
