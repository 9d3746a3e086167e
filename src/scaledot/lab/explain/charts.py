"""Plots in text. Each fits the width it is given and has a form for terminals without Unicode."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.text import Text

BLOCKS = " ▁▂▃▄▅▆▇█"
ASCII_BLOCKS = " .:-=+*##"
SHADES = " ░▒▓█"
ASCII_SHADES = " .:+#"
AXIS = 9  # columns for the numbers beside a plot


@dataclass(frozen=True)
class Histogram:
    """Columns over an axis of numbers; the title says what is counted."""

    edges: Sequence[float]
    counts: Sequence[float]
    title: str
    height: int = 7
    style: str = "cyan"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        room = max(min(options.max_width, 100) - 2, 10)
        counts, edges = _merged(self.counts, self.edges, room)
        wide = max(min(room // len(counts), 4), 1)
        blocks = ASCII_BLOCKS if options.ascii_only else BLOCKS
        yield Text(self.title, "bold")
        highest = max(counts) or 1
        for level in range(self.height, 0, -1):
            cells = (_filled(count / highest * self.height - level + 1, blocks) for count in counts)
            yield Text("  " + "".join(cell * wide for cell in cells).rstrip(), self.style)
        line = "-" if options.ascii_only else "─"
        yield Text("  " + line * (wide * len(counts)), "dim")
        yield Text("  " + _ticks(edges, wide * len(counts)), "dim")


@dataclass(frozen=True)
class Curve:
    """Points measured and the line of theory, both axes logarithmic."""

    places: Sequence[float]
    measured: Sequence[float]
    theory: Sequence[float]
    title: str
    here: float | None = None  # the place to mark
    height: int = 9

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        step = max(min((options.max_width - AXIS - 2) // len(self.places), 6), 3)
        point, mark, line = "o@." if options.ascii_only else "●◉·"
        low, high = self._range()
        rows = [[" "] * (step * len(self.places)) for _ in range(self.height)]
        for column in range(step * (len(self.places) - 1) + 1):
            rows[self._row(_between(self.theory, column / step), low, high)][column] = line
        for index, (place, number) in enumerate(zip(self.places, self.measured, strict=True)):
            row = self._row(number, low, high)
            rows[row][index * step] = mark if place == self.here else point
        yield Text(self.title, "bold")
        bar = "|" if options.ascii_only else "│"
        for index, row in enumerate(rows):
            number = high * (low / high) ** (index / (self.height - 1))
            label = f"{number:.3g}" if index % 4 == 0 else ""
            yield Text.assemble(
                (f"{label:>{AXIS - 2}} {bar} ", "dim"), ("".join(row).rstrip(), "cyan")
            )
        names = "".join(f"{place:<{step}g}" for place in self.places if step > 4 or place < 1000)
        yield Text(" " * (AXIS + 1) + names.rstrip(), "dim")

    def _range(self) -> tuple[float, float]:
        low, high = min(self.theory), max(self.theory)
        if high < 2 * low:  # one value up to noise: show it flat
            middle = math.sqrt(low * high)
            low, high = middle / 2, middle * 2
        return low, high

    def _row(self, number: float, low: float, high: float) -> int:
        share = math.log(min(max(number, low), high) / low) / math.log(high / low)
        return round((1 - share) * (self.height - 1))


@dataclass(frozen=True)
class HeatMap:
    """A table of shares of 1: numbers with a shade each where there is room, else shades."""

    rows: Sequence[Sequence[float]]
    names: Sequence[str]
    title: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        shades = ASCII_SHADES if options.ascii_only else SHADES
        label = min(max(map(len, self.names)), 14)
        cell = 9 if (options.max_width - label - 2) // len(self.rows[0]) >= 9 else 3
        yield Text(self.title, "bold")
        yield Text(" " * (label + 2) + "".join(self._head(name, cell) for name in self.names))
        top = max((abs(number) for row in self.rows for number in row), default=1) or 1
        for name, row in zip(self.names, self.rows, strict=True):
            line = Text(f"{name[:label]:>{label}}  ", "dim")
            for number in row:
                level = math.ceil(abs(number) / top * (len(shades) - 1) - 1e-9)
                shade = shades[level] * 2
                line.append(f"{shade}{_short(number):<7}" if cell > 3 else f"{shade} ", "cyan")
            line.rstrip()
            yield line

    def _head(self, name: str, cell: int) -> str:
        return f"{name[: cell - 1]:<{cell}}"


@dataclass(frozen=True)
class Sparkline:
    """A curve in one line, as wide as the table leaves room for."""

    numbers: Sequence[float]
    widest: int = 24

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        width = min(self.widest, options.max_width)
        yield Text(sparkline(self.numbers, width, options.ascii_only), "cyan")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(6, self.widest)


def sparkline(numbers: Sequence[float], width: int, ascii_only: bool = False) -> str:
    """The numbers as one line of bars, from 0 to the largest; a gap where one is not finite."""
    blocks = (ASCII_BLOCKS if ascii_only else BLOCKS)[1:]
    columns = min(width, len(numbers))
    chosen = [numbers[(index + 1) * len(numbers) // columns - 1] for index in range(columns)]
    top = max((number for number in chosen if math.isfinite(number)), default=0.0)
    return "".join(
        blocks[min(int(number / top * len(blocks)), len(blocks) - 1) if top > 0 else 0]
        if math.isfinite(number)
        else " "
        for number in chosen
    )


def _filled(eighths: float, blocks: str) -> str:
    return blocks[round(min(max(eighths, 0.0), 1.0) * (len(blocks) - 1))]


def _between(numbers: Sequence[float], place: float) -> float:
    index = min(int(place), len(numbers) - 2)
    share = place - index
    return numbers[index] ** (1 - share) * numbers[index + 1] ** share


def _merged(
    counts: Sequence[float], edges: Sequence[float], room: int
) -> tuple[list[float], list[float]]:
    """Neighbouring bins added up until they fit the room."""
    each = math.ceil(len(counts) / room)
    starts = range(0, len(counts), each)
    ends = [edges[min(start + each, len(edges) - 1)] for start in starts]
    return [sum(counts[start : start + each]) for start in starts], [edges[0], *ends]


def _ticks(edges: Sequence[float], width: int) -> str:
    """Numbers under the axis: first, last, and as many quarters as fit."""
    line = [" "] * (width + 8)
    free, span = 0, edges[-1] - edges[0]
    for quarter in range(5):
        place = quarter * (len(edges) - 1) // 4
        number = edges[place] if abs(edges[place]) > 1e-6 * span else 0.0  # rounding is no number
        label = f"{number:.3g}"
        start = max(min(place * width // (len(edges) - 1) - len(label) // 2, width - len(label)), 0)
        if start >= free:
            line[start : start + len(label)] = label
            free = start + len(label) + 1
    return "".join(line).rstrip()


def _short(number: float) -> str:
    return f"{number:.3f}" if abs(number) >= 5e-4 or number == 0 else f"{number:.0e}"
