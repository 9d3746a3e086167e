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
ROOMY_ON_GPU = 220  # speeds and reasons take more of them
STYLES = {
    "pass": "green",
    "goal": "bold green",
    "falls short": "bold red",
    "reported": "dim",
    "not there": "yellow",
}


def as_rich(rows: Sequence[Row], width: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    on_gpu = any(row.gpu for row in rows)
    roomy = width >= (ROOMY_ON_GPU if on_gpu else ROOMY)
    for column in COLUMNS:
        justify = "right" if column in TO_THE_RIGHT else "left"
        may_be_long = on_gpu and column == "measured"  # why somebody is not there
        table.add_column(column, justify=justify, no_wrap=roomy and not may_be_long)
    for row in rows:
        *cells, last = _cells(row, roomy=roomy)
        table.add_row(*cells, Text(last, STYLES[last]))
    return table


def summary(rows: Sequence[Row]) -> Table:
    """One line a case where a table has hundreds: how many bars hold, and how far it reaches."""
    names = ("case", "bars", "hold", "fall short", "not there", "goals", "from", "to")
    table = Table(*names, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for case in dict.fromkeys(row.case for row in rows):
        own = [row for row in rows if row.case == case]
        verdicts = [verdict(row) for row in own]
        short = sum(row.holds is False for row in own)
        measured = sorted((row for row in own if row.measured is not None), key=_reached)
        table.add_row(
            case,
            str(sum(row.bar is not None for row in own)),
            str(sum(row.holds is True for row in own)),
            Text(str(short), STYLES["falls short"] if short else ""),
            str(verdicts.count("not there")),
            f"{verdicts.count('goal')} of {sum(row.goal is not None for row in own)}",
            *((_measured(measured[0]), _measured(measured[-1])) if measured else ("", "")),
        )
    return table


def as_markdown(rows: Sequence[Row]) -> str:
    """With one line below for each origin of the rows."""
    rules = ["---:" if column in TO_THE_RIGHT else "---" for column in COLUMNS]
    lines = [COLUMNS, rules, *(_cells(row, roomy=True) for row in rows)]
    origins = dict.fromkeys(_origin(row) for row in rows)
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", *origins])


def verdict(row: Row) -> str:
    if row.measured is None:
        return "not there"
    if row.holds is False:
        return "falls short"
    if row.goal is not None and row.goal.holds(row.measured):
        return "goal"
    return "reported" if row.holds is None else "pass"


def heading(origin: Origin) -> Text:
    """Who measures; and a warning where others are at work on the same cores."""
    text = Text(
        f"scaledot {origin.scaledot} ({origin.commit}), torch {origin.torch}, Python "
        f"{origin.python}, {origin.machine}, {origin.cores} cores, {origin.threads} threads"
    )
    if origin.gpu:
        text.append(f"\n{_gpu(origin)}")
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
        _amount(row, "ours", roomy),
        _amount(row, "peer", roomy),
        row.peer,
        _measured(row),
        str(row.bar or ""),
        str(row.goal or ""),
        verdict(row),
    ]


def _amount(row: Row, side: str, roomy: bool) -> str:
    median, p20, p80, tflops = (
        getattr(row, f"{side}_{what}") for what in ("median", "p20", "p80", "tflops")
    )
    if median is None:
        return ""
    quantiles = f" ({_digits(p20)} to {_digits(p80)})" if roomy else ""
    speed = f", {tflops:.0f} TFLOP/s" if row.gpu and tflops else ""
    return f"{_digits(median)} {row.unit}{quantiles}{speed}"


def _digits(number: float) -> str:
    """Three digits, never as a power of ten."""
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.3g}"


def _reached(row: Row) -> float:
    return 0.0 if row.measured is None else row.measured


def _measured(row: Row) -> str:
    if row.measured is None:
        return f"not there: {row.note}"
    if row.quantity == Quantity.EXTRA_MICROSECONDS:
        return f"{row.measured:+.1f} us"
    if row.quantity == Quantity.EXTRA_BYTES:
        return f"{row.measured:+.1f} B/row"
    if row.quantity == Quantity.SPEED:
        return f"{row.measured:.3f}x"
    return f"{_digits(row.measured)}x{' faster' * (row.quantity == Quantity.SPEEDUP)}"


def _gpu(origin: Origin | Row) -> str:
    return (
        f"{origin.gpu}, driver {origin.driver}, CUDA {origin.cuda}, cuDNN {origin.cudnn}, "
        f"triton {origin.triton}, flash-attn-4 {origin.flash_attn_4}"
    )


def _origin(row: Row) -> str:
    gpu = f" {_gpu(row)}." if row.gpu else ""
    return (
        f"{row.date}, commit {row.commit}, {row.machine}, {row.cores} cores, {row.threads} "
        f"threads, {row.dtype}, torch {row.torch}, Python {row.python}.{gpu} Medians (p20 to p80)."
    )
