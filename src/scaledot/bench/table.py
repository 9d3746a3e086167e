"""Rows as a table: drawn in a terminal, or as markdown."""

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from scaledot.bench.bars import Quantity
from scaledot.bench.gate import Check
from scaledot.bench.provenance import Origin
from scaledot.bench.results import Row

COLUMNS = (
    "case",
    "shape",
    "causal",
    "ours",
    "peer's",
    "peer",
    "measured",
    "bar",
    "goal",
    "verdict",
)
TO_THE_RIGHT = {"ours", "peer's", "measured", "bar", "goal"}
ROOMY = 175  # columns: from here on a terminal also gets the quantiles
STYLES = {"pass": "green", "goal": "bold green", "falls short": "bold red", "reported": "dim"}


def as_rich(rows: Sequence[Row], width: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in COLUMNS:
        justify = "right" if column in TO_THE_RIGHT else "left"
        table.add_column(column, justify=justify, no_wrap=width >= ROOMY)
    for row in rows:
        *cells, last = _cells(row, roomy=width >= ROOMY)
        table.add_row(*cells, Text(last, STYLES[last]))
    return table


def as_markdown(rows: Sequence[Row]) -> str:
    """With one line below for each origin of the rows."""
    rules = ["---:" if column in TO_THE_RIGHT else "---" for column in COLUMNS]
    lines = [COLUMNS, rules, *(_cells(row, roomy=True) for row in rows)]
    origins = dict.fromkeys(_origin(row) for row in rows)
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", *origins])


def verdict(row: Row) -> str:
    if row.holds is None:
        return "reported"
    if not row.holds:
        return "falls short"
    return "goal" if row.goal is not None and row.goal.holds(row.measured) else "pass"


def heading(origin: Origin) -> Text:
    """Who measures; and a warning where others are at work on the same cores."""
    text = Text(
        f"scaledot {origin.scaledot} ({origin.commit}), torch {origin.torch}, Python "
        f"{origin.python}, {origin.machine}, {origin.cores} cores, {origin.threads} threads"
    )
    if origin.load > origin.cores / 2:
        text.append(
            f"\nload {origin.load:g} on {origin.cores} cores: other work is running, expect noise",
            "yellow",
        )
    return text


def gate_verdict(checks: Sequence[Check]) -> Text | Table:
    """One line where all is well, else every comparison that is not."""
    red = [check for check in checks if not check.holds]
    if not red:
        worst = max((check.used for check in checks), default=0.0)
        words = f"gate: {len(checks)} comparisons with float64 hold, the worst at {worst:.0%} of"
        return Text(f"{words} its bound", "green")
    table = Table("function", "shape", "causal", "field", "error", "allowed", box=box.SIMPLE_HEAD)
    table.title = "The gate is red: nothing is timed"
    for check in red:
        causal = "yes" if check.causal else "no"
        error, bound = f"{check.error:.3g}", f"{check.bound:.3g}"
        table.add_row(check.contender, check.shape, causal, check.field, error, bound)
    return table


def _cells(row: Row, *, roomy: bool) -> list[str]:
    return [
        row.case,
        row.shape,
        "yes" if row.causal else "no",
        _amount(row.ours_median, row.ours_p20, row.ours_p80, row.unit, roomy),
        _amount(row.peer_median, row.peer_p20, row.peer_p80, row.unit, roomy),
        row.peer,
        _measured(row),
        str(row.bar or ""),
        str(row.goal or ""),
        verdict(row),
    ]


def _amount(median: float, p20: float, p80: float, unit: str, roomy: bool) -> str:
    quantiles = f" ({_digits(p20)} to {_digits(p80)})" if roomy else ""
    return f"{_digits(median)} {unit}{quantiles}"


def _digits(number: float) -> str:
    """Three digits, never as a power of ten."""
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.3g}"


def _measured(row: Row) -> str:
    if row.quantity == Quantity.EXTRA_MICROSECONDS:
        return f"{row.measured:+.1f} us"
    return f"{_digits(row.measured)}x{' faster' * (row.quantity == Quantity.SPEEDUP)}"


def _origin(row: Row) -> str:
    return (
        f"{row.date}, commit {row.commit}, {row.machine}, {row.cores} cores, {row.threads} "
        f"threads, {row.dtype}, torch {row.torch}, Python {row.python}. Medians (p20 to p80)."
    )
