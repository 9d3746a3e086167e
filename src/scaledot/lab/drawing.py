"""What every lesson is drawn with: tables, bars, verdicts, and numbers as a person writes them."""

from collections.abc import Iterator
from decimal import Decimal

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from scaledot.lab import words
from scaledot.lab.experiments.finding import Finding, Numbers


def spoken(findings: tuple[Finding, ...], lesson: object) -> list[RenderableType]:
    return [_said(finding, lesson) for finding in findings]


def _said(finding: Finding, lesson: object) -> RenderableType:
    """The claim in quotes, the verdict, and why."""
    claim = Text(f"“{words.claim(finding, lesson)}”", "italic")
    return _beside(verdict(finding), claim, words.why(finding, lesson))


def reason(finding: Finding, lesson: object) -> RenderableType:
    """The verdict and why, where a table has already shown the claim."""
    return _beside(verdict(finding), words.why(finding, lesson))


def _beside(mark: RenderableType, *lines: RenderableType) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(min_width=11, no_wrap=True)
    grid.add_column()
    for line in lines:
        grid.add_row(mark, line)
        mark = ""
    return grid


def verdict(finding: Finding) -> Text:
    if finding.agree:
        return Text("✓ agrees", "bold green")
    word = words.verdict(finding)
    return Text("✗ wrong", "bold red") if word == "wrong" else Text(f"~ {word}", "bold yellow")


def table(*columns: str) -> Table:
    """A table with a column for each name; `>` in front of a name aligns it to the right."""
    empty = Table(box=box.SIMPLE_HEAD, show_edge=False, header_style="cyan", padding=(0, 1, 0, 0))
    for name in columns:
        justify = "right" if name.startswith(">") else "left"
        empty.add_column(name.removeprefix(">"), justify=justify, no_wrap=True)
    return empty


class Bar:
    """A share of 1 as a bar, in eighths of a cell; in whole cells where only ASCII prints."""

    def __init__(self, share: float, width: int, style: str = "cyan") -> None:
        self.share = min(max(share, 0.0), 1.0)
        self.width = width
        self.style = style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        width = min(self.width, options.max_width)
        if options.ascii_only:
            yield Text("#" * round(self.share * width), self.style)
            return
        full, eighths = divmod(round(self.share * width * 8), 8)
        yield Text("█" * full + " ▏▎▍▌▋▊▉"[eighths].strip(), self.style)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(8, self.width), self.width)


def one(numbers: Numbers | None) -> float:
    """Where a finding holds one number."""
    assert isinstance(numbers, (int, float))
    return numbers


def several(numbers: Numbers | None) -> tuple[float, ...]:
    """Where a finding holds a row of them."""
    assert isinstance(numbers, tuple)
    return numbers


def as_vector(numbers: tuple[float, ...]) -> str:
    return f"[{', '.join(f'{number:g}' for number in numbers)}]"


def as_plain(number: float) -> str:
    """As a person would type it: 0.00004, not 4e-05."""
    return f"{Decimal(f'{number:.6g}'):f}"


def as_weight(weight: float) -> str:
    rest = 1 - weight
    return f"1 - {rest:.2e}" if 0 < rest < 1e-6 else f"{weight:.{7 if rest < 1e-3 else 6}g}"


def as_exponential(power: float) -> str:
    return f"{power:.3g}" if power < 1000 or power >= 1e7 else f"{power:,.0f}"


def as_share(share: float) -> str:
    if 0 < share < 5e-4:
        return "<0.1%"
    return f"{share:.1%}" if share else "-"


def as_small(number: float) -> str:
    return f"{number:.1e}" if 0 < abs(number) < 1e-3 else as_four(number)


def as_four(number: float) -> str:
    """Four digits: decimals below 1, significant from there on."""
    if number == 0:
        return "0"
    return f"{number:#.4g}".rstrip(".") if abs(number) >= 1 else f"{number:.4f}"
